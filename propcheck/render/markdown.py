"""A run as GitHub-flavoured Markdown that fits a job summary, and the building blocks for the pages of other commands."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from propcheck.analysis.profile import profile
from propcheck.formatting import count
from propcheck.render.summary import finding_counts, summary_lines, title
from propcheck.render.terminal.seed_spread import Spread
from propcheck.render.terminal.table_columns import block_columns, one_line_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Finding, Place, Run
    from propcheck.render.terminal.table_columns import TableColumn

# Bytes. GitHub accepts 1 MiB per step for its summary and drops a larger one ("Isolation and limits for job summaries" in its
# page on workflow commands); the rest is left for what else the step writes.
LIMIT = 900_000
# Tables of at most this many rows are shown whole, which is a screen of text; of longer ones, the rows at both ends.
_MAX_ROWS, _END_ROWS = 24, 6

_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\`*_\[\]~])")
_LEADING = re.compile(r"^(\d*)([-+#=.)])")  # starts a heading or a list
_CONTROL = re.compile("[\x00-\x1f\x7f]")


def scan_markdown(run: Run) -> str:
    """Write a run as Markdown.

    Parameters
    ----------
    run
        The run, with its findings.

    Returns
    -------
    str
        Heading, title, findings, a table by block and the summary, at most ``LIMIT`` bytes of UTF-8. Findings beyond that are
        counted and left out. A long table shows both ends and the blocks of the findings.
    """
    curve = profile(run)
    head = [f"## propcheck scan: {escape(run.target)}", escape(title(run)), f"### Findings: {finding_counts(run.findings)}"]
    tail = [f"### By {curve.noun}", _blocks(run, curve)] if curve.sites else []
    tail += ["### Summary", bullets(summary_lines(run))]
    return page(head, findings_markdown(run.findings), tail)


def page(head: Sequence[str], items: Sequence[str], tail: Sequence[str]) -> str:
    """Join the parts of a page, with as many items between head and tail as fit into ``LIMIT`` bytes.

    Parameters
    ----------
    head, tail
        Blocks of Markdown, of bounded size.
    items
        Entries of one list; those that do not fit are counted at its end.
    """
    room = LIMIT - len("\n\n".join([*head, *tail]).encode("utf-8", "replace")) - 200
    kept: list[str] = []
    for item in items:
        room -= len(item.encode("utf-8", "replace")) + 1
        if room < 0:
            break
        kept.append(item)
    if len(kept) < len(items):
        kept.append(f"- {len(items) - len(kept)} of {len(items)} omitted to fit a job summary; the JSON output has all.")
    return "\n\n".join([*head, "\n".join(kept), *tail]) + "\n"


def findings_markdown(findings: Sequence[Finding]) -> list[str]:
    """Write each finding as a list entry: severity, rule, place, message, remedy; without findings, one entry that says so."""
    return [_finding(finding) for finding in findings] or ["No findings."]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Write a table of plain text, which is escaped here; the first ``text`` columns are words, the others numbers."""
    alignment = ["---" if i < text else "---:" for i in range(len(headings))]
    lines = [[_cell(cell) for cell in headings], alignment, *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns_table(columns: Sequence[TableColumn], keep: Callable[[int], bool] | None = None) -> str:
    """Write the columns of a terminal table as a Markdown table; with ``keep``, shortened as by :func:`elided`."""
    rows = list(zip(*(column.cells for column in columns), strict=True))
    text = next((i for i, column in enumerate(columns) if i and not column.text), len(columns))
    return table(one_line_names(columns), rows if keep is None else elided(rows, keep), text=text)


def bullets(sentences: Iterable[str]) -> str:
    """Write plain sentences as a list."""
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences)


def escape(text: str) -> str:
    """Escape plain text for one line of Markdown; text in backticks stays code."""
    return _LEADING.sub(r"\1\\\2", _inline(text))


def elided(rows: Sequence[Sequence[str]], keep: Callable[[int], bool] = lambda _: False) -> list[Sequence[str]]:
    """Replace the middle of a long table by rows that say how many were left out.

    Parameters
    ----------
    rows
        The rows of a table.
    keep
        Whether to show the row of this index wherever it is.
    """
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    shown: list[Sequence[str]] = []
    gap = 0
    for index, row in enumerate(rows):
        if _END_ROWS <= index < len(rows) - _END_ROWS and not keep(index):
            gap += 1
            continue
        if gap:
            shown.append([f"({count(gap, 'row')})", *[""] * (len(row) - 1)])
            gap = 0
        shown.append(row)
    return shown


def _blocks(run: Run, curve: Profile) -> str:
    columns = block_columns(curve, Spread(run))
    named = {str(getattr(finding.site, curve.noun)) for finding in run.findings if finding.site is not None}
    # A block of several rows has its number in the first alone.
    labels: list[str] = list(itertools.accumulate(columns[0].cells, _last_named))
    return columns_table(columns, lambda index: labels[index] in named)


def _last_named(previous: str, cell: str) -> str:
    return cell or previous


def _finding(finding: Finding) -> str:
    where = _place(finding.site)
    head = f"- **{finding.severity} {finding.rule} {escape(finding.name)}**" + (f", {where}" if where else "")
    lines = [head, escape(finding.message)]
    if finding.remedy:
        lines.append(f"*What to do.* {escape(finding.remedy)}")
    if finding.also:
        lines.append(f"Also: {escape(', '.join(finding.also))}.")
    return "<br>\n  ".join(lines)


def _place(place: Place | None) -> str:
    if place is None:
        return ""
    parts = [
        None if place.block is None else f"block {place.block}",
        None if place.block is not None or place.site is None else f"site {place.site}",
        place.sublayer and escape(place.sublayer),
        place.module and _code(place.module),
        place.parameter and _code(place.parameter),
    ]
    return ", ".join(part for part in parts if part)


def _code(text: str) -> str:
    one_line = " ".join(text.split())
    return escape(one_line) if "`" in one_line else f"`{one_line}`"


def _cell(text: str) -> str:
    return _inline(text).replace("|", r"\|")


def _inline(text: str) -> str:
    words = _CONTROL.sub("", " ".join(text.split()))
    return "".join(part if _CODE.fullmatch(part) else _plain(part) for part in _CODE.split(words))


def _plain(text: str) -> str:
    html = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", html)
