"""A gate as a terminal table and as Markdown, made of the same parts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.compare import summarize_changes
from propcheck.comparison.gate_findings import ACCEPT
from propcheck.comparison.places import describe_place
from propcheck.formatting import count
from propcheck.render import markdown
from propcheck.render.summary import finding_counts, title
from propcheck.render.terminal.changes import change_columns, tolerance_range
from propcheck.render.terminal.run_table import print_columns, print_findings, print_lines

if TYPE_CHECKING:
    from rich.console import Console

    from propcheck.comparison.gate import GateResult
    from propcheck.records import Finding
    from propcheck.render.terminal.table_columns import TableColumn


def print_gate(gate: GateResult, console: Console) -> None:
    """Print a gate: one row per quantity, and what fails. If the baseline was written, print only that.

    Parameters
    ----------
    gate
        The gate.
    console
        Where to print; its width decides which columns fit.
    """
    print_lines([title(gate.run)], console)
    if gate.written is None:
        print_columns(_columns(gate), console)
        console.print()
        print_findings(_shown(gate), console)
    print_lines(facts(gate), console)


def gate_markdown(gate: GateResult) -> str:
    """Write a gate as Markdown that fits a job summary."""
    head = [
        f"## propcheck gate: {markdown.escape(gate.run.target)} {_verdict(gate)}",
        markdown.escape(title(gate.run)),
    ]
    if gate.written is not None:
        return markdown.page(head, [], [markdown.bullets(facts(gate))])
    head += [markdown.columns_table(_columns(gate)), f"### Findings: {finding_counts(gate.findings)}"]
    return markdown.page(head, markdown.findings_markdown(_shown(gate)), [markdown.bullets(facts(gate))])


def _verdict(gate: GateResult) -> str:
    return "baseline written" if gate.written is not None else "passed" if gate.passed else "failed"


def _columns(gate: GateResult) -> list[TableColumn]:
    changes = [
        summarize_changes(quantity, amount, gate.differences, gate.allowed) for quantity, amount in gate.compared.items()
    ]
    return change_columns(changes, "baseline", "run")


def _shown(gate: GateResult) -> list[Finding]:
    """Return the findings without the remedy that they share, which is printed once, at the end."""
    return [dataclasses.replace(finding, remedy="") if finding.remedy == ACCEPT else finding for finding in gate.findings]


def facts(gate: GateResult) -> list[str]:
    """Return the verdict and the notes, one sentence per line."""
    if gate.written is not None:
        return list(gate.notes)
    amount = count(sum(gate.compared.values()), "number")
    lines = list(gate.notes)
    if gate.versions:
        lines.append(f"The baseline was made with {'; '.join(gate.versions)}.")
    lines.append(f"Baseline: {gate.baseline.path or gate.baseline.target}.")
    if gate.passed:
        allowed = list(gate.allowed.values()) or [(1 + gate.tolerance,) * 2]
        within = tolerance_range((min(least for least, _ in allowed), max(most for _, most in allowed)))
        lines.append(f"Gate passed: {amount} match the baseline (tolerance {within}), and there is no new finding.")
    else:
        start = "" if gate.start is None else f" The change starts at {describe_place(gate.start)}."
        lines.append(f"Gate failed: {len(gate.differences)} of {amount} are outside their tolerance.{start}")
        lines += [ACCEPT] if any(finding.remedy == ACCEPT for finding in gate.findings) else []
    return lines
