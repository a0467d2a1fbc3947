"""The table of a run, one row per block or per site, with findings and a summary below it; laid out for 80 columns.

Colours only repeat what the words say, so the output reads the same on light and dark terminals, in a pipe and in a log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from propcheck.analysis.profile import profile
from propcheck.render.summary import summary_lines, title
from propcheck.render.terminal.seed_spread import Spread
from propcheck.render.terminal.table_columns import block_columns, one_line_names, site_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from propcheck.records import Finding, Run, Severity
    from propcheck.render.terminal.table_columns import TableColumn

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold magenta", "note": "bold"}
# Characters between columns: two if every column fits, else one.
_GAPS = (2, 1)


def print_run(run: Run, console: Console, detail: Literal["block", "site"] = "block") -> None:
    """Print a run: its table, its findings and a summary.

    Parameters
    ----------
    run
        The run, with its findings.
    console
        Where to print; its width decides which columns fit.
    detail
        What a row is.
    """
    curve = profile(run)
    print_lines([title(run)], console)
    if curve.sites:
        spread = Spread(run)
        columns = site_columns(curve.sites, spread) if detail == "site" else block_columns(curve, spread)
        print_columns(columns, console)
    console.print()
    print_findings(run.findings, console)
    print_lines(summary_lines(run), console)


def print_lines(lines: Iterable[str], console: Console) -> None:
    """Print plain text, one paragraph per line, without markup or highlighting."""
    for line in lines:
        console.print(Text(line), highlight=False)


def print_columns(columns: Sequence[TableColumn], console: Console) -> None:
    """Print a table; columns that do not fit are left out, and their names are printed below it."""
    shown = list(columns)
    gap = next((gap for gap in _GAPS if _width(shown, gap) <= console.width), _GAPS[-1])
    while len(shown) > 1 and _width(shown, gap) > console.width:
        lowest = min(column.priority for column in shown)
        others = [column for column in shown if column.priority > lowest]
        # Columns of the highest priority are left out one by one, the last first.
        shown = others if len(others) > 1 else shown[:-1]
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in shown:
        table.add_column(column.heading, justify="left" if column.text else "right", no_wrap=True, vertical="bottom")
    for row in zip(*(column.cells for column in shown), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, highlight=False)
    hidden = [name for column, name in zip(columns, one_line_names(columns), strict=True) if column not in shown]
    if hidden:
        print_lines([f"Columns hidden (terminal too narrow): {', '.join(hidden)}."], console)


def _width(columns: Sequence[TableColumn], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print findings with their remedies and sources, and an empty line after them."""
    if not findings:
        print_lines(["No findings."], console)
    for finding in findings:
        head = Text.assemble((finding.severity, _STYLES[finding.severity]), f" {finding.rule} {finding.name}")
        console.print(head, highlight=False)
        also = f"\nAlso: {', '.join(finding.also)}." if finding.also else ""
        # A rule without a source explains that on its page.
        source = f"\nSource: {finding.source}" if finding.source and not finding.source.startswith("None") else ""
        remedy = f"\n{finding.remedy}" if finding.remedy else ""
        console.print(Padding(Text(f"{finding.message}{remedy}{also}{source}"), (0, 0, 0, 2)), highlight=False)
    console.print()
