"""Findings from violations: a violation that another one causes is listed under its cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.formatting import count
from propcheck.records import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.rules.rule import Hit, Relation, Rule

_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Violation:
    """A rule and one hit of it."""

    rule: Rule
    hit: Hit

    def severity(self, overrides: Mapping[str, Severity]) -> Severity:
        """Return the user's severity for the rule, else the hit's, else the rule's."""
        return overrides.get(self.rule.id) or self.hit.severity or self.rule.severity


def fold(violations: Sequence[Violation], severities: Mapping[str, Severity]) -> tuple[Finding, ...]:
    """Turn violations into findings, and list each consequence under its root cause.

    Parameters
    ----------
    violations
        All violations.
    severities
        Severities set by the user, by rule id. They replace the severity of every hit of the rule.

    Returns
    -------
    tuple of Finding
        Errors first, then by rule and site. The cause of an error becomes an error too, so that no error is hidden under a
        milder cause, unless ``severities`` sets the severity of the cause.
    """
    causes = {id(violation): _cause(violation, violations) for violation in violations}
    consequences: dict[int, list[Violation]] = {}  # by id() of the root cause
    for violation in violations:
        root = _root_cause(violation, causes)
        if root is not violation:
            consequences.setdefault(id(root), []).append(violation)
    roots = [violation for violation in violations if causes[id(violation)] is None]
    findings = [(root, _finding(root, consequences.get(id(root), []), severities)) for root in roots]
    findings.sort(key=lambda pair: (_ORDER[pair[1].severity], pair[0].rule.id, min(pair[0].hit.sites, default=-1)))
    return tuple(finding for _, finding in findings)


def _finding(root: Violation, consequences: Sequence[Violation], severities: Mapping[str, Severity]) -> Finding:
    severity = root.severity(severities)
    if root.rule.id not in severities and any(each.severity(severities) == "error" for each in consequences):
        severity = "error"
    return Finding(
        rule=root.rule.id,
        name=root.rule.name,
        severity=severity,
        site=root.hit.place,
        metric=root.hit.metric,
        value=root.hit.value,
        expected=root.hit.expected,
        message=root.hit.message,
        remedy=root.hit.remedy or root.rule.remedy,
        source=root.rule.source,
        also=_also(consequences),
    )


def _also(consequences: Sequence[Violation]) -> tuple[str, ...]:
    """List the rules that a cause broke too, each with its number of sites: ``PC302 at 41 sites``."""
    sites: dict[str, set[int]] = {}
    for violation in consequences:
        sites.setdefault(violation.rule.id, set()).update(violation.hit.sites)
    return tuple(f"{id_} at {count(len(numbers), 'site')}" if numbers else id_ for id_, numbers in sorted(sites.items()))


def _cause(violation: Violation, violations: Sequence[Violation]) -> Violation | None:
    """Find the violation that causes another one, in the order in which the rule lists its causes."""
    for cause_id, relation in violation.rule.caused_by:
        for other in violations:
            if (
                other.rule.id == cause_id
                and other is not violation
                and _related(violation.hit.sites, other.hit.sites, relation)
            ):
                return other
    return None


def _root_cause(violation: Violation, causes: Mapping[int, Violation | None]) -> Violation:
    """Follow causes up to the one that has none."""
    cause = causes[id(violation)]
    return violation if cause is None else _root_cause(cause, causes)


def _related(sites: tuple[int, ...], cause: tuple[int, ...], relation: Relation) -> bool:
    """Whether a hit's sites have the given relation to those of a possible cause; a cause without sites is everywhere."""
    if relation == "any" or not cause:
        return True
    if not sites:
        return False
    return {
        "same": set(sites) <= set(cause),
        "touching": bool(set(sites) & set(cause)),
        "after": min(sites) >= min(cause),
        "before": max(sites) <= max(cause),
    }[relation]
