"""For those who gate in their test suite: ``propcheck.testing.assert_healthy(target, baseline=...)``."""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.api.compare import gate
from propcheck.api.scan import Run, scan
from propcheck.errors import PropcheckError
from propcheck.formatting import count
from propcheck.records import FailLevel, failing

if TYPE_CHECKING:
    from propcheck.api.compare import Tolerance

# Set to 1, it writes the baselines instead of judging by them, as `propcheck gate --update-baseline` does.
UPDATE = "PROPCHECK_UPDATE_BASELINE"

_MEANT = f"From a test, {UPDATE}=1 in the environment does what --update-baseline does."


def assert_healthy(
    target: Any,
    baseline: str | Path | None = None,
    *,
    fail_level: FailLevel | None = None,
    tolerance: Tolerance | None = None,
    **options: Any,
) -> Run:
    """Scan a target, and fail where a rule finds something or where it is not as its baseline was.

    Parameters
    ----------
    target
        As :func:`propcheck.scan` takes it, or a path of a probe or config; or what that returned.
    baseline
        A baseline file. With the environment variable ``PROPCHECK_UPDATE_BASELINE=1`` it is written, not read.
    fail_level
        Least severity of a finding that fails. By default ``"error"`` without a baseline, and ``"never"`` with one: the
        findings that the baseline has are known and do not fail the test, errors or not, while a new error or warning fails it
        at every level. Given beside a baseline, it makes known findings fail too.
    tolerance
        What may differ from the baseline, as :func:`propcheck.gate` takes it.
    options
        As :func:`propcheck.scan` takes them.

    Returns
    -------
    Run
        For assertions of your own.

    Raises
    ------
    AssertionError
        With the findings, or the gate's table, as its message.
    PropcheckError
        Where the command line would end with status 2: there is no such baseline, or one of another kind of run.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, not this function's
    if isinstance(target, Run) and options:
        raise PropcheckError(f"{', '.join(options)}: nothing is scanned here, since the target is a run")
    if baseline is None and tolerance is not None:
        raise PropcheckError(f"tolerance = {tolerance!r}: is for a baseline, and none is given")
    levels = _failing(fail_level or ("error" if baseline is None else "never"))
    place = None if baseline is None else Path(baseline)
    update = os.environ.get(UPDATE, "") not in ("", "0")
    if place is not None and not update and not place.exists():  # a scan may take minutes
        raise PropcheckError(f"{place}: no such baseline; run this test once with {UPDATE}=1 to write it, and commit it")
    run = target if isinstance(target, Run) else scan(_named(target), **options)
    if place is not None and update:
        run.save_baseline(place)
    wrong = [] if place is None or update else _changed(run, place, tolerance)
    found = [one for one in run.findings if one.severity in levels]
    if found:
        listed = "\n".join(f"{one.severity} {one.rule} {one.name}\n  {one.message}\n  {one.remedy}" for one in found)
        wrong.append(f"{run.record.target}: {count(len(found), 'finding')} at or above {levels[-1]}\n\n{listed}")
    if wrong:
        raise AssertionError("\n\n".join(wrong))
    return run


def _named(target: Any) -> Any:
    """Name a file below the working directory relative to it, so that a baseline does not say where the checkout lies."""
    if not isinstance(target, str | Path):
        return target
    path = Path(target)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else str(target)


def _failing(fail_level: FailLevel) -> tuple[str, ...]:
    if fail_level not in typing.get_args(FailLevel):
        raise PropcheckError(f"fail_level = {fail_level!r}: must be one of {', '.join(typing.get_args(FailLevel))}")
    return failing(fail_level)


def _changed(run: Run, baseline: Path, tolerance: Tolerance | None) -> list[str]:
    try:
        result = gate(run, baseline, tolerance=tolerance)
    except PropcheckError as error:  # it names the command line's way to a new baseline; this is the test suite's
        raise PropcheckError(f"{error} ({UPDATE}=1 writes it from a test)") from error
    return [] if result.passed else [f"{run.record.target}: not as its baseline was\n\n{result}\n{_MEANT}"]
