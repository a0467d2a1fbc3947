"""A gate as a table and as Markdown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.compare import change
from propcheck.comparison.gate_findings import MEANT, where
from propcheck.formatting import count
from propcheck.render import markdown
from propcheck.render.summary import finding_counts, title
from propcheck.render.terminal.changes import change_columns, passing
from propcheck.render.terminal.run_table import print_columns, print_findings, print_lines

if TYPE_CHECKING:
    from rich.console import Console

    from propcheck.comparison.gate import Gate
    from propcheck.records import Finding
    from propcheck.render.terminal.columns import TableColumn


def print_gate(gate: Gate, console: Console) -> None:
    """Print a gate: the quantities that were compared and the findings; for a baseline that was just written, only the notes.

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


def gate_markdown(gate: Gate) -> str:
    """Write a gate as Markdown that fits a job summary."""
    head = [
        f"## propcheck gate: {markdown.escape(gate.run.target)} {_verdict(gate)}",
        markdown.escape(title(gate.run)),
    ]
    if gate.written is not None:
        return markdown.page(head, [], [markdown.bullets(facts(gate))])
    head += [markdown.columns_table(_columns(gate)), f"### Findings: {finding_counts(gate.findings)}"]
    return markdown.page(head, markdown.findings_markdown(_shown(gate)), [markdown.bullets(facts(gate))])


def _verdict(gate: Gate) -> str:
    return "baseline written" if gate.written is not None else "passed" if gate.passed else "failed"


def _columns(gate: Gate) -> list[TableColumn]:
    changes = [change(quantity, amount, gate.differences, gate.allowed) for quantity, amount in gate.compared.items()]
    return change_columns(changes, "baseline", "here")


def _shown(gate: Gate) -> list[Finding]:
    """Return the findings for people, to whom what all of them advise is said once, at the end."""
    return [dataclasses.replace(one, remedy="") if one.remedy == MEANT else one for one in gate.findings]


def facts(gate: Gate) -> list[str]:
    """Say in a few sentences what the gate found."""
    if gate.written is not None:
        return list(gate.notes)
    amount = count(sum(gate.compared.values()), "number")
    lines = list(gate.notes)
    if gate.versions:
        lines.append(f"Made with other versions or on another device: {'; '.join(gate.versions)}.")
    lines.append(f"Baseline: {gate.baseline.path or gate.baseline.target}.")
    if gate.passed:
        allowed = list(gate.allowed.values()) or [(1 + gate.tolerance,) * 2]
        within = passing((min(least for least, _ in allowed), max(most for _, most in allowed)))
        lines.append(f"Gate passed: {amount} as in the baseline within {within}, and no new finding.")
    else:
        begins = "" if gate.start is None else f" The change starts at {where(gate.start)}."
        lines.append(f"Gate failed: {len(gate.differences)} of {amount} outside the tolerances.{begins}")
        lines += [MEANT] if any(one.remedy == MEANT for one in gate.findings) else []
    return lines
