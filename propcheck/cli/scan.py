"""``propcheck scan``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck import records
from propcheck.cli import options as shared
from propcheck.cli.output import OutputOptions, check, emit, machine_views
from propcheck.cli.running import check_writable, run_files, run_scan, save, target_files
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.config.probe import Probe
    from propcheck.records import Run, Severity
    from propcheck.render.results import Results


@shared.grouped
def scan(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="A probe file or the name of a bundled probe (`propcheck probes`); a Hugging Face config.json or its folder; "
            "package.module:callable or path/to/file.py:callable, which returns the model or a propcheck.Target."
        ),
    ],
    *,
    options: shared.ScanOptions,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run is written; default: reports/NAME, overwritten.")
    ] = None,
    detail: Annotated[
        Literal["block", "site"] | None, typer.Option(help="A row of the table is a block (default) or a site.")
    ] = None,
    fail_level: Annotated[
        records.FailLevel | None,
        typer.Option(help="Least severity of a finding that gives status 1; default: error."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots.")] = True,
    output: OutputOptions,
) -> None:
    """Run one forward and one backward pass of the full model and say where the signal is lost.

    Status 0: no finding at or above the fail level; 1: there is one; 2: a bad target, option or file; 130: interrupted.
    """
    from propcheck.config.pyproject import read_settings

    settings = read_settings(Path.cwd())
    request = shared.request(target, options, settings)
    directory = out or Path(settings.out or Path("reports") / request.probe.name)
    check_writable(directory)
    check(output, taken=[*run_files(directory), *target_files(target)])
    failing = records.failing(fail_level or settings.fail_level)
    run = run_scan(request, command=shlex.join(["propcheck", *ctx.obj]), quiet=output.quiet)
    run = dataclasses.replace(run, path=str(directory))
    run = dataclasses.replace(run, notes=(*run.notes, *_beside(request.probe, run, directory)))
    save(run, directory, plots=plots)
    if not output.quiet and not (output.output_format == "table" and sys.stdout.isatty()):  # where no table shows them
        for note in run.notes:
            print(f"propcheck: {note}", file=sys.stderr)
    if not output.quiet and output.output_format != "table":
        print(f"propcheck: wrote {directory}", file=sys.stderr)
    _emit(run, request, output, failing, detail or settings.detail)
    raise typer.Exit(int(any(finding.severity in failing for finding in run.findings)))


def _beside(probe: Probe, run: Run, directory: Path) -> list[str]:
    """Say what differs from the probe that this one varies, and from its run where that lies beside this one."""
    from propcheck.analysis.variants import comparable, measured_note, settings_note
    from propcheck.config.fingerprint import differences
    from propcheck.config.probe import load_probe
    from propcheck.records.store import read_run

    if not probe.base:
        return []
    base = load_probe(probe.base)
    notes = [settings_note(base.name, differences(probe, base))]
    try:
        other = read_run(directory.parent / base.name)
    except PropcheckError:
        return notes  # not scanned yet, or by another version
    return [*notes, measured_note(run, other, base.name)] if comparable(run, other) else notes


def _emit(
    run: Run, request: shared.Request, output: OutputOptions, failing: tuple[Severity, ...], detail: Literal["block", "site"]
) -> None:
    from propcheck.render.json import to_json
    from propcheck.render.markdown import scan_markdown
    from propcheck.render.results import scan_results
    from propcheck.render.source_location import location_of
    from propcheck.render.terminal.run_table import print_run

    def results() -> Results:
        return scan_results(run, failing, location=location_of(run.target), select=request.select, ignore=request.ignore)

    emit(
        output,
        table=lambda console: print_run(run, console, detail=detail),
        views={
            "json": lambda: to_json(run),
            "markdown": lambda: scan_markdown(run),
            **machine_views(results),
        },
    )
