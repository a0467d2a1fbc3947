"""``propcheck sweep``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck import records
from propcheck.cli import options as shared
from propcheck.cli.running import check_writable, write_stdout
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.api.sweep import Outcome, Planned
    from propcheck.render.terminal.sweep_table import Sweep


@shared.grouped
def sweep(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(help="What is scanned, as `propcheck scan` takes it.")],
    *,
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=VALUE,VALUE",
            help="A key of the probe (`propcheck keys`) and its values, a scan each; repeatable, for every combination. A list "
            "needs its brackets. For a callable python.args.KEY, for a config.json huggingface.overrides.KEY.",
        ),
    ],
    options: shared.ScanOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds a run directory a cell; default: reports/NAME-sweep.")
    ] = None,
    output_format: Annotated[
        Literal["table", "json", "markdown"], typer.Option(help="What is printed on standard output.")
    ] = "table",
    fail_level: Annotated[
        records.FailLevel | None,
        typer.Option(help="Least severity of a finding that gives status 1; default: error."),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw sweep.png, with all cells in it, and the plots of each run.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Scan a target once for every combination of some values, and put the results side by side.

    A cell that is refused or fails is a row with its reason. A cell whose run is there already, with the same settings and by
    the same version of propcheck, is not scanned again, unless a Python file in the target's folder is younger. A change in
    what else the target imports, or within a file of inputs, is not seen: remove the run then.

    Status 0: no finding at or above the fail level; 1: there is one, or a cell failed; 2: a bad target, option or file;
    130: interrupted, and the same command goes on from there.
    """
    from propcheck.api.sweep import plan, scan_cells
    from propcheck.config.grid import grid, read_axes
    from propcheck.config.pyproject import read_settings
    from propcheck.render.terminal.sweep_table import Sweep, print_sweep, sweep_json, sweep_markdown

    settings = read_settings(Path.cwd())
    axes = read_axes(vary)
    planned = plan(target, grid(axes), options, settings)
    directory = out or Path("reports") / f"{next(one.request.probe.name for one in planned if one.request)}-sweep"
    check_writable(directory)
    (directory / "sweep.png").unlink(missing_ok=True)  # that of other cells
    command = shlex.join(["propcheck", *ctx.obj])
    outcomes: list[Outcome] = []
    try:
        _announce(planned, outcomes, quiet=quiet)
        for outcome in scan_cells(planned, directory, command=command, quiet=quiet, plots=plots, debug=debug):
            outcomes.append(outcome)
            _announce(planned, outcomes, quiet=quiet)
    except KeyboardInterrupt:
        if not quiet:
            print(f"propcheck: interrupted with {len(outcomes)} of {len(planned)} cells in {directory}", file=sys.stderr)
        raise
    result = Sweep(target, directory, axes, tuple(outcomes))
    if plots:
        _draw(result)
    if output_format == "table":
        import rich.console

        console = rich.console.Console()
        with console.capture() as capture:
            print_sweep(result, console)
        write_stdout(capture.get())
    else:
        text = sweep_json(result) if output_format == "json" else sweep_markdown(result)
        write_stdout(text.rstrip("\n") + "\n")
    failing = records.failing(fail_level or settings.fail_level)
    found = [finding for outcome in outcomes if outcome.run is not None for finding in outcome.run.findings]
    failed = any(outcome.status == "failed" for outcome in outcomes)
    raise typer.Exit(int(failed or any(finding.severity in failing for finding in found)))


def _announce(planned: Sequence[Planned], outcomes: Sequence[Outcome], *, quiet: bool) -> None:
    """Say on a terminal which cell is next; the bar of its scan comes under that."""
    if not quiet and sys.stderr.isatty() and len(outcomes) < len(planned):
        name = planned[len(outcomes)].cell.name
        print(f"propcheck: cell {len(outcomes) + 1} of {len(planned)}: {name}", file=sys.stderr)


def _draw(result: Sweep) -> None:
    from propcheck.render.plots.overlay import write_sweep_plot

    cells = [(outcome.cell.labels, outcome.run) for outcome in result.outcomes if outcome.run is not None]
    try:
        if cells:
            write_sweep_plot(cells, result.directory / "sweep.png")
    except OSError as error:
        raise PropcheckError(f"{result.directory}: {error.strerror or error}") from error
