"""``propcheck compare``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck.cli import operands as given
from propcheck.cli import options as shared
from propcheck.cli.output import OutputOptions, check, emit, machine_views
from propcheck.cli.running import check_not_read, check_writable, save, target_files
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.comparison.compare import RunComparison
    from propcheck.records import Run


@shared.grouped
def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Two or more: run directories, Parquet files of one, baselines, or targets as `propcheck scan` takes them, "
            "which are scanned now. The first is what the others are held against.",
        ),
    ],
    *,
    tolerance: given.Allowed = None,
    detail: Annotated[
        Literal["few", "block"], typer.Option(help="How many blocks the table along the depth shows: a few, or every one.")
    ] = "few",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where the plots go, and the runs of targets that are scanned; default: reports/compare-A-B, overwritten.",
        ),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw a plot for each quantity.")] = True,
    options: shared.ScanOptions,
    output: OutputOptions,
) -> None:
    """Set runs side by side: what changed, where it starts, and which findings were won and lost.

    Sites are matched by block and kind of sublayer, whatever modules are called; in models of different depth by relative
    depth. Status 0: compared, whatever differs; 2: a bad run, target or option; 130: interrupted.
    """
    from propcheck.config.gate_settings import read_tolerances
    from propcheck.config.pyproject import read_settings

    if len(runs) < 2:
        raise PropcheckError(f"{runs[0]}: a comparison takes two runs or more")
    settings = read_settings(Path.cwd())
    both = [given.side(text, options, settings) for text in runs]
    if all(side.run is not None for side in both):
        given.refuse_unused(options)
    allowed = read_tolerances(both[-1].gate, tolerance or ())
    names = [_name(side, text) for side, text in zip(both, runs, strict=True)]
    directory = out or Path("reports") / f"compare-{'-'.join(names)}"[:100]
    writes = plots or any(side.request is not None for side in both)
    if writes:
        check_writable(directory)
    elif out is not None:
        raise PropcheckError(f"--out {out}: nothing is written there, without plots and with runs that are stored already")
    places = [directory / f"{index}-{name}" for index, name in enumerate(names, start=1)]
    for side, place in zip(both, places, strict=True):
        if side.request is not None:
            check_not_read(place, "compare", runs)
    check(output, [path for text in runs for path in target_files(text)])
    command = shlex.join(["propcheck", *ctx.obj])
    found = [
        _kept(side.scanned(command=command, quiet=output.quiet), side, place, plots=plots)
        for side, place in zip(both, places, strict=True)
    ]
    from propcheck.comparison import compare as comparing

    comparison = comparing.compare(found, allowed)
    if plots:
        _draw(comparison, directory)
    _emit(comparison, output, detail)
    if writes and not output.quiet:
        print(f"propcheck: wrote {directory}", file=sys.stderr)


def _name(side: given.Side, text: str) -> str:
    return side.request.probe.name if side.request is not None else Path(text).resolve().stem


def _kept(run: Run, side: given.Side, directory: Path, *, plots: bool) -> Run:
    """Write the run of a target that was scanned, so that it need not be again."""
    if side.request is None:
        return run
    run = dataclasses.replace(run, path=str(directory))
    save(run, directory, plots=plots)
    return run


def _draw(comparison: RunComparison, directory: Path) -> None:
    from propcheck.render.plots.overlay import write_overlays

    try:
        write_overlays(comparison.named, directory)
    except OSError as error:
        raise PropcheckError(f"{directory}: {error.strerror or error}") from error


def _emit(comparison: RunComparison, output: OutputOptions, detail: Literal["few", "block"]) -> None:
    from propcheck.render.comparison_results import comparison_results
    from propcheck.render.source_location import location_of
    from propcheck.render.terminal.comparison_table import comparison_markdown, print_comparison

    emit(
        output,
        table=lambda console: print_comparison(comparison, console, detail),
        views={
            "json": lambda: comparison_to_json(comparison),
            "markdown": lambda: comparison_markdown(comparison),
            **machine_views(lambda: comparison_results(comparison, location_of(comparison.runs[-1].target))),
        },
    )
