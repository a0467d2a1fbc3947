"""``propcheck scan``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck.commands import options as shared
from propcheck.commands.running import check_writable, run_scan, save, write_stdout
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.probe import Probe
    from propcheck.records import Run


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
    output_format: Annotated[Literal["table", "json"], typer.Option(help="What is printed on standard output.")] = "table",
    detail: Annotated[
        Literal["block", "site"] | None, typer.Option(help="A row of the table is a block (default) or a site.")
    ] = None,
    fail_level: Annotated[
        shared.FailLevel | None,
        typer.Option(help="Least severity of a finding that gives status 1; default: error."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one forward and one backward pass of the full model and say where the signal is lost.

    Status 0: no finding at or above the fail level; 1: there is one; 2: a bad target, option or file; 130: interrupted.
    """
    del debug  # read by `propcheck.cli.run`, which catches the errors
    from propcheck.settings import read_settings

    settings = read_settings(Path.cwd())
    request = shared.request(target, options, settings)
    directory = out or Path(settings.out or Path("reports") / request.probe.name)
    check_writable(directory)
    run = run_scan(request, command=shlex.join(["propcheck", *ctx.obj]), quiet=quiet)
    run = dataclasses.replace(run, path=str(directory))
    run = dataclasses.replace(run, notes=(*run.notes, *_beside(request.probe, run, directory)))
    save(run, directory, plots=plots)
    if not quiet and not (output_format == "table" and sys.stdout.isatty()):  # where the table itself does not show it
        for note in run.notes:
            print(f"propcheck: {note}", file=sys.stderr)
    if not quiet and output_format == "json":
        print(f"propcheck: wrote {directory}", file=sys.stderr)
    write_stdout(_rendered(run, output_format, detail or settings.detail))
    failing = shared.failing(fail_level or settings.fail_level)
    raise typer.Exit(int(any(finding.severity in failing for finding in run.findings)))


def _beside(probe: Probe, run: Run, directory: Path) -> list[str]:
    """Say what differs from the probe that this one varies, and from its run where that lies beside this one."""
    from propcheck.beside import comparable, measured_note, settings_note
    from propcheck.probe import differences, load_probe
    from propcheck.store import read_run

    if not probe.base:
        return []
    base = load_probe(probe.base)
    notes = [settings_note(base.name, differences(probe, base))]
    try:
        other = read_run(directory.parent / base.name)
    except PropcheckError:
        return notes  # not scanned yet, or by another version
    return [*notes, measured_note(run, other, base.name)] if comparable(run, other) else notes


def _rendered(run: Run, output_format: str, detail: Literal["block", "site"]) -> str:
    if output_format == "json":
        from propcheck.report.formats import to_json

        return to_json(run).rstrip("\n") + "\n"
    import rich.console

    from propcheck.report.table import print_run

    console = rich.console.Console()
    with console.capture() as capture:
        print_run(run, console, detail=detail)
    return capture.get()
