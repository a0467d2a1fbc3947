"""``propcheck gate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from propcheck.api.options import ScanOptions
from propcheck.cli.console import check_not_read, result_on_stdout, say, target_files, with_progress
from propcheck.cli.options import with_options
from propcheck.cli.output import OutputOptions, Tolerances, check_outputs, emit, machine_views
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.api.gate import GateRequest
    from propcheck.api.run_directory import RunDirectory
    from propcheck.comparison.gate import GateResult


@with_options
def gate(  # noqa: PLR0913 - one parameter per option
    run: Annotated[
        str,
        typer.Argument(help="The run to judge: a run directory, or a target as in `propcheck scan`, which is scanned now."),
    ],
    *,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="BASELINE",
            help="The expected run: a baseline file, a run directory, or a target, which is scanned now.",
        ),
    ],
    tolerance: Tolerances = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update-baseline",
            help="Write the run as the new baseline, with a summary for diffs, and pass. Commit both files.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Compare even if the baseline has another target, precision, input, seed set or older schema.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run directory of a scanned target; default: reports/NAME, overwritten."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots of a scanned run.")] = True,
    options: ScanOptions,
    output: OutputOptions,
) -> None:
    """Fail if a run differs from its baseline in gradients, stream, updates, loss, sites, parameters or findings.

    Status 0: passed, or the baseline was written; 1: the gate failed; 2: a wrong run, baseline, target or option; 130:
    interrupted.
    """
    from propcheck.api.gate import gate_request, run_gate, update_baseline

    path = Path(baseline)
    options = with_progress(options, quiet=output.quiet)
    request = gate_request(run, None if update else baseline, options, tolerance=tolerance, force=force)
    directory = _directory(request, run, out, plots=plots)
    if update:
        _check_baseline_path(path)
    elif directory is not None and not request.is_paired:
        check_not_read(directory.path, "--baseline", [baseline])
    # The baseline and its summary must not be overwritten by an output, whether they are written or read.
    taken = [path, path.with_suffix(".md")] if path.suffix.lower() == ".parquet" else []
    if directory is not None:
        taken += [*directory.files, *target_files(run)]
    check_outputs(output, taken)
    with result_on_stdout():
        result = (update_baseline(request, path, directory) if update else run_gate(request, directory)).record
    if directory is not None:
        say(f"wrote {directory.path}", quiet=output.quiet)
    _emit(result, output)
    raise typer.Exit(int(not result.passed and result.written is None))


def _directory(request: GateRequest, run: str, out: Path | None, *, plots: bool) -> RunDirectory | None:
    """Return where the run is written; None if it is stored already."""
    from propcheck.api.requests import ScanRequest
    from propcheck.api.run_directory import RunDirectory, check_writable

    if isinstance(request.run, ScanRequest):
        directory = RunDirectory(out or request.run.directory, plots=plots)
        check_writable(directory.path)
        return directory
    if out is not None:
        raise PropcheckError(f"--out {out}: only for a target; {run} is already stored")
    return None


def _check_baseline_path(path: Path) -> None:
    from propcheck.api.run_directory import check_writable

    if path.suffix != ".parquet":
        raise PropcheckError(f"--baseline {path}: must end in .parquet with --update-baseline, e.g. baselines/model.parquet")
    check_writable(path.parent)


def _emit(gate: GateResult, output: OutputOptions) -> None:
    from propcheck.render.comparison_json import gate_to_json
    from propcheck.render.comparison_results import gate_results
    from propcheck.render.source_location import location_of
    from propcheck.render.terminal.gate_table import gate_markdown, print_gate

    emit(
        output,
        table=lambda console: print_gate(gate, console),
        views={
            "json": lambda: gate_to_json(gate),
            "markdown": lambda: gate_markdown(gate),
            **machine_views(lambda: gate_results(gate, location_of(gate.run.target))),
        },
    )
