"""The cells of a sweep as a table for 80 columns, as Markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from propcheck.analysis.growth import factor, growths, with_growth
from propcheck.analysis.profile import streams, unit_sums
from propcheck.formatting import count, number
from propcheck.records import SCHEMA_VERSION, SEVERITIES
from propcheck.records.document import dumps, run_document
from propcheck.render.markdown import bullets, columns_table, escape, page
from propcheck.render.summary import finding_counts
from propcheck.render.terminal.run_table import print_columns, print_lines
from propcheck.render.terminal.table_columns import TableColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from propcheck.comparison.sweep import Outcome, SweepResult
    from propcheck.records import Finding, Run

_SHOWN_RULES = 2  # rules of a cell that are named


@dataclass(frozen=True, slots=True)
class Summary:
    """The values of a run in the table of a sweep.

    Attributes
    ----------
    sites
        Number of residual additions.
    sum_rms
        RMS of the stream after the last site.
    stream_factor
        Geometric mean factor per block of the stream's RMS (:func:`propcheck.analysis.growth.stream_growth`).
    first_gradient, last_gradient
        Gradient norm of the stream before the first and before the last block.
    gradient_factor
        Geometric mean factor per block of that gradient, backward (:func:`propcheck.analysis.growth.gradient_growth`).
    loss
        The first loss.
    """

    sites: int
    sum_rms: float | None
    stream_factor: float | None
    first_gradient: float | None
    last_gradient: float | None
    gradient_factor: float | None
    loss: float | None


def summary(run: Run) -> Summary:
    """Summarise the longest stream of a run, the last of several of equal length."""
    pairs = list(zip(streams(run), growths(run), strict=True))
    if not pairs:
        return Summary(run.model.sites, None, None, None, None, None, run.loss.value)
    curve, growth = max(reversed(pairs), key=lambda pair: len(pair[0].units))
    return Summary(
        sites=run.model.sites,
        sum_rms=unit_sums(curve)[-1],
        stream_factor=None if growth.stream is None else growth.stream.factor,
        first_gradient=curve.units[0][0].grad_stream_norm,
        last_gradient=curve.units[-1][0].grad_stream_norm,
        gradient_factor=None if growth.gradient is None else growth.gradient.factor,
        loss=run.loss.value,
    )


def print_sweep(sweep: SweepResult, console: Console) -> None:
    """Print one row per cell, then the reasons of failed cells and a summary; the console's width decides which columns fit."""
    print_lines([_title(sweep)], console)
    print_columns(_columns(sweep), console)
    console.print()
    for outcome in _failed(sweep):
        console.print(Text.assemble(("failed", "bold red"), f" {', '.join(outcome.cell.labels)}"), highlight=False)
        console.print(Padding(Text(outcome.reason or ""), (0, 0, 0, 2)), highlight=False)
    print_lines(_sentences(sweep), console)


def sweep_markdown(sweep: SweepResult) -> str:
    """Write a sweep as Markdown that fits a job summary."""
    failed = [
        f"- **failed** {escape(', '.join(outcome.cell.labels))}: {escape(outcome.reason or '')}" for outcome in _failed(sweep)
    ]
    head = [f"## propcheck sweep: {escape(sweep.target)}", columns_table(_columns(sweep))]
    return page(head, failed, [bullets(_sentences(sweep))])


def sweep_json(sweep: SweepResult) -> str:
    """Write a sweep as one strict JSON document; each run as in the JSON of a scan, without its rows."""
    return dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "sweep": {
                "target": sweep.target,
                "path": None if sweep.directory is None else str(sweep.directory),
                "vary": {axis.key: [override.value for override in axis.values] for axis in sweep.axes},
            },
            "cells": [_cell(sweep, outcome) for outcome in sweep.outcomes],
        }
    )


def _cell(sweep: SweepResult, outcome: Outcome) -> dict[str, Any]:
    run = outcome.run
    document = {} if run is None else run_document(with_growth(run))
    return {
        "values": {override.key: override.value for override in outcome.cell.overrides},
        "status": outcome.status,
        "reason": outcome.reason,
        "path": None if run is None or sweep.directory is None else str(sweep.directory / outcome.cell.name),
        "summary": None if run is None else asdict(summary(run)),
        "run": document.get("run"),
        "loss": document.get("loss"),
        "growth": document.get("growth"),
        "findings": document.get("findings"),
    }


def _title(sweep: SweepResult) -> str:
    varied = " x ".join(f"{count(len(axis.values), 'value')} of {axis.key}" for axis in sweep.axes)
    return f"{sweep.target}: {varied}, {count(len(sweep.outcomes), 'cell')}"


def _columns(sweep: SweepResult) -> list[TableColumn]:
    runs = [outcome.run for outcome in sweep.outcomes]
    summaries = [None if run is None else summary(run) for run in runs]

    def column(heading: str, priority: int, name: str, *, factors: bool = False) -> TableColumn:
        values = [None if row is None else getattr(row, name) for row in summaries]
        cells = ("-" if value is None else factor(value) if factors else number(value, aligned=True) for value in values)
        return TableColumn(heading, tuple(cells), priority)

    varied = [
        TableColumn(axis.short, tuple(outcome.cell.labels[i].partition("=")[2] for outcome in sweep.outcomes), 10, text=True)
        for i, axis in enumerate(sweep.axes)
    ]
    return [
        *varied,
        TableColumn("sites", tuple("-" if row is None else str(row.sites) for row in summaries), 1),
        column("last\nsum RMS", 8, "sum_rms"),
        column("stream\nx/block", 7, "stream_factor", factors=True),
        column("first\ngrad", 5, "first_gradient"),
        column("last\ngrad", 2, "last_gradient"),
        column("gradient\nx/block", 6, "gradient_factor", factors=True),
        column("first\nloss", 4, "loss"),
        TableColumn("findings", tuple("failed" if run is None else _severities(run.findings) for run in runs), 9, text=True),
        TableColumn("rules", tuple("-" if run is None else _rules(run.findings) for run in runs), 3, text=True),
    ]


def _severities(findings: Sequence[Finding]) -> str:
    counts = ((sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES)
    return " ".join(f"{amount}{severity[0].upper()}" for amount, severity in counts if amount) or "none"


def _rules(findings: Sequence[Finding]) -> str:
    rules = list(dict.fromkeys(finding.rule for finding in findings))
    more = [f"+{len(rules) - _SHOWN_RULES}"] if len(rules) > _SHOWN_RULES else []
    return " ".join([*rules[:_SHOWN_RULES], *more]) or "-"


def _failed(sweep: SweepResult) -> list[Outcome]:
    return [outcome for outcome in sweep.outcomes if outcome.status == "failed"]


def _sentences(sweep: SweepResult) -> list[str]:
    words = {"scanned": "scanned", "skipped": "up to date", "failed": "failed"}
    statuses = (f"{sum(outcome.status == status for outcome in sweep.outcomes)} {word}" for status, word in words.items())
    runs = [outcome.run for outcome in sweep.outcomes if outcome.run is not None]
    findings = [finding for run in runs for finding in run.findings]
    lines = [f"Cells: {', '.join(statuses)}."]
    if findings:
        lines.append(f"Findings (E: error, W: warning, N: note): {finding_counts(findings)}.")
    elif runs:
        lines.append("Findings: none.")
    if any(len(streams(run)) > 1 for run in runs):
        lines.append("For a run with several streams, the values are those of the longest one (the last of equal length).")
    if sweep.directory is not None:
        lines.append(f"Files: {sweep.directory}")
    return lines
