"""Gate a model in a test suite: ``propcheck.testing.assert_healthy(target, baseline=...)``."""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.api.gate import gate
from propcheck.api.run import Run
from propcheck.api.scan import scan
from propcheck.config.pyproject import read_settings
from propcheck.errors import PropcheckError
from propcheck.formatting import count
from propcheck.records import FailLevel, failing

if TYPE_CHECKING:
    from propcheck.api.sides import Tolerance

# Set to 1, it writes the baselines instead of comparing with them, like `propcheck gate --update-baseline`.
UPDATE = "PROPCHECK_UPDATE_BASELINE"

_INTENDED = f"If the change is intended, run this test once with {UPDATE}=1 to update the baseline."


def assert_healthy(
    target: Any,
    baseline: str | Path | None = None,
    *,
    fail_level: FailLevel | None = None,
    tolerance: Tolerance | None = None,
    **options: Any,
) -> Run:
    """Scan a target, and fail if a rule finds something or if it differs from its baseline.

    ``[tool.propcheck]`` in the pyproject.toml of the working directory supplies defaults, as on the command line.

    Parameters
    ----------
    target
        As :func:`propcheck.scan` takes it, or the path of a probe or config, or a result of :func:`propcheck.scan`.
    baseline
        A baseline file. With the environment variable ``PROPCHECK_UPDATE_BASELINE=1`` it is written, not read.
    fail_level
        Lowest severity of a finding that fails. Default without a baseline: ``fail-level`` of the pyproject.toml, else
        ``"error"``. Default with a baseline: ``"never"``, since the gate fails for every new error or warning, while findings
        of the baseline are known; set it to fail for those too.
    tolerance
        What may differ from the baseline, as in :func:`propcheck.gate`.
    options
        As in :func:`propcheck.scan`.

    Returns
    -------
    Run
        For further assertions.

    Raises
    ------
    AssertionError
        The message holds the findings, or the table of the gate.
    PropcheckError
        The target, an option or the baseline is wrong (status 2 of the command line).
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, not this function's
    if isinstance(target, Run) and options:
        raise PropcheckError(f"{', '.join(options)}: no effect, since the target is a run and nothing is scanned")
    if baseline is None and tolerance is not None:
        raise PropcheckError(f"tolerance = {tolerance!r}: needs a baseline")
    levels = _failing_levels(fail_level, has_baseline=baseline is not None)
    path = None if baseline is None else Path(baseline)
    update = os.environ.get(UPDATE, "") not in ("", "0")
    if path is not None and not update and not path.exists():  # a scan may take minutes
        raise PropcheckError(f"{path}: no such baseline; run this test once with {UPDATE}=1 to write it, and commit it")
    run = target if isinstance(target, Run) else scan(_relative(target), **options)
    if path is not None and update:
        run.save_baseline(path)
    failures = [] if path is None or update else _changes(run, path, tolerance)
    findings = [finding for finding in run.findings if finding.severity in levels]
    if findings:
        listed = "\n".join(
            f"{finding.severity} {finding.rule} {finding.name}\n  {finding.message}\n  {finding.remedy}" for finding in findings
        )
        failures.append(f"{run.record.target}: {count(len(findings), 'finding')} at or above {levels[-1]}\n\n{listed}")
    if failures:
        raise AssertionError("\n\n".join(failures))
    return run


def _relative(target: Any) -> Any:
    """Return the path of a file relative to the working directory, so that a baseline does not depend on the checkout."""
    if not isinstance(target, str | Path):
        return target
    path = Path(target)
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else str(target)


def _failing_levels(fail_level: FailLevel | None, *, has_baseline: bool) -> tuple[str, ...]:
    if fail_level is None:
        return failing("never" if has_baseline else read_settings(Path.cwd()).fail_level)
    if fail_level not in typing.get_args(FailLevel):
        raise PropcheckError(f"fail_level = {fail_level!r}: must be one of {', '.join(typing.get_args(FailLevel))}")
    return failing(fail_level)


def _changes(run: Run, baseline: Path, tolerance: Tolerance | None) -> list[str]:
    try:
        result = gate(run, baseline, tolerance=tolerance)
    except PropcheckError as error:  # its message names the flag of the command line; a test has a variable instead
        raise PropcheckError(f"{error} (from a test: {UPDATE}=1)") from error
    return [] if result.passed else [f"{run.record.target}: differs from its baseline\n\n{result}\n{_INTENDED}"]
