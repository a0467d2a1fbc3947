"""Write a run as a baseline file."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.gate import check_fit, gate
from propcheck.config.tolerances import Tolerances
from propcheck.errors import PropcheckError
from propcheck.formatting import count
from propcheck.records.baseline import read_baseline, write_baseline
from propcheck.render.baseline_summary import baseline_summary

if TYPE_CHECKING:
    from pathlib import Path

    from propcheck.comparison.gate import GateResult
    from propcheck.records import Run


def make_baseline(run: Run, path: Path, tolerances: Tolerances | None = None, *, force: bool = False) -> GateResult:
    """Write a baseline and its summary, and return the gate of the run against itself, with ``written`` and ``notes`` set.

    The notes say what changed, by more than the tolerances, since the previous baseline. ``force`` also writes a run with NaN
    or infinite values.

    Raises
    ------
    PropcheckError
        The file cannot be written, or the run has a NaN or an infinity.
    """
    tolerances = tolerances or Tolerances()
    result = gate(run, dataclasses.replace(run, path=str(path)), tolerances)
    if not force:
        check_fit(result)
    try:
        previous: Run | None = read_baseline(path, force=True)
    except PropcheckError:
        previous = None  # none yet, or a broken one that this call replaces
    write_baseline(run, path, baseline_summary(run))
    notes = [f"Baseline written: {path} (summary: {path.with_suffix('.md')}). Commit both."]
    if previous is not None:
        changes = gate(run, previous, tolerances)
        notes.append(
            f"Since the previous baseline, {count(len(changes.differences), 'number')} changed by more than the tolerance."
        )
        notes += [f"{finding.name}: {finding.message}" for finding in changes.findings]
    return dataclasses.replace(result, notes=tuple(notes), written=str(path))
