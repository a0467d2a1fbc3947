"""For those who gate in their test suite: ``propcheck.testing.assert_healthy(target, baseline=...)``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from propcheck.api import Run, scan
from propcheck.api_compare import gate
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.api_compare import Tolerance

# Set to 1, it writes the baselines instead of judging by them, as `propcheck gate --update-baseline` does.
UPDATE = "PROPCHECK_UPDATE_BASELINE"

_SEVERITIES = ("note", "warning", "error")


def assert_healthy(
    target: Any,
    baseline: str | Path | None = None,
    *,
    fail_level: Literal["error", "warning", "note", "never"] = "error",
    tolerance: Tolerance | None = None,
    **options: Any,
) -> Run:
    """Scan a target, and fail where a rule finds something or where it is not as its baseline was.

    Parameters
    ----------
    target
        As :func:`propcheck.scan` takes it; or what that returned.
    baseline
        A baseline file. With the environment variable ``PROPCHECK_UPDATE_BASELINE=1`` it is written, not read. Findings that
        the baseline has do not fail the test: they are known.
    fail_level
        Least severity of a finding that fails.
    tolerance
        As :func:`propcheck.gate` takes it.
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
    run = target if isinstance(target, Run) else scan(target, **options)
    if baseline is not None:
        if os.environ.get(UPDATE, "") not in ("", "0"):
            run.save_baseline(baseline)
        elif not Path(baseline).exists():
            raise PropcheckError(f"{baseline}: no such baseline; run the tests once with {UPDATE}=1 to write it, and commit it")
        else:
            result = gate(run, Path(baseline), tolerance=tolerance)
            if not result.passed:
                raise AssertionError(f"{run.record.target} is not as its baseline {baseline} was\n\n{result}")
        return run
    failing = () if fail_level == "never" else _SEVERITIES[_SEVERITIES.index(fail_level) :]
    found = [one for one in run.findings if one.severity in failing]
    if found:
        listed = "\n".join(f"{one.severity} {one.rule} {one.name}\n  {one.message}\n  {one.remedy}" for one in found)
        raise AssertionError(f"{run.record.target}: {len(found)} at or above {fail_level}\n{listed}")
    return run
