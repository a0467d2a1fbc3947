"""``propcheck scan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck import records
from propcheck.api.options import ScanOptions
from propcheck.cli.console import result_on_stdout, say, target_files, with_progress
from propcheck.cli.options import with_options
from propcheck.cli.output import OutputOptions, check_outputs, emit, machine_views

if TYPE_CHECKING:
    from propcheck.api.requests import ScanRequest
    from propcheck.records import Run, Severity


@with_options
def scan(  # noqa: PLR0913 - one parameter per option
    target: Annotated[
        str,
        typer.Argument(
            help="A probe file or a bundled probe (`propcheck probes`); a Hugging Face config.json or its folder; or "
            "package.module:callable or path/to/file.py:callable, which returns the model or a propcheck.Target."
        ),
    ],
    *,
    options: ScanOptions,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Run directory; default: reports/NAME, overwritten.")] = None,
    detail: Annotated[
        Literal["block", "site"] | None, typer.Option(help="One row of the table per block (default) or per site.")
    ] = None,
    fail_level: Annotated[
        records.FailLevel | None,
        typer.Option(help="Lowest severity that makes the command exit with status 1; default: error."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots.")] = True,
    output: OutputOptions,
) -> None:
    """Run one forward and one backward pass of the full model and report where the signal is lost.

    Status 0: no finding at or above the fail level; 1: there is one; 2: a wrong target, option or file; 130: interrupted.
    """
    from propcheck.api.requests import scan_request
    from propcheck.api.run_directory import RunDirectory, check_writable
    from propcheck.api.scan import run_scan

    request = scan_request(target, with_progress(options, quiet=output.quiet))
    directory = RunDirectory(out or request.directory, plots=plots)
    check_writable(directory.path)
    check_outputs(output, taken=[*directory.files, *target_files(target)])
    failing = records.failing(fail_level or request.settings.fail_level)
    with result_on_stdout():
        run = directory.write(run_scan(request, directory.path))
    if not (output.output_format == "table" and sys.stdout.isatty()):  # the table shows the notes
        for note in run.notes:
            say(note, quiet=output.quiet)
    if output.output_format != "table":
        say(f"wrote {directory.path}", quiet=output.quiet)
    _emit(run, request, output, failing, detail or request.settings.detail)
    raise typer.Exit(int(any(finding.severity in failing for finding in run.findings)))


def _emit(
    run: Run, request: ScanRequest, output: OutputOptions, failing: tuple[Severity, ...], detail: Literal["block", "site"]
) -> None:
    from propcheck.render.json import to_json
    from propcheck.render.markdown import scan_markdown
    from propcheck.render.results import scan_results
    from propcheck.render.source_location import location_of
    from propcheck.render.terminal.run_table import print_run

    emit(
        output,
        table=lambda console: print_run(run, console, detail=detail),
        views={
            "json": lambda: to_json(run),
            "markdown": lambda: scan_markdown(run),
            **machine_views(
                lambda: scan_results(
                    run, failing, location=location_of(run.target), select=request.select, ignore=request.ignore
                )
            ),
        },
    )
