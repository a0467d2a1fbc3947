"""Findings from hits: where one cause breaks several rules, it leads and the others stand under it."""

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
class Found:
    """A hit of a rule; ``note`` is written behind its message."""

    rule: Rule
    hit: Hit
    note: str


def fold(found: Sequence[Found], severities: Mapping[str, Severity]) -> tuple[Finding, ...]:
    """Turn hits into findings, each consequence into a line of its cause.

    Parameters
    ----------
    found
        All hits.
    severities
        By rule id: what every finding of that rule is worth, whatever its hit says.

    Returns
    -------
    tuple of Finding
        Errors first, then by rule and site. The cause of an error is one, so that no error hides behind a milder cause, unless
        ``severities`` says what it is worth.
    """
    causes = {id(one): _cause(one, found) for one in found}
    folded: dict[int, list[Found]] = {}  # by cause
    for one in found:
        cause = _first_cause(one, causes)
        if cause is not one:
            folded.setdefault(id(cause), []).append(one)
    findings: list[tuple[int, str, int, Finding]] = []
    for one in found:
        if causes[id(one)] is not None:
            continue
        under = folded.get(id(one), [])
        severity = _severity(one, severities)
        if one.rule.id not in severities and any(_severity(each, severities) == "error" for each in under):
            severity = "error"
        finding = Finding(
            rule=one.rule.id,
            name=one.rule.name,
            severity=severity,
            site=one.hit.place,
            metric=one.hit.metric,
            value=one.hit.value,
            expected=one.hit.expected,
            message=one.hit.message + one.note,
            remedy=one.hit.remedy or one.rule.remedy,
            source=one.rule.source,
            also=_also(under),
        )
        findings.append((_ORDER[severity], one.rule.id, min(one.hit.sites, default=-1), finding))
    findings.sort(key=lambda item: item[:3])
    return tuple(item[3] for item in findings)


def _severity(one: Found, severities: Mapping[str, Severity]) -> Severity:
    return severities.get(one.rule.id) or one.hit.severity or one.rule.severity


def _also(under: Sequence[Found]) -> tuple[str, ...]:
    """Write the rules that a cause broke too, and at how many sites: ``PC302 at 41 sites``."""
    sites: dict[str, set[int]] = {}
    for one in under:
        sites.setdefault(one.rule.id, set()).update(one.hit.sites)
    return tuple(f"{id_} at {count(len(where), 'site')}" if where else id_ for id_, where in sorted(sites.items()))


def _cause(one: Found, found: Sequence[Found]) -> Found | None:
    """Find the hit that explains another one: of the rule that it names first."""
    for leader, relation in one.rule.follows:
        for other in found:
            if other.rule.id == leader and other is not one and _related(one.hit.sites, other.hit.sites, relation):
                return other
    return None


def _first_cause(one: Found, causes: Mapping[int, Found | None]) -> Found:
    """Follow causes to the one that has none."""
    cause = causes[id(one)]
    return one if cause is None else _first_cause(cause, causes)


def _related(own: tuple[int, ...], cause: tuple[int, ...], relation: Relation) -> bool:
    """Whether a hit's sites lie to those of a possible cause as ``relation`` says; a hit without sites is everywhere."""
    if relation == "any" or not cause:
        return True
    if not own:
        return False
    return {
        "same": set(own) <= set(cause),
        "touching": bool(set(own) & set(cause)),
        "after": min(own) >= min(cause),
        "before": max(own) <= max(cause),
    }[relation]
