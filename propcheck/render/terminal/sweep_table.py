"""The cells of a sweep side by side: as a table of 80 columns, as Markdown, as JSON; the numbers are the same in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from propcheck.analysis import profile as depth
from propcheck.analysis.growth import factor, gradient_growth, stream_growth, with_growth
from propcheck.formatting import count, number
from propcheck.records import SCHEMA_VERSION
from propcheck.records.document import dumps, run_document
from propcheck.render.markdown import bullets, escape, page, table
from propcheck.render.terminal.columns import Column, one_line_names
from propcheck.render.terminal.run_table import print_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from propcheck.comparison.sweep import Outcome, Sweep
    from propcheck.records import Finding, Run, Severity

_LETTERS: dict[Severity, str] = {"error": "E", "warning": "W", "note": "N"}
_SHOWN_RULES = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in one row.

    Attributes
    ----------
    sites
        Residual additions.
    sum_rms
        RMS of the stream after the last of them.
    stream_factor
        Geometric mean a block by which the stream's RMS grows (:func:`propcheck.analysis.growth.stream_growth`).
    first_gradient, last_gradient
        Norm of the gradient of the stream before the first and before the last block.
    gradient_factor
        Geometric mean a block by which it grows on its way back (:func:`propcheck.analysis.growth.gradient_growth`).
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
    """Summarise a run; of several streams the longest counts, of those alike the last."""
    curves = [curve for curve in depth.streams(run) if curve.units]
    if not curves:
        return Summary(run.model.sites, None, None, None, None, None, run.loss.value)
    curve = max(reversed(curves), key=lambda one: len(one.units))
    stream, gradient = stream_growth(curve), gradient_growth(curve)
    return Summary(
        sites=run.model.sites,
        sum_rms=depth.unit_sums(curve)[-1],
        stream_factor=None if stream is None else stream.factor,
        first_gradient=curve.units[0][0].grad_stream_norm,
        last_gradient=curve.units[-1][0].grad_stream_norm,
        gradient_factor=None if gradient is None else gradient.factor,
        loss=run.loss.value,
    )


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print a row a cell, under them why cells failed and a few sentences; the console's width decides which columns fit."""
    console.print(Text(_title(sweep)), highlight=False)
    print_columns(_columns(sweep), console)
    console.print()
    for outcome in _failed(sweep):
        console.print(Text.assemble(("failed", "bold red"), f" {', '.join(outcome.cell.labels)}"), highlight=False)
        console.print(Padding(Text(outcome.reason or ""), (0, 0, 0, 2)), highlight=False)
    for line in _sentences(sweep):
        console.print(Text(line), highlight=False)


def sweep_markdown(sweep: Sweep) -> str:
    """Write the same as GitHub-flavoured Markdown that fits a job summary."""
    columns = _columns(sweep)
    rows = zip(*(column.cells for column in columns), strict=True)
    failed = [f"- **failed** {escape(', '.join(one.cell.labels))}: {escape(one.reason or '')}" for one in _failed(sweep)]
    head = [f"## propcheck sweep: {escape(sweep.target)}", table(one_line_names(columns), list(rows), text=len(sweep.axes))]
    return page(head, failed, [bullets(_sentences(sweep))])


def sweep_json(sweep: Sweep) -> str:
    """Write the same as one strict JSON document, each run with what ``--output-format json`` of a scan says but its rows."""
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


def _cell(sweep: Sweep, outcome: Outcome) -> dict[str, Any]:
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


def _title(sweep: Sweep) -> str:
    varied = " x ".join(f"{count(len(axis.values), 'value')} of {axis.key}" for axis in sweep.axes)
    return f"{sweep.target}: {varied}, {count(len(sweep.outcomes), 'cell')}"


def _columns(sweep: Sweep) -> list[Column]:
    rows = [None if outcome.run is None else summary(outcome.run) for outcome in sweep.outcomes]

    def numbers(heading: str, keep: int, name: str) -> Column:
        written = tuple("-" if row is None else number(getattr(row, name), aligned=True) for row in rows)
        return Column(heading, written, keep)

    def factors(heading: str, keep: int, name: str) -> Column:
        values = (None if row is None else getattr(row, name) for row in rows)
        return Column(heading, tuple("-" if value is None else factor(value) for value in values), keep)

    values = [
        Column(axis.short, tuple(outcome.cell.labels[i].partition("=")[2] for outcome in sweep.outcomes), 10, text=True)
        for i, axis in enumerate(sweep.axes)
    ]
    found = [None if outcome.run is None else outcome.run.findings for outcome in sweep.outcomes]
    return [
        *values,
        Column("sites", tuple("-" if row is None else str(row.sites) for row in rows), 1),
        numbers("last\nsum RMS", 8, "sum_rms"),
        factors("x a\nblock", 7, "stream_factor"),
        numbers("gradient\nat first", 5, "first_gradient"),
        numbers("at last\nblock", 2, "last_gradient"),
        factors("x back\na block", 6, "gradient_factor"),
        numbers("first\nloss", 4, "loss"),
        Column("findings", tuple("failed" if one is None else _amounts(one) for one in found), 9, text=True),
        Column("rules", tuple("-" if one is None else _rules(one) for one in found), 3, text=True),
    ]


def _amounts(findings: Sequence[Finding]) -> str:
    amounts = ((sum(one.severity == severity for one in findings), letter) for severity, letter in _LETTERS.items())
    return " ".join(f"{amount}{letter}" for amount, letter in amounts if amount) or "none"


def _rules(findings: Sequence[Finding]) -> str:
    rules = list(dict.fromkeys(one.rule for one in findings))
    more = [f"+{len(rules) - _SHOWN_RULES}"] if len(rules) > _SHOWN_RULES else []
    return " ".join([*rules[:_SHOWN_RULES], *more]) or "-"


def _failed(sweep: Sweep) -> list[Outcome]:
    return [outcome for outcome in sweep.outcomes if outcome.status == "failed"]


def _sentences(sweep: Sweep) -> list[str]:
    words = {"scanned": "scanned", "skipped": "done before", "failed": "failed"}
    amounts = [(sum(one.status == status for one in sweep.outcomes), word) for status, word in words.items()]
    runs = [outcome.run for outcome in sweep.outcomes if outcome.run is not None]
    found = [finding for run in runs for finding in run.findings]
    several = any(len(depth.streams(run)) > 1 for run in runs)
    severities = ", ".join(count(sum(one.severity == severity for one in found), severity) for severity in _LETTERS)
    lines = [
        f"Cells: {', '.join(f'{amount} {word}' for amount, word in amounts)}.",
        f"Findings (E: errors, W: warnings, N: notes): {severities}." if found else "Findings: none." if runs else "",
        "Where a run has several streams, the numbers are those of the longest, of those alike the last." if several else "",
        "" if sweep.directory is None else f"Files: {sweep.directory}",
    ]
    return [line for line in lines if line]
