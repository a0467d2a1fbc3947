"""``propcheck gate``."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from propcheck.cli import operands as given
from propcheck.cli import options as shared
from propcheck.cli.output import OutputOptions, check, emit, machine_views
from propcheck.cli.running import check_not_read, check_writable, run_files, save, target_files
from propcheck.errors import PropcheckError
from propcheck.formatting import count

if TYPE_CHECKING:
    from propcheck.comparison.gate import GateResult
    from propcheck.config.pyproject import ToolSettings
    from propcheck.config.tolerances import Tolerances
    from propcheck.records import Run


@shared.grouped
def gate(
    ctx: typer.Context,
    run: Annotated[
        str,
        typer.Argument(help="What is judged: a run directory, or a target as `propcheck scan` takes it, which is scanned now."),
    ],
    *,
    baseline: Annotated[
        str,
        typer.Option(
            metavar="BASELINE",
            help="What it should be like: a baseline file, a run directory, or a target, which is scanned now.",
        ),
    ],
    tolerance: given.Allowed = None,
    update: Annotated[
        bool,
        typer.Option(
            "--update-baseline",
            help="Write the run as the baseline, with a summary for diffs beside it, and pass: commit both.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Compare with a baseline of another target, precision, input, seed set or older schema all the same.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the run of a target is written; default: reports/NAME, overwritten."),
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots of a scanned run.")] = True,
    options: shared.ScanOptions,
    output: OutputOptions,
) -> None:
    """Fail where a run is not as its baseline was: gradients, stream, updates, loss, sites, parameters or findings.

    Status 0: passed, or the baseline was written; 1: the gate failed; 2: a bad run, baseline, target or option; 130:
    interrupted.
    """
    from propcheck.comparison.comparable import check_comparable, early_refusals, refuse
    from propcheck.comparison.gate import gate as judge
    from propcheck.config.gate_settings import read_tolerances
    from propcheck.config.pyproject import read_settings

    settings = read_settings(Path.cwd())
    side = given.side(run, options, settings, force=force)
    before = None if update else _baseline(baseline, options, settings, force=force)
    if side.request is None and (before is None or before.request is None):
        given.refuse_unused(options)
    # The baseline and its summary: written with --update-baseline, and not to be lost without.
    taken = [Path(baseline), Path(baseline).with_suffix(".md")] if Path(baseline).suffix.lower() == ".parquet" else []
    if update:
        _check_writes(Path(baseline))
    allowed = read_tolerances(side.gate, tolerance or ())
    directory = None
    if side.request is not None:
        directory = out or Path(settings.out or Path("reports") / side.request.probe.name)
        check_writable(directory)
        if before is not None and before.run is not None:
            check_not_read(directory, "--baseline", [baseline])
        taken += [*run_files(directory), *target_files(run)]
    elif out is not None:
        raise PropcheckError(f"--out {out}: is for the run of a target, and {run} is stored already")
    check(output, taken)
    if before is not None and before.run is not None and side.request is not None and not force:
        refuse(early_refusals(side.request.probe, run, before.run), before.run)
    command = shlex.join(["propcheck", *ctx.obj])
    here = side.scanned(command=command, quiet=output.quiet)
    if directory is not None:
        here = dataclasses.replace(here, path=str(directory))
        save(here, directory, plots=plots)
    if before is None:
        result = _written(here, Path(baseline), allowed, force=force)
    else:
        there = before.scanned(command=command, quiet=output.quiet)
        if not force:
            check_comparable(here, there, named=before.request is not None)
        result = judge(here, there, allowed)
    if directory is not None and not output.quiet:
        print(f"propcheck: wrote {directory}", file=sys.stderr)
    _emit(result, output)
    raise typer.Exit(int(not result.passed and result.written is None))


def _baseline(baseline: str, options: shared.ScanOptions, settings: ToolSettings, *, force: bool) -> given.Side:
    from propcheck.records.baseline import read_baseline

    if baseline.endswith(".md") and Path(baseline).with_suffix(".parquet").exists():
        raise PropcheckError(f"--baseline {baseline}: is the summary; name {Path(baseline).with_suffix('.parquet')} beside it")
    if Path(baseline).suffix.lower() == ".parquet":
        return given.Side(dataclasses.replace(read_baseline(Path(baseline), force=force), path=baseline), None)
    return given.side(baseline, options, settings, force=force)


def _check_writes(path: Path) -> None:
    """Refuse a place that no baseline can be written to before the scan."""
    if path.suffix != ".parquet":
        raise PropcheckError(
            f"--baseline {path}: --update-baseline writes a Parquet file; name one, as in baselines/model.parquet"
        )
    check_writable(path.parent)


def _written(run: Run, path: Path, allowed: Tolerances, *, force: bool) -> GateResult:
    """Make the baseline, and say what changed since the one before."""
    from propcheck.comparison.gate import check_fit
    from propcheck.comparison.gate import gate as judge
    from propcheck.records.baseline import read_baseline, write_baseline
    from propcheck.render.baseline_summary import baseline_summary

    itself = judge(run, dataclasses.replace(run, path=str(path)), allowed)
    if not force:
        check_fit(itself)
    try:
        before: Run | None = read_baseline(path, force=True)
    except PropcheckError:
        before = None  # none yet, or one that cannot be read: it is what is being mended
    write_baseline(run, path, baseline_summary(run))
    notes = [f"Baseline written: {path}, and {path.with_suffix('.md')} for its diffs. Commit both."]
    if before is not None:
        since = judge(run, before, allowed)
        changed = count(len(since.differences), "number")
        notes.append(f"Beside the one before {changed} outside the tolerances.")
        notes += [f"{one.name}: {one.message}" for one in since.findings]
    return dataclasses.replace(itself, notes=tuple(notes), written=str(path))


def _emit(gate: GateResult, output: OutputOptions) -> None:
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
