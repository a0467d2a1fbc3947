"""A comparison of runs as terminal tables and as Markdown, made of the same parts."""

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
from propcheck.render.terminal.changes import change_columns, law, ratio_of
from propcheck.render.terminal.columns import Column, one_line_names
from propcheck.render.terminal.run_table import print_columns, title

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from propcheck.comparison.compare import DepthRow, PairwiseComparison, RunComparison
    from propcheck.records import Finding, ParameterRecord, SiteRecord

Detail = Literal["few", "block"]
# Rows of the table along the depth that are shown unless all are asked for, evenly spaced, both ends among them.
_FEW = 17
# Parameters of one side alone that are named.
_NAMED = 3


def print_comparison(comparison: RunComparison, console: Console, detail: Detail = "few") -> None:
    """Print runs side by side.

    Parameters
    ----------
    comparison
        The runs.
    console
        Where to print; its width decides which columns fit.
    detail
        Whether a few blocks are shown along the depth, or every one.
    """
    for label, run in zip(comparison.labels, comparison.runs, strict=True):
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(Text(label, style="bold"), Text(title(run)))
        console.print(grid, highlight=False)
    for contrast in comparison.contrasts:
        console.print()
        for line in _opening(contrast):
            console.print(Text(line), highlight=False)
        print_columns(change_columns(contrast.changes, "A", contrast.label), console)
        for line in _found(contrast):
            console.print(Padding(Text(line), (0, 0, 0, 2)), highlight=False)
    console.print()
    print_columns(depth_columns(comparison, _chosen(comparison, detail)), console)
    console.print()
    print_columns(run_columns(comparison), console)
    for line in _closing(comparison):
        console.print(Text(line), highlight=False)


def comparison_markdown(comparison: RunComparison) -> str:
    """Write the same as Markdown that fits a job summary."""
    head = [
        f"## propcheck compare: {markdown.escape(' · '.join(run.target for run in comparison.runs))}",
        markdown.bullets(f"{label}: {title(run)}" for label, run in zip(comparison.labels, comparison.runs, strict=True)),
    ]
    for contrast in comparison.contrasts:
        head += [
            f"### {contrast.label} compared with A",
            markdown.bullets(_opening(contrast)),
            _table(change_columns(contrast.changes, "A", contrast.label)),
        ]
    items = [f"- {markdown.escape(line)}" for contrast in comparison.contrasts for line in _found(contrast)]
    tail = [
        f"### Along the depth, by {comparison.noun}",
        _table(depth_columns(comparison, _chosen(comparison, "few"))),
        "### Over the whole depth",
        _table(run_columns(comparison)),
        markdown.bullets(_closing(comparison)),
    ]
    return markdown.page([*head, "### New and gone findings"], items, tail)


def _table(columns: Sequence[Column]) -> str:
    rows = list(zip(*(column.cells for column in columns), strict=True))
    text = next((i for i, column in enumerate(columns) if not column.text), len(columns))
    return markdown.table(one_line_names(columns), rows, text=text)


def _opening(contrast: PairwiseComparison) -> list[str]:
    lines = [start_sentence(contrast), *contrast.notes]
    if contrast.settings:
        other_first = [(key, here, there) for key, there, here in contrast.settings]
        lines.insert(0, f"{contrast.label}: {settings_note('A', other_first)}")
    shared = contrast.parameters
    if shared.missing or shared.new:
        both = count(len(shared.pairs) + len(shared.regrouped), "parameter")
        only = [_only(label, names) for label, names in (("A", shared.missing), (contrast.label, shared.new)) if names]
        lines.append(f"{both} in both runs; {'; '.join(only)}.")
    return lines


def start_sentence(contrast: PairwiseComparison) -> str:
    """Return a sentence that says where a run starts to differ from A."""
    if contrast.start is None:
        return f"All numbers of {contrast.label} match those of A."
    return f"{contrast.label} starts to differ from A at {describe_place(contrast.start)}."


def _only(label: str, parameters: Sequence[ParameterRecord]) -> str:
    names = [parameter.name for parameter in parameters[:_NAMED]]
    more = f" and {len(parameters) - _NAMED} more" if len(parameters) > _NAMED else ""
    return f"only in {label}: {', '.join(names)}{more}"


def _found(contrast: PairwiseComparison) -> list[str]:
    if contrast.new_findings is None or contrast.gone_findings is None:
        return []
    return [
        *(_finding_line(f"only in {contrast.label}", finding) for finding in contrast.new_findings),
        *(_finding_line("only in A", finding) for finding in contrast.gone_findings),
    ] or [f"A and {contrast.label} have the same findings."]


def _finding_line(presence: str, finding: Finding) -> str:
    return f"{finding.severity} {finding.rule} {finding.name}, {presence}: {finding.message}"


def _chosen(comparison: RunComparison, detail: Detail) -> list[DepthRow]:
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


_ALONG: tuple[tuple[str, Callable[[tuple[SiteRecord, ...]], float | None], int], ...] = (
    ("stream", lambda sites: sites[0].stream_rms, 9),
    ("update\n/stream", lambda sites: max((s.update_ratio for s in sites if s.update_ratio is not None), default=None), 6),
    ("gradient", lambda sites: sites[0].grad_stream_norm, 8),
)


def depth_columns(comparison: RunComparison, rows: Sequence[DepthRow]) -> list[Column]:
    """Lay out a row a block: the stream before it, its largest update beside the stream, and the gradient before it."""
    columns = [Column(comparison.noun, tuple(str(row.label) for row in rows), 10)]
    if any(contrast.relative for contrast in comparison.contrasts):
        columns.append(Column("depth", tuple(f"{row.at:.2f}" for row in rows), 3))
    for heading, value, keep in _ALONG:
        values = [[value(sites) if sites else None for sites in row.sites] for row in rows]
        for index, label in enumerate(comparison.labels):
            name = f"{heading} {label}" if "\n" in heading else f"{heading}\n{label}"
            columns.append(Column(name, tuple(number(line[index], aligned=True) for line in values), keep))
        if len(comparison.runs) == 2:
            name = f"{heading.split(chr(10))[0]}\nB/A"
            columns.append(Column(name, tuple(ratio_of(line[1], line[0]) for line in values), keep - 4))
    return columns


def run_columns(comparison: RunComparison) -> list[Column]:
    """Lay out a row a run: how stream and gradient go over the whole depth, and the first loss."""
    rows = []
    for label, run in zip(comparison.labels, comparison.runs, strict=True):
        stream, gradient = growths(run)
        cells = [label]
        for growth in (stream, gradient):
            if growth is None:
                cells += ["-", "-", "-"]
            else:
                cells += [factor(growth.factor), f"x{number(growth.total)}", law(growth, comparison.noun)]
        rows.append((*cells, number(run.loss.value)))
    headings = (
        ("", 10),
        (f"stream x\na {comparison.noun}", 9),
        ("over\ndepth", 6),
        ("stream\nlaw", 5),
        (f"gradient x\na {comparison.noun}", 8),
        ("over\ndepth", 4),
        ("gradient\nlaw", 3),
        ("first\nloss", 7),
    )
    words = {0, 3, 6}
    return [Column(head, tuple(row[i] for row in rows), keep, text=i in words) for i, (head, keep) in enumerate(headings)]


def _closing(comparison: RunComparison) -> list[str]:
    differs = (
        "A number differs if its ratio exceeds the limit in either direction. The first difference is the first of the forward "
        "pass, or, for gradients, of the backward pass."
    )
    return [
        differs,
        *(f"{label}: {run.path}" for label, run in zip(comparison.labels, comparison.runs, strict=True) if run.path),
    ]
