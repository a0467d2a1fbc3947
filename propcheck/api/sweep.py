"""A grid of scans: a run directory for each combination of the values that are varied, and what became of each.

Two calls over the same directory scan what the second lacks: a cell whose run is of the same settings and the same version of
propcheck is read back.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from propcheck import __version__
from propcheck.config.resolve import parse_override
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from propcheck.cli.options import Request, ScanOptions
    from propcheck.config.grid import Cell
    from propcheck.config.probe import Probe
    from propcheck.config.pyproject import ToolSettings
    from propcheck.records import Run


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell and what is to be scanned for it, or why that is refused."""

    cell: Cell
    request: Request | None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell: its run, or the reason why there is none."""

    cell: Cell
    status: Literal["scanned", "skipped", "failed"]
    run: Run | None
    reason: str | None = None


def plan(target: str, cells: Sequence[Cell], options: ScanOptions, settings: ToolSettings) -> tuple[Planned, ...]:
    """Check all cells before the first is scanned.

    Parameters
    ----------
    target
        As ``propcheck scan`` takes it.
    cells
        Of :func:`propcheck.config.grid.grid`.
    options, settings
        What holds for every cell.

    Returns
    -------
    tuple of Planned
        One a cell; a cell that is refused has its reason.

    Raises
    ------
    PropcheckError
        An option gives a key that is varied, no schema knows a key, or all cells are refused: the first reason.
    """
    from propcheck.cli.options import request

    varied = {override.key for cell in cells for override in cell.overrides}
    for given in options.overrides():
        one = parse_override(given) if isinstance(given, str) else given
        if one.key in varied:
            raise PropcheckError(f"{one.origin}: {one.key} is varied; drop this option or the --vary")
    planned: list[Planned] = []
    refusals: list[PropcheckError] = []
    for cell in cells:
        try:
            planned.append(Planned(cell, request(target, options, settings, cell.overrides)))
        except PropcheckError as error:
            if _names_no_key(error):
                raise
            refusals.append(error)
            planned.append(Planned(cell, None, _reason(error)))
    if len(refusals) == len(cells):
        raise refusals[0]
    return tuple(planned)


def _names_no_key(error: PropcheckError) -> bool:
    """Whether a key is refused that there is not: a slip of the hand, while a value that is refused is an answer."""
    from pydantic import ValidationError

    cause = error.__cause__
    return isinstance(cause, ValidationError) and any(one["type"] == "extra_forbidden" for one in cause.errors())


def scan_cells(
    planned: Sequence[Planned], directory: Path, *, command: str | None, quiet: bool, plots: bool, debug: bool
) -> Iterator[Outcome]:
    """Scan the cells that are not done, one after the other, and write each where its name says.

    A cell that fails has no run in its directory, not even one of other settings from before.

    Parameters
    ----------
    planned
        Of :func:`plan`.
    directory
        Holds a run directory a cell.
    command
        The command line, kept in the runs.
    quiet, plots
        Draw no bar; draw the two plots of each run.
    debug
        Print the traceback of a cell that fails on standard error.

    Yields
    ------
    Outcome
        As soon as it is known. A run that is read back is judged again, by the rules that hold now.
    """
    from propcheck.cli.running import run_scan, save

    for one in planned:
        place = directory / one.cell.name
        if one.request is None:
            _forget(place)
            yield Outcome(one.cell, "failed", None, one.refused)
            continue
        if (done := _done(one.request, place)) is not None:
            run = _judged_again(done, one.request, place, plots=plots)
            yield Outcome(one.cell, "skipped", run)
            continue
        try:
            _forget(place)
            run = dataclasses.replace(run_scan(one.request, command=command, quiet=quiet), path=str(place))
            save(run, place, plots=plots)
        except Exception as error:  # noqa: BLE001 - whatever ends one scan says nothing about the others
            if debug:
                traceback.print_exc()
            yield Outcome(one.cell, "failed", None, _reason(error))
        else:
            yield Outcome(one.cell, "scanned", run)


def _forget(place: Path) -> None:
    try:
        (place / "run.json").unlink(missing_ok=True)
    except OSError as error:
        raise PropcheckError(f"{place}: {error.strerror or error}") from error


def _done(request: Request, place: Path) -> Run | None:
    """Read the run of a cell if it is what a scan would give now."""
    from propcheck.config.fingerprint import config_hash
    from propcheck.records.store import read_run

    try:
        run = read_run(place)
        same = run.config_hash == config_hash(request.probe)
    except (PropcheckError, OSError):  # none yet, or cut short; or a file of the target is gone, which its scan says better
        return None
    if _code_changed(request.probe, place / "run.json"):
        return None
    # The hash leaves out where files lie: of those that are read for inputs it has nothing else.
    inputs = request.probe.model_dump(mode="json", include={"inputs"})["inputs"]
    return run if same and run.versions.get("propcheck") == __version__ and run.settings.get("inputs") == inputs else None


def _code_changed(probe: Probe, run: Path) -> bool:
    """Whether code that the target's own file may import, in its folder or below, is younger than a run.

    The hash of the settings knows the file itself; of a module it knows the name alone.
    """
    place = probe.python.target.rpartition(":")[0]
    if not place:
        return False
    if place.endswith(".py"):
        folders = [Path(place).parent]
    else:
        try:
            found = importlib.util.find_spec(place.partition(".")[0])  # of the outermost package: nothing is imported
        except (ImportError, ValueError):
            return False
        folders = [Path(one) for one in (found and found.submodule_search_locations) or ()]
    made = run.stat().st_mtime
    return any(file.stat().st_mtime > made for folder in folders for file in folder.rglob("*.py"))


def _judged_again(run: Run, request: Request, place: Path, *, plots: bool) -> Run:
    """Judge by the rules selected now, and write what that changes; plots that are missing are drawn."""
    import propcheck.rules
    from propcheck.cli.running import save

    findings = propcheck.rules.judge(run, settings=request.probe.rules, select=request.select, ignore=request.ignore)
    judged = dataclasses.replace(run, findings=findings, path=str(place))
    # By their texts: NaN is not equal to itself.
    undrawn = plots and not all((place / name).exists() for name in ("forward.png", "backward.png"))
    if repr(judged.findings) != repr(run.findings) or judged.path != run.path or undrawn:
        save(judged, place, plots=plots)
    return judged


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, PropcheckError):
        return text
    if isinstance(error, MemoryError):
        return f"out of memory{f': {text}' if text else ''}"
    return f"{type(error).__name__}: {text} (a fault of propcheck's; --debug shows where)"
