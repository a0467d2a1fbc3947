"""``propcheck sweep``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck import records
from propcheck.api.options import ScanOptions
from propcheck.cli.console import result_on_stdout, say, with_progress, write_stdout
from propcheck.cli.options import with_options

if TYPE_CHECKING:
    from propcheck.api.run_directory import RunDirectory
    from propcheck.api.sweep import Sweep, SweepRequest
    from propcheck.comparison.sweep import Outcome


@with_options
def sweep(  # noqa: PLR0913 - one parameter per option
    target: Annotated[str, typer.Argument(help="The target to scan, as in `propcheck scan`.")],
    *,
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=VALUE,VALUE",
            help="A key of the probe (`propcheck keys`) and its values; repeatable: every combination is scanned. Write a list "
            "with its brackets. Arguments of a callable are python.args.KEY, keys of a config.json huggingface.overrides.KEY.",
        ),
    ],
    options: ScanOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Holds one run directory per cell; default: reports/NAME-sweep.")
    ] = None,
    output_format: Annotated[Literal["table", "json", "markdown"], typer.Option(help="Format of standard output.")] = "table",
    fail_level: Annotated[
        records.FailLevel | None,
        typer.Option(help="Lowest severity that makes the command exit with status 1; default: error."),
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw sweep.png, with all cells in it, and the plots of each run.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Scan a target once per combination of values, and show the results side by side.

    A sweep continues past failures: such a cell is a row with its reason. It resumes where it stopped: a cell is skipped if it
    has a run with the same settings from the same version of propcheck, unless a Python file in the target's folder is newer.
    Changes in other imports, or in the content of an input file, are not detected; delete the run then.

    Status 0: no finding at or above the fail level; 1: there is one, or a cell failed; 2: a wrong target, option or file;
    130: interrupted.
    """
    from propcheck.api.run_directory import RunDirectory, check_writable
    from propcheck.api.sweep import sweep_request
    from propcheck.config.grid import read_axes

    request = sweep_request(target, read_axes(vary), with_progress(options, quiet=quiet))
    first = request.scans[0]
    directory = RunDirectory(out or Path("reports") / f"{first.probe.name}-sweep", plots=plots)
    check_writable(directory.path)
    result = _run(request, directory, quiet=quiet, debug=debug)
    _print(result, output_format)
    failing = records.failing(fail_level or first.settings.fail_level)
    findings = [finding for cell in result.cells if cell.run is not None for finding in cell.run.findings]
    failed = any(cell.status == "failed" for cell in result.cells)
    raise typer.Exit(int(failed or any(finding.severity in failing for finding in findings)))


def _run(request: SweepRequest, directory: RunDirectory, *, quiet: bool, debug: bool) -> Sweep:
    """Scan the cells; on a terminal, announce each."""
    from propcheck.api.sweep import run_sweep

    done: list[Outcome] = []

    def announce(index: int) -> None:
        if not quiet and sys.stderr.isatty() and index < len(request.cells):
            say(f"cell {index + 1} of {len(request.cells)}: {request.cells[index].cell.name}", quiet=quiet)

    def report(outcome: Outcome) -> None:
        done.append(outcome)
        announce(len(done))

    try:
        announce(0)
        with result_on_stdout():
            return run_sweep(request, directory, report, debug=debug)
    except KeyboardInterrupt:
        say(f"interrupted with {len(done)} of {len(request.cells)} cells in {directory.path}", quiet=quiet)
        raise


def _print(result: Sweep, output_format: Literal["table", "json", "markdown"]) -> None:
    from propcheck.render.terminal.sweep_table import print_sweep, sweep_json, sweep_markdown

    if output_format == "table":
        import rich.console

        console = rich.console.Console()
        with console.capture() as capture:
            print_sweep(result.record, console)
        write_stdout(capture.get())
    else:
        text = sweep_json(result.record) if output_format == "json" else sweep_markdown(result.record)
        write_stdout(text.rstrip("\n") + "\n")
