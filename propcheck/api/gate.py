"""Gate a run: compare it with its baseline, or make it the baseline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck import records
from propcheck.api.baseline import make_baseline
from propcheck.api.options import ScanOptions, keyword_options
from propcheck.api.run import as_text
from propcheck.api.sides import check_options_are_used, is_stored, read_side, run_side, side_tolerances
from propcheck.comparison import gate as comparison
from propcheck.comparison.comparable import check_comparable, early_refusals, refuse
from propcheck.config.pyproject import read_settings
from propcheck.errors import PropcheckError
from propcheck.records.baseline import read_baseline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.api.run_directory import RunDirectory
    from propcheck.api.sides import Side, Tolerance
    from propcheck.comparison.differences import Difference
    from propcheck.config.pyproject import ToolSettings
    from propcheck.config.tolerances import Tolerances


class Gate:
    """The verdict of a gate. Printing it shows the table of the command line.

    Attributes
    ----------
    record : propcheck.comparison.gate.GateResult
        Everything, as plain records.
    """

    def __init__(self, record: comparison.GateResult) -> None:
        self.record = record

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return self.record.passed

    @property
    def findings(self) -> tuple[records.Finding, ...]:
        """One finding per quantity that differs; those of severity ``error`` fail the gate."""
        return self.record.findings

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Every number outside its tolerance, with its place."""
        return self.record.differences

    @property
    def start(self) -> records.Place | None:
        """Where the change starts."""
        return self.record.start

    def __str__(self) -> str:
        from propcheck.render.terminal.gate_table import print_gate

        return as_text(lambda console: print_gate(self.record, console))

    def __repr__(self) -> str:
        return f"<propcheck.Gate of {self.record.run.target}: {'passed' if self.passed else 'failed'}>"


@dataclass(frozen=True, slots=True)
class GateRequest:
    """A run to gate."""

    run: Side
    baseline: Side | None  # None: the run becomes the baseline
    tolerances: Tolerances
    force: bool = False
    is_paired: bool = False  # the user named the baseline together with the run, so it may be another target


def gate(run: Any, baseline: Any, *, tolerance: Tolerance | None = None, force: bool = False, **options: Any) -> Gate:
    """Compare a run with its baseline.

    Parameters
    ----------
    run, baseline
        A result of :func:`propcheck.scan`, a run directory, a baseline file, or a target, which is scanned.
    tolerance
        What may differ, as in :func:`compare`; default: the ``[gate]`` section of the run's probe, else 5 %.
    force
        Also compare with a baseline of another precision, input, seed set or older schema, or a stored one of another target.
    options
        Options of :func:`propcheck.scan`, for the targets.

    Raises
    ------
    PropcheckError
        A run, baseline, target, option or file is wrong (status 2 of the command line).
    """
    return run_gate(gate_request(run, baseline, keyword_options(options), tolerance=tolerance, force=force))


def gate_request(
    run: Any,
    baseline: Any | None,
    options: ScanOptions,
    *,
    tolerance: Tolerance | Sequence[str] | None = None,
    force: bool = False,
) -> GateRequest:
    """Read both sides and check everything that can be checked before a scan.

    Without a baseline the run is to become one. ``tolerance`` may be the values of ``--tolerance``.

    Raises
    ------
    PropcheckError
        As :func:`gate`.
    """
    settings = read_settings(Path.cwd())
    side = read_side(run, options, settings, force=force)
    reference = None if baseline is None else _read_baseline(baseline, options, settings, force=force)
    check_options_are_used((side, reference), options)
    tolerances = side_tolerances(side, tolerance)
    is_paired = not is_stored(baseline)
    if isinstance(reference, records.Run) and not isinstance(side, records.Run) and not force and not is_paired:
        refuse(early_refusals(side.probe, side.target, reference), reference)
    return GateRequest(side, reference, tolerances, force=force, is_paired=is_paired)


def run_gate(request: GateRequest, directory: RunDirectory | None = None) -> Gate:
    """Scan the targets and judge; with a directory, the run of a target is written to it.

    Raises
    ------
    PropcheckError
        The runs cannot be compared, or the directory cannot be written.
    """
    assert request.baseline is not None
    run = _scanned(request.run, directory)
    baseline = run_side(request.baseline)
    if not request.force:
        check_comparable(run, baseline, named=request.is_paired)
    return Gate(comparison.gate(run, baseline, request.tolerances))


def update_baseline(request: GateRequest, path: Path, directory: RunDirectory | None = None) -> Gate:
    """Scan the target, if it is one, and write the run as a baseline.

    Raises
    ------
    PropcheckError
        The run has a NaN or an infinity, or a file cannot be written.
    """
    run = _scanned(request.run, directory)
    return Gate(make_baseline(run, path, request.tolerances, force=request.force))


def _scanned(side: Side, directory: RunDirectory | None) -> records.Run:
    run = run_side(side)
    return run if directory is None or isinstance(side, records.Run) else directory.write(run)


def _read_baseline(baseline: Any, options: ScanOptions, settings: ToolSettings, *, force: bool) -> Side:
    path = Path(baseline) if isinstance(baseline, str | Path) else None
    if path is not None and path.suffix == ".md" and path.with_suffix(".parquet").exists():
        raise PropcheckError(f"{path}: this is the summary; name the baseline, {path.with_suffix('.parquet')}")
    if path is not None and path.suffix.lower() == ".parquet":
        return dataclasses.replace(read_baseline(path, force=force), path=str(baseline))
    return read_side(baseline, options, settings, force=force)
