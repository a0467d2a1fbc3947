"""Gates and comparisons as results for GitHub annotations, JUnit and SARIF."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.compare import COMPARED
from propcheck.comparison.gate_findings import CHECKS, times, where
from propcheck.formatting import count, number
from propcheck.records import Finding, Place
from propcheck.render.results import Check, Results
from propcheck.render.terminal.changes import label_of
from propcheck.render.terminal.comparison_table import start_line
from propcheck.render.terminal.gate_table import facts

if TYPE_CHECKING:
    from propcheck.comparison.compare import Comparison, Contrast
    from propcheck.comparison.differences import Difference
    from propcheck.comparison.gate import Gate
    from propcheck.render.source_location import Location

_REMEDY = "A comparison never fails; use `propcheck gate` to fail on a difference."


def gate_results(gate: Gate, location: Location | None) -> Results:
    """Return the results of a gate; errors fail it.

    Parameters
    ----------
    gate
        The gate.
    location
        File for annotations to point at.
    """
    return Results(
        command="gate",
        subject=gate.run.target,
        location=location,
        checks=tuple(Check(id_, id_.removeprefix("gate-"), "error", text, text) for id_, text in CHECKS.items()),
        findings=gate.findings,
        failing=("error",),
        facts=tuple(facts(gate)),
        seconds=gate.run.engine.wall_seconds or None,
    )


def comparison_results(comparison: Comparison, location: Location | None) -> Results:
    """Return the differences between runs as notes, which never fail.

    Parameters
    ----------
    comparison
        The comparison.
    location
        File for annotations to point at.
    """
    labels = {quantity: label_of(quantity) for quantity in COMPARED}
    checks = [_check(quantity, label, f"The {label} differs between the runs.") for quantity, label in labels.items()]
    checks.append(_check("findings", "findings", "A rule has a finding in only one of the runs."))
    return Results(
        command="compare",
        subject=", ".join(run.target for run in comparison.runs),
        location=location,
        checks=tuple(checks),
        findings=tuple(finding for contrast in comparison.contrasts for finding in _findings(contrast)),
        failing=(),
        facts=tuple(start_line(contrast) for contrast in comparison.contrasts),
    )


def _check(key: str, name: str, text: str) -> Check:
    return Check(f"compare-{key}", name, "note", text, text)


def _findings(contrast: Contrast) -> list[Finding]:
    results = []
    for change in contrast.changes:
        if change.first is None or change.most is None:
            continue
        noun = {"grad_norm": "parameter", "loss": "loss"}.get(change.quantity, "site")
        most = f"; largest at {_described(change.most)}" if change.most is not change.first else ""
        results.append(
            Finding(
                rule=f"compare-{change.quantity}",
                name=label_of(change.quantity),
                severity="note",
                site=change.first.place if change.first.place != Place() else None,
                metric=change.quantity,
                value=change.first.value,
                expected=change.first.baseline,
                message=f"{contrast.label} compared with A: {label_of(change.quantity)} differs at {change.differing} of "
                f"{count(change.compared, noun)}, first at {_described(change.first)}{most}.",
                remedy=_REMEDY,
            )
        )
    for label, findings in ((contrast.label, contrast.won), ("A", contrast.lost)):
        results += [
            dataclasses.replace(
                finding,
                rule="compare-findings",
                name="findings",
                severity="note",
                message=f"Only in {label}: {finding.severity} {finding.rule} {finding.name}: {finding.message}",
            )
            for finding in findings or ()
        ]
    return results


def _described(difference: Difference) -> str:
    ratio = "" if difference.ratio is None else f" ({times(difference.ratio)})"
    return f"{where(difference.place)}: {number(difference.value)}, {number(difference.baseline)} in A{ratio}"
