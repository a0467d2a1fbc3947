"""A comparison of runs as tables and as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from propcheck.analysis.growth import factor
from propcheck.analysis.variants import settings_note
from propcheck.comparison.compare import growths
from propcheck.comparison.places import describe_place
from propcheck.formatting import count, number
from propcheck.render import markdown
from propcheck.render.summary import title
from propcheck.render.terminal.changes import change_columns, law, ratio_of
from propcheck.render.terminal.run_table import print_columns, print_lines
from propcheck.render.terminal.table_columns import TableColumn, columns_from_rows, heading_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from propcheck.comparison.compare import DepthRow, PairwiseComparison, RunComparison
    from propcheck.records import Finding, ParameterRecord, SiteRecord

Detail = Literal["few", "block"]
# Rows of the table along the depth, evenly spaced, if not all are requested.
_FEW = 17
# Parameters that only one run has: number of names that are listed.
_NAMED = 3


def print_comparison(comparison: RunComparison, console: Console, detail: Detail = "few") -> None:
    """Print a comparison.

    Parameters
    ----------
    comparison
        The comparison.
    console
        Where to print; its width decides which columns fit.
    detail
        Whether the table along the depth has a few blocks or all of them.
    """
    for label, run in zip(comparison.labels, comparison.runs, strict=True):
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(label, style="bold"), Text(title(run)))
        console.print(grid, highlight=False)
    for contrast in comparison.contrasts:
        console.print()
        print_lines(_opening(contrast), console)
        print_columns(change_columns(contrast.changes, "A", contrast.label), console)
        for line in _finding_lines(contrast):
            console.print(Padding(Text(line), (0, 0, 0, 2)), highlight=False)
    console.print()
    print_columns(depth_columns(comparison, _shown_rows(comparison, detail)), console)
    console.print()
    print_columns(run_columns(comparison), console)
    print_lines(_closing(comparison), console)


def comparison_markdown(comparison: RunComparison) -> str:
    """Write a comparison as Markdown that fits a job summary."""
    head = [
        f"## propcheck compare: {markdown.escape(' · '.join(run.target for run in comparison.runs))}",
        markdown.bullets(f"{label}: {title(run)}" for label, run in zip(comparison.labels, comparison.runs, strict=True)),
    ]
    for contrast in comparison.contrasts:
        head += [
            f"### {contrast.label} compared with A",
            markdown.bullets(_opening(contrast)),
            markdown.columns_table(change_columns(contrast.changes, "A", contrast.label)),
        ]
    items = [f"- {markdown.escape(line)}" for contrast in comparison.contrasts for line in _finding_lines(contrast)]
    tail = [
        f"### Along the depth, by {comparison.noun}",
        markdown.columns_table(depth_columns(comparison, _shown_rows(comparison, "few"))),
        "### Over the whole depth",
        markdown.columns_table(run_columns(comparison)),
        markdown.bullets(_closing(comparison)),
    ]
    return markdown.page([*head, "### New and gone findings"], items, tail)


def _opening(contrast: PairwiseComparison) -> list[str]:
    lines = [start_sentence(contrast), *contrast.notes]
    if contrast.settings:
        swapped = [(key, value, base) for key, base, value in contrast.settings]
        lines.insert(0, f"{contrast.label}: {settings_note('A', swapped)}")
    pairing = contrast.parameters
    if pairing.missing or pairing.new:
        both = count(len(pairing.pairs) + len(pairing.regrouped), "parameter")
        only = [_only(label, names) for label, names in (("A", pairing.missing), (contrast.label, pairing.new)) if names]
        lines.append(f"{both} in both runs; {'; '.join(only)}.")
    return lines


def start_sentence(contrast: PairwiseComparison) -> str:
    """Return a sentence that says where a run first differs from A."""
    if contrast.start is None:
        return f"All numbers of {contrast.label} match those of A."
    return f"{contrast.label} starts to differ from A at {describe_place(contrast.start)}."


def _only(label: str, parameters: Sequence[ParameterRecord]) -> str:
    names = [parameter.name for parameter in parameters[:_NAMED]]
    more = f" and {len(parameters) - _NAMED} more" if len(parameters) > _NAMED else ""
    return f"only in {label}: {', '.join(names)}{more}"


def _finding_lines(contrast: PairwiseComparison) -> list[str]:
    if contrast.new_findings is None or contrast.gone_findings is None:
        return []
    return [
        *(_finding_line(finding, contrast.label) for finding in contrast.new_findings),
        *(_finding_line(finding, "A") for finding in contrast.gone_findings),
    ] or [f"A and {contrast.label} have the same findings."]


def _finding_line(finding: Finding, label: str) -> str:
    return f"{finding.severity} {finding.rule} {finding.name}, only in {label}: {finding.message}"


def _shown_rows(comparison: RunComparison, detail: Detail) -> list[DepthRow]:
    rows = list(comparison.rows)
    if detail == "block" or len(rows) <= _FEW:
        return rows
    starts = {
        change.first.place.block
        for contrast in comparison.contrasts
        for change in contrast.changes
        if change.first is not None and not contrast.relative
    }
    spaced = {round(i * (len(rows) - 1) / (_FEW - 1)) for i in range(_FEW)}
    return [row for index, row in enumerate(rows) if index in spaced or row.label in starts]


_ALONG_DEPTH: tuple[tuple[str, Callable[[tuple[SiteRecord, ...]], float | None], int], ...] = (
    ("stream_rms", lambda sites: sites[0].stream_rms, 9),
    ("update_ratio", lambda sites: max((s.update_ratio for s in sites if s.update_ratio is not None), default=None), 6),
    ("grad_stream_norm", lambda sites: sites[0].grad_stream_norm, 8),
)


def depth_columns(comparison: RunComparison, rows: Sequence[DepthRow]) -> list[TableColumn]:
    """Lay out one row per block: stream before it, largest update relative to the stream, gradient before it."""
    columns = [TableColumn(comparison.noun, tuple(str(row.label) for row in rows), 10)]
    if any(contrast.relative for contrast in comparison.contrasts):
        columns.append(TableColumn("depth", tuple(f"{row.at:.2f}" for row in rows), 3))
    for name, value, priority in _ALONG_DEPTH:
        values = [[value(sites) if sites else None for sites in row.sites] for row in rows]
        first, second = heading_of(name).split("\n")
        short = second if second == "grad" else first
        for index, label in enumerate(comparison.labels):
            cells = tuple(number(line[index], aligned=True) for line in values)
            columns.append(TableColumn(f"{first}\n{second} {label}", cells, priority))
        if len(comparison.runs) == 2:
            ratios = tuple(ratio_of(line[1], line[0]) for line in values)
            columns.append(TableColumn(f"{short}\nB/A", ratios, priority - 4))
    return columns


def run_columns(comparison: RunComparison) -> list[TableColumn]:
    """Lay out one row per run: growth of stream and gradient over the whole depth, and the first loss."""
    rows = []
    for label, run in zip(comparison.labels, comparison.runs, strict=True):
        cells = [label]
        for growth in growths(run):
            if growth is None:
                cells += ["-", "-", "-"]
            else:
                cells += [factor(growth.factor), f"x{number(growth.total)}", law(growth, comparison.noun)]
        rows.append((*cells, number(run.loss.value)))
    headings = (
        ("", 10),
        (f"stream\nx/{comparison.noun}", 9),
        ("over\ndepth", 6),
        ("stream\nlaw", 5),
        (f"gradient\nx/{comparison.noun}", 8),
        ("over\ndepth", 4),
        ("gradient\nlaw", 3),
        ("first\nloss", 7),
    )
    return columns_from_rows(headings, rows, text=("", "stream\nlaw", "gradient\nlaw"))


def _closing(comparison: RunComparison) -> list[str]:
    return [
        "A number differs if its ratio exceeds the limit in either direction. Gradients are followed backward from the loss.",
        *(f"{label}: {run.path}" for label, run in zip(comparison.labels, comparison.runs, strict=True) if run.path),
    ]
