"""The command line's compare and gate as functions: ``propcheck.compare(...)`` and ``propcheck.gate(...)``."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.api.scan import Run, printed, scan
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck import records
    from propcheck.comparison import compare as comparing
    from propcheck.comparison import gate as gating
    from propcheck.comparison.differences import Difference

Tolerance = str | float | typing.Mapping[str, str | float]


class Gate:
    """What a gate says of a run beside its baseline. Printed, it is the table that the command line shows.

    Attributes
    ----------
    record : propcheck.comparison.gate.GateResult
        Everything, as plain records.
    """

    def __init__(self, record: gating.GateResult) -> None:
        self.record = record

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.record.passed

    @property
    def findings(self) -> tuple[records.Finding, ...]:
        """What differs, a finding a quantity; those of severity ``error`` fail the gate."""
        return self.record.findings

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Every number outside its tolerance, with its place."""
        return self.record.differences

    @property
    def start(self) -> records.Place | None:
        """Where the change begins."""
        return self.record.start

    def __str__(self) -> str:
        from propcheck.render.terminal.gate_table import print_gate

        return printed(lambda console: print_gate(self.record, console))

    def __repr__(self) -> str:
        return f"<propcheck.Gate of {self.record.run.target}: {'passed' if self.passed else 'failed'}>"


class Comparison:
    """Runs side by side. Printed, it is the table that the command line shows.

    Attributes
    ----------
    record : propcheck.comparison.compare.RunComparison
        Everything, as plain records.
    """

    def __init__(self, record: comparing.RunComparison) -> None:
        self.record = record

    @property
    def contrasts(self) -> tuple[comparing.PairwiseComparison, ...]:
        """Each run but the first beside the first."""
        return self.record.contrasts

    def plot(self, directory: str | Path) -> list[Path]:
        """Draw one overlay plot a quantity, and return the files."""
        from propcheck.render.plots.overlay import write_overlays

        return write_overlays(self.record.named, Path(directory))

    def __str__(self) -> str:
        from propcheck.render.terminal.comparison_table import print_comparison

        return printed(lambda console: print_comparison(self.record, console))

    def __repr__(self) -> str:
        return f"<propcheck.Comparison of {', '.join(run.target for run in self.record.runs)}>"


def compare(*runs: Any, tolerance: Tolerance | None = None, **options: Any) -> Comparison:
    """Set runs side by side.

    Parameters
    ----------
    runs
        Two or more: what :func:`propcheck.scan` returned, run directories and Parquet files, or targets, which are scanned.
    tolerance
        From which difference on a number counts as changed: ``"5%"``, or ``{"loss": "1%", "layers.0.*": "20%"}``.
    options
        As :func:`propcheck.scan` takes them, for the targets.

    Raises
    ------
    PropcheckError
        Where the command line would end with status 2.
    """
    from propcheck.comparison import compare as comparing

    if len(runs) < 2:
        raise PropcheckError("a comparison takes two runs or more")
    _refuse_unused(runs, options)
    found = [_run(one, options) for one in runs]
    return Comparison(comparing.compare(found, _tolerances(found[-1], tolerance)))


def gate(run: Any, baseline: Any, *, tolerance: Tolerance | None = None, force: bool = False, **options: Any) -> Gate:
    """Hold a run against its baseline.

    Parameters
    ----------
    run, baseline
        What :func:`propcheck.scan` returned, a run directory or baseline file, or a target, which is scanned.
    tolerance
        What passes, as :func:`compare` takes it; by default the ``[gate]`` of the run's probe, else 5 %.
    force
        Compare also with a baseline of another precision, input, seed set or older schema; with one that is stored, of another
        target too.
    options
        As :func:`propcheck.scan` takes them, for the targets.

    Raises
    ------
    PropcheckError
        Where the command line would end with status 2.
    """
    from propcheck.comparison import gate as gating
    from propcheck.comparison.comparable import check_comparable

    _refuse_unused((run, baseline), options)
    here, there = _run(run, options), _run(baseline, options, force=force)
    if not force:
        check_comparable(here, there, named=not _is_stored(baseline))
    return Gate(gating.gate(here, there, _tolerances(here, tolerance)))


def _refuse_unused(sides: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Refuse options of a scan where nothing is scanned: they would change nothing, and look as if they did."""
    if options and all(isinstance(side, Run) or _is_stored(side) for side in sides):
        raise PropcheckError(f"{', '.join(options)}: nothing is scanned here, since every side is a run")


def _is_stored(side: object) -> bool:
    from propcheck.records.load import is_run

    return isinstance(side, Path) or (isinstance(side, str) and is_run(side))


def _run(side: Any, options: Mapping[str, Any], *, force: bool = False) -> records.Run:
    if isinstance(side, Run):
        return side.record
    if not _is_stored(side):
        return scan(side, **options).record
    from propcheck.records.load import load

    run = load(Path(side), force=force)
    return run if run.path else dataclasses.replace(run, path=str(side))


def _tolerances(run: records.Run, given: Tolerance | None) -> Any:
    from propcheck.config.gate_settings import read_tolerances

    if given is None:
        return read_tolerances(run.settings.get("gate", {}))
    parts = [f"{key}={value}" for key, value in given.items()] if isinstance(given, typing.Mapping) else [str(given)]
    return read_tolerances(run.settings.get("gate", {}), parts, "tolerance")
