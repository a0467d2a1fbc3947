"""Gates and comparisons as results for GitHub annotations, JUnit and SARIF."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.gate_findings import CHECKS
from propcheck.comparison.places import describe_place
from propcheck.comparison.quantities import QUANTITIES
from propcheck.formatting import count, number, times
from propcheck.records import Finding, Place
from propcheck.render.results import Check, Results
from propcheck.render.terminal.comparison_table import start_sentence
from propcheck.render.terminal.gate_table import facts

if TYPE_CHECKING:
    from propcheck.comparison.compare import PairwiseComparison, RunComparison
    from propcheck.comparison.differences import Difference
    from propcheck.comparison.gate import GateResult
    from propcheck.render.source_location import Location

_REMEDY = "A comparison never fails. To fail on a difference, use `propcheck gate`."


def gate_results(gate: GateResult, location: Location | None) -> Results:
    """Return the findings of a gate; errors fail it.

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


def comparison_results(comparison: RunComparison, location: Location | None) -> Results:
    """Return the differences between runs as notes, which never fail.

    Parameters
    ----------
    comparison
        The comparison.
    location
        File for annotations to point at.
    """
    checks = [_check(name, quantity.label, f"The {quantity.phrase} differs.") for name, quantity in QUANTITIES.items()]
    checks.append(_check("findings", "findings", "A finding is in only one of the runs."))
    return Results(
        command="compare",
        subject=", ".join(run.target for run in comparison.runs),
        location=location,
        checks=tuple(checks),
        findings=tuple(finding for contrast in comparison.contrasts for finding in _findings(contrast)),
        failing=(),
        facts=tuple(start_sentence(contrast) for contrast in comparison.contrasts),
    )


def _check(key: str, name: str, text: str) -> Check:
    return Check(f"compare-{key}", name, "note", text, text)


def _findings(contrast: PairwiseComparison) -> list[Finding]:
    found = []
    for change in contrast.changes:
        if change.first is None or change.most is None:
            continue
        quantity = QUANTITIES[change.quantity]
        most = f"; most at {_described(change.most, contrast.label)}" if change.most is not change.first else ""
        found.append(
            Finding(
                rule=f"compare-{change.quantity}",
                name=quantity.label,
                severity="note",
                site=change.first.place if change.first.place != Place() else None,
                metric=change.quantity,
                value=change.first.value,
                expected=change.first.baseline,
                message=f"{contrast.label} compared with A: the {quantity.phrase} differs at {change.differing} of "
                f"{count(change.compared, quantity.noun)}, first at {_described(change.first, contrast.label)}{most}.",
                remedy=_REMEDY,
            )
        )
    for label, findings in ((contrast.label, contrast.new_findings), ("A", contrast.gone_findings)):
        found += [
            dataclasses.replace(
                finding,
                rule="compare-findings",
                name="findings",
                severity="note",
                message=f"Only in {label}: {finding.severity} {finding.rule} {finding.name}: {finding.message}",
            )
            for finding in findings or ()
        ]
    return found


def _described(difference: Difference, label: str) -> str:
    ratio = "" if difference.ratio is None else f" ({times(difference.ratio)})"
    place = describe_place(difference.place)
    return f"{place}: {number(difference.baseline)} in A, {number(difference.value)} in {label}{ratio}"
