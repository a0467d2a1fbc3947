"""Sweep over keys of a probe: one scan per combination of their values.

A sweep with a directory resumes: a cell is skipped if its directory holds a run with the same settings from the same version of
propcheck.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from propcheck import __version__
from propcheck.api.options import keyword_options, storable
from propcheck.api.requests import scan_request
from propcheck.api.run import as_text
from propcheck.api.run_directory import RunDirectory, check_writable
from propcheck.api.scan import judge, measure_and_judge
from propcheck.comparison import sweep as sweep_records
from propcheck.config.fingerprint import config_hash
from propcheck.config.grid import axes, grid
from propcheck.config.pyproject import read_settings
from propcheck.config.resolve import Override
from propcheck.errors import PropcheckError
from propcheck.records.store import read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from propcheck.api.options import ScanOptions
    from propcheck.api.requests import ScanRequest
    from propcheck.config.grid import Axis, Cell
    from propcheck.config.probe import Probe
    from propcheck.records import Run


class Sweep:
    """The result of a sweep. Printing it shows the table of the command line.

    Attributes
    ----------
    record : propcheck.comparison.sweep.SweepResult
        Everything, as plain records.
    """

    def __init__(self, record: sweep_records.SweepResult) -> None:
        self.record = record

    @property
    def cells(self) -> tuple[sweep_records.Outcome, ...]:
        """The cells in order, each with ``cell.labels``, ``status``, ``run`` and ``reason``."""
        return self.record.outcomes

    def plot(self, path: str | Path) -> Path | None:
        """Draw all cells in one plot; None if every cell failed.

        Raises
        ------
        PropcheckError
            The file cannot be written.
        """
        from propcheck.render.plots.overlay import write_sweep_plot

        runs = [(outcome.cell.labels, outcome.run) for outcome in self.cells if outcome.run is not None]
        try:
            return write_sweep_plot(runs, Path(path)) if runs else None
        except OSError as error:
            raise PropcheckError(f"{path}: {error.strerror or error}") from error

    def __str__(self) -> str:
        from propcheck.render.terminal.sweep_table import print_sweep

        return as_text(lambda console: print_sweep(self.record, console))

    def __repr__(self) -> str:
        return f"<propcheck.Sweep of {self.record.target}: {len(self.cells)} cells>"


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell and its scan, or the reason why that was refused."""

    cell: Cell
    request: ScanRequest | None
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The scans of a sweep."""

    target: str
    axes: tuple[Axis, ...]
    cells: tuple[PlannedCell, ...]
    is_in_process: bool = False  # what the target builds may change without a trace, so no cell is skipped

    @property
    def scans(self) -> list[ScanRequest]:
        """The scans of the cells that were not refused; there is at least one."""
        return [cell.request for cell in self.cells if cell.request is not None]


def sweep(
    target: Any, *, vary: Mapping[str, Sequence[Any]], out: str | Path | None = None, plots: bool = False, **options: Any
) -> Sweep:
    """Scan a target once per combination of the values of some keys.

    A cell that is refused or fails does not end the sweep; it has a ``reason`` instead of a run.

    Parameters
    ----------
    target
        As :func:`propcheck.scan` takes it.
    vary
        Keys of the probe (``propcheck keys``) and their values: ``{"residual.placement": ["pre", "post"]}``. Arguments of a
        callable are ``python.args.KEY``, keys of a config.json ``huggingface.overrides.KEY``.
    out
        Where the runs are written, one directory per cell; cells that it already holds are skipped. None: nothing is written.
    plots
        Draw the plots of each run that is written, and ``sweep.png`` with all of them.
    options
        Options of :func:`propcheck.scan`.

    Raises
    ------
    PropcheckError
        The target, a key or an option is wrong, or every cell is refused (status 2 of the command line).
    """
    overrides = {
        key: tuple(Override(key, storable(value), f"vary[{key!r}] = {value!r}") for value in values)
        for key, values in vary.items()
    }
    request = sweep_request(target, axes(overrides), keyword_options(options))
    return run_sweep(request, None if out is None else RunDirectory(Path(out), plots=plots))


def sweep_request(target: Any, varied: tuple[Axis, ...], options: ScanOptions) -> SweepRequest:
    """Prepare and check all cells before the first is scanned; a cell may be refused.

    Raises
    ------
    PropcheckError
        An option sets a key that is varied, a key is unknown, or every cell is refused (the first reason).
    """
    keys = {axis.key for axis in varied}
    for override in options.overrides:
        if override.key in keys:
            raise PropcheckError(f"{override.origin}: {override.key} is varied as well; remove one of the two")
    settings = read_settings(Path.cwd())
    planned: list[PlannedCell] = []
    refusals: list[PropcheckError] = []
    for cell in grid(varied):
        try:
            request = scan_request(
                target, dataclasses.replace(options, overrides=(*options.overrides, *cell.overrides)), settings
            )
            planned.append(PlannedCell(cell, request))
        except PropcheckError as error:
            if _is_unknown_key(error):
                raise
            refusals.append(error)
            planned.append(PlannedCell(cell, None, _reason(error)))
    if len(refusals) == len(planned):
        raise refusals[0]
    named = next(cell.request.target for cell in planned if cell.request is not None)
    return SweepRequest(named, varied, tuple(planned), is_in_process=not isinstance(target, str))


def _is_unknown_key(error: PropcheckError) -> bool:
    """Whether a key does not exist: a typo that ends the sweep, while a refused value is a result."""
    cause = error.__cause__
    return isinstance(cause, ValidationError) and any(detail["type"] == "extra_forbidden" for detail in cause.errors())


def run_sweep(
    request: SweepRequest,
    directory: RunDirectory | None,
    report: Callable[[sweep_records.Outcome], None] | None = None,
    *,
    debug: bool = False,
) -> Sweep:
    """Scan the cells that are not done, one after the other.

    A cell that fails leaves no run in its directory, not even an earlier one with other settings. A run that is skipped is
    judged again by the current rules.

    ``directory`` holds one run directory per cell; without it nothing is written. ``report`` is called with each outcome as
    soon as it is known. ``debug`` prints the traceback of a cell that fails on standard error.

    Raises
    ------
    PropcheckError
        The directory cannot be written.
    """
    if directory is not None:
        check_writable(directory.path)
        (directory.path / "sweep.png").unlink(missing_ok=True)  # it may show other cells
    outcomes: list[sweep_records.Outcome] = []
    for planned in request.cells:
        outcomes.append(_try_cell(planned, directory, resume=not request.is_in_process, debug=debug))
        if report is not None:
            report(outcomes[-1])
    path = None if directory is None else directory.path
    result = Sweep(sweep_records.SweepResult(request.target, path, request.axes, tuple(outcomes)))
    if directory is not None and directory.plots:
        result.plot(directory.path / "sweep.png")
    return result


def _try_cell(planned: PlannedCell, directory: RunDirectory | None, *, resume: bool, debug: bool) -> sweep_records.Outcome:
    place = None if directory is None else RunDirectory(directory.path / planned.cell.name, directory.plots)
    try:
        return _scan_cell(planned, place, resume=resume)
    except Exception as error:  # noqa: BLE001 - a scan that fails must not end the others
        if debug:
            traceback.print_exc()
        return sweep_records.Outcome(planned.cell, "failed", None, _reason(error))


def _scan_cell(planned: PlannedCell, place: RunDirectory | None, *, resume: bool) -> sweep_records.Outcome:
    request = planned.request
    if request is not None and place is not None and resume and (done := _finished_run(request, place.path)) is not None:
        return sweep_records.Outcome(planned.cell, "skipped", _judge_again(done, request, place))
    if place is not None:
        _discard_run(place.path)
    if request is None:
        return sweep_records.Outcome(planned.cell, "failed", None, planned.refusal)
    run = measure_and_judge(request)
    return sweep_records.Outcome(planned.cell, "scanned", run if place is None else place.write(run))


def _discard_run(directory: Path) -> None:
    try:
        (directory / "run.json").unlink(missing_ok=True)
    except OSError as error:
        raise PropcheckError(f"{directory}: {error.strerror or error}") from error


def _finished_run(request: ScanRequest, directory: Path) -> Run | None:
    """Read the run of a cell if a scan would give the same now."""
    try:
        run = read_run(directory)
        is_same = run.config_hash == config_hash(request.probe)
    except (PropcheckError, OSError):  # no run yet, or damaged; or a file of the target is missing, which its scan reports
        return None
    if _code_changed(request.probe, directory / "run.json"):
        return None
    # The hash leaves out where files lie, and of input files it covers nothing else.
    inputs = request.probe.model_dump(mode="json", include={"inputs"})["inputs"]
    is_same = is_same and run.versions.get("propcheck") == __version__ and run.settings.get("inputs") == inputs
    return run if is_same else None


def _code_changed(probe: Probe, run: Path) -> bool:
    """Whether code that the target may import, in its folder or below, is newer than a run.

    The hash of the settings covers the content of the target's own file, but only the name of a module.
    """
    place = probe.python.target.rpartition(":")[0]
    if not place:
        return False
    if place.endswith(".py"):
        folders = [Path(place).parent]
    else:
        try:
            spec = importlib.util.find_spec(place.partition(".")[0])  # the outermost package: nothing is imported
        except (ImportError, ValueError):
            return False
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    written = run.stat().st_mtime
    return any(file.stat().st_mtime > written for folder in folders for file in folder.rglob("*.py"))


def _judge_again(run: Run, request: ScanRequest, place: RunDirectory) -> Run:
    """Judge by the current rules, and write what that changes and the plots that are missing."""
    judged = dataclasses.replace(judge(run, request), path=str(place.path))
    # By their texts: NaN is not equal to itself.
    if repr(judged.findings) != repr(run.findings) or judged.path != run.path or place.lacks_plots:
        return place.write(judged)
    return judged


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PropcheckError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{f': {text}' if text else ''}"
    return f"{type(error).__name__}: {text} (a bug in propcheck; --debug shows the traceback)"
