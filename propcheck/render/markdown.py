"""A run as GitHub-flavoured Markdown that fits a job summary, and the parts that other commands write theirs with."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from propcheck.analysis import profile as depth
from propcheck.formatting import count
from propcheck.records import SEVERITIES
from propcheck.render.terminal.columns import block_columns, one_line_names
from propcheck.render.terminal.run_table import summary_lines, title
from propcheck.render.terminal.seed_spread import Spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from propcheck.records import Finding, Place, Run

# Bytes. GitHub takes 1 MiB a step for its summary and refuses more whole ("Isolation and limits for job summaries" in its page
# of workflow commands); the rest is room for what else the step writes there.
LIMIT = 900_000
# Rows of a long table that are shown, and of these how many at either end: this tool's own choice, a screen of text.
_MOST_ROWS, _AT_EITHER_END = 24, 6

_CODE = re.compile(r"(`[^`]+`)")
_SPECIAL = re.compile(r"([\\`*_\[\]~])")
_LEADING = re.compile(r"^(\d*)([-+#=.)])")  # what makes a heading or a list at the start of a line
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
        Heading, what was scanned, findings, a table by block and the summary; at most ``LIMIT`` bytes of UTF-8, findings that
        go over it being counted and left out. Of a long table the ends and the blocks that a finding names are shown.
    """
    curve = depth.profile(run)
    head = [f"## propcheck scan: {escape(run.target)}", escape(title(run)), f"### Findings: {counts(run.findings)}"]
    tail = [f"### By {curve.noun}", _blocks(run, curve)] if curve.sites else []
    tail += ["### Summary", bullets(summary_lines(run, curve))]
    return page(head, findings_markdown(run.findings), tail)


def page(head: Sequence[str], items: Sequence[str], tail: Sequence[str]) -> str:
    """Join the parts of a page, with as many of the items between head and tail as fit into ``LIMIT`` bytes.

    Parameters
    ----------
    head, tail
        Finished Markdown, a block each; what makes them up must itself be bounded.
    items
        The entries of one list; those that do not fit are counted at its end.
    """
    room = LIMIT - len("\n\n".join([*head, *tail]).encode("utf-8", "replace")) - 200
    kept: list[str] = []
    for item in items:
        room -= len(item.encode("utf-8", "replace")) + 1
        if room < 0:
            break
        kept.append(item)
    if len(kept) < len(items):
        kept.append(f"- {len(items) - len(kept)} of {len(items)} left out, to fit a job summary; the JSON has all.")
    return "\n\n".join([*head, "\n".join(kept), *tail]) + "\n"


def findings_markdown(findings: Sequence[Finding]) -> list[str]:
    """Write findings as a list, an entry each: severity, rule, where, message, what to do; one entry where there is none."""
    return [_finding(finding) for finding in findings] or ["No findings."]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1) -> str:
    """Write a table of plain texts, which are escaped here; the first ``text`` columns are words, the others numbers."""
    rule = ["---" if i < text else "---:" for i in range(len(headings))]
    lines = [[_cell(one) for one in headings], rule, *([_cell(one) for one in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(sentences: Iterable[str]) -> str:
    """Write plain sentences as a list."""
    return "\n".join(f"- {escape(sentence)}" for sentence in sentences)


def escape(text: str) -> str:
    """Write plain text on one line so that Markdown shows it as it is; what stands in backticks stays code."""
    return _LEADING.sub(r"\1\\\2", _inline(text))


def elided(rows: Sequence[Sequence[str]], keep: Callable[[int], bool] = lambda _: False) -> list[Sequence[str]]:
    """Leave out the middle of many rows; a row in its place says how many.

    Parameters
    ----------
    rows
        The rows of a table.
    keep
        Whether the row of this index is to be shown wherever it is.
    """
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    shown: list[Sequence[str]] = []
    gap = 0
    for index, row in enumerate(rows):
        if _AT_EITHER_END <= index < len(rows) - _AT_EITHER_END and not keep(index):
            gap += 1
            continue
        if gap:
            shown.append([f"({count(gap, 'row')})", *[""] * (len(row) - 1)])
            gap = 0
        shown.append(row)
    return shown


def _blocks(run: Run, curve: depth.Profile) -> str:
    columns = block_columns(curve, Spread(run))
    rows = list(zip(*(column.cells for column in columns), strict=True))
    named = {str(getattr(finding.site, curve.noun)) for finding in run.findings if finding.site is not None}
    # A block of several rows has its label in the first.
    labels: list[str] = list(itertools.accumulate((row[0] for row in rows), lambda above, own: own or above))
    text = sum(column.text for column in columns) + 1
    return table(one_line_names(columns), elided(rows, lambda index: labels[index] in named), text=text)


def _finding(finding: Finding) -> str:
    where = place_in_words(finding.site)
    head = f"- **{finding.severity} {finding.rule} {escape(finding.name)}**" + (f", {where}" if where else "")
    lines = [head, escape(finding.message)]
    if finding.remedy:
        lines.append(f"*What to do.* {escape(finding.remedy)}")
    if finding.also:
        lines.append(f"Also: {escape(', '.join(finding.also))}.")
    return "<br>\n  ".join(lines)


def place_in_words(place: Place | None) -> str:
    """Write a place as Markdown: block, sublayer, module and parameter; empty where nothing is known of it."""
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


def counts(findings: Sequence[Finding]) -> str:
    """Write ``1 error, 0 warnings, 3 notes``."""
    return ", ".join(count(sum(f.severity == severity for f in findings), severity) for severity in SEVERITIES)


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
