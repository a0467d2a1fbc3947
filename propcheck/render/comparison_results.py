"""A gate and a comparison in the form that machines read."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from propcheck.comparison.gate_findings import CHECKS, times, where
from propcheck.formatting import count, number
from propcheck.records import Finding, Place
from propcheck.render.results import Check, Results
from propcheck.render.terminal.changes import NAMES
from propcheck.render.terminal.gate_table import facts

if TYPE_CHECKING:
    from propcheck.comparison.compare import Comparison, Contrast
    from propcheck.comparison.differences import Difference
    from propcheck.comparison.gate import Gate
    from propcheck.render.source_location import Location

_REMEDY = "Nothing fails by a comparison; `propcheck gate` is what judges."


def gate_results(gate: Gate, location: Location | None) -> Results:
    """Return what a gate found; errors fail it.

    Parameters
    ----------
    gate
        The gate.
    location
        The file that annotations point at.
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
    """Return what differs between runs, as notes: nothing of it fails.

    Parameters
    ----------
    comparison
        The comparison.
    location
        The file that annotations point at.
    """
    checks = [_check(quantity, name, f"Whether it differs: {name}.") for quantity, name in NAMES.items()]
    checks.append(_check("findings", "findings", "What the rules found in one run and not in the first."))
    return Results(
        command="compare",
        subject=", ".join(run.target for run in comparison.runs),
        location=location,
        checks=tuple(checks),
        findings=tuple(finding for contrast in comparison.contrasts for finding in _findings(contrast)),
        failing=(),
        facts=tuple(
            f"No number of {one.label} differs from that of A."
            if one.start is None
            else f"{one.label} parts from A at {where(one.start)}."
            for one in comparison.contrasts
        ),
    )


def _check(key: str, name: str, text: str) -> Check:
    return Check(f"compare-{key}", name, "note", text, text)


def _findings(contrast: Contrast) -> list[Finding]:
    found = []
    for change in contrast.changes:
        if change.first is None or change.most is None:
            continue
        noun = {"grad_norm": "parameter", "loss": "loss"}.get(change.quantity, "site")
        most = f"; most at {_said(change.most)}" if change.most is not change.first else ""
        found.append(
            Finding(
                rule=f"compare-{change.quantity}",
                name=NAMES[change.quantity],
                severity="note",
                site=change.first.place if change.first.place != Place() else None,
                metric=change.quantity,
                value=change.first.value,
                expected=change.first.baseline,
                message=f"{contrast.label} beside A: {NAMES[change.quantity]} differs at {change.differing} of "
                f"{count(change.compared, noun)}, first at {_said(change.first)}{most}.",
                remedy=_REMEDY,
            )
        )
    for label, findings in ((contrast.label, contrast.won), ("A", contrast.lost)):
        found += [
            dataclasses.replace(
                one,
                rule="compare-findings",
                name="findings",
                severity="note",
                message=f"Only in {label}: {one.severity} {one.rule} {one.name}: {one.message}",
            )
            for one in findings or ()
        ]
    return found


def _said(one: Difference) -> str:
    ratio = "" if one.ratio is None else f" ({times(one.ratio)})"
    return f"{where(one.place)}: {number(one.baseline)} in A, {number(one.value)} here{ratio}"
