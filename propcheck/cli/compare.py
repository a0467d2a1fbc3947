"""``propcheck compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck.api.options import ScanOptions
from propcheck.cli.console import check_not_read, result_on_stdout, say, target_files, with_progress
from propcheck.cli.options import with_options
from propcheck.cli.output import OutputOptions, Tolerances, check_outputs, emit, machine_views
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.comparison.compare import RunComparison


@with_options
def compare(  # noqa: PLR0913 - one parameter per option
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN RUN...",
            help="Two or more run directories, Parquet files of a run, baselines, or targets as in `propcheck scan`, which are "
            "scanned now. The others are compared with the first.",
        ),
    ],
    *,
    tolerance: Tolerances = None,
    detail: Annotated[
        Literal["few", "block"], typer.Option(help="Blocks in the table along the depth: a few, or every one.")
    ] = "few",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Directory of the plots and of the runs of scanned targets; default: reports/compare-A-B, overwritten.",
        ),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw one plot per metric.")] = True,
    options: ScanOptions,
    output: OutputOptions,
) -> None:
    """Compare runs: what changed, where it starts, and which findings are new or gone.

    Sites are matched by block and kind of sublayer, whatever the modules are called; in models of different depth, by relative
    depth. Status 0: compared, whatever differs; 2: a wrong run, target or option; 130: interrupted.
    """
    from propcheck.api.compare import compare_request, run_comparison
    from propcheck.api.requests import ScanRequest
    from propcheck.api.run_directory import RunDirectory, check_writable

    request = compare_request(runs, with_progress(options, quiet=output.quiet), tolerance)
    scans = {text: side for text, side in zip(runs, request.sides, strict=True) if isinstance(side, ScanRequest)}
    names = [scans[text].probe.name if text in scans else Path(text).resolve().stem for text in runs]
    directory = out or Path("reports") / f"compare-{'-'.join(names)}"[:100]
    places = [RunDirectory(directory / f"{index}-{name}", plots=plots) for index, name in enumerate(names, start=1)]
    if plots or scans:
        check_writable(directory)
    elif out is not None:
        raise PropcheckError(f"--out {out}: nothing to write, since every run is stored and --no-plots is set")
    for text, place in zip(runs, places, strict=True):
        if text in scans:
            check_not_read(place.path, "compare", runs)
    check_outputs(output, [path for text in runs for path in target_files(text)])
    with result_on_stdout():
        comparison = run_comparison(request, places)
    if plots:
        comparison.plot(directory)
    _emit(comparison.record, output, detail)
    if plots or scans:
        say(f"wrote {directory}", quiet=output.quiet)


def _emit(comparison: RunComparison, output: OutputOptions, detail: Literal["few", "block"]) -> None:
    from propcheck.render.comparison_json import comparison_to_json
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
