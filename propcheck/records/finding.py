"""One finding: a rule that is broken at one place, and how severe that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
FailLevel = Literal["error", "warning", "note", "never"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first


def failing(level: FailLevel) -> tuple[Severity, ...]:
    """Return the severities at or above a fail level, worst first; none for ``never``."""
    return () if level == "never" else SEVERITIES[: SEVERITIES.index(level) + 1]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding is; every part may be None."""

    site: int | None = None
    block: int | None = None
    sublayer: str | None = None
    module: str | None = None
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule at one place.

    Attributes
    ----------
    rule, name
        ID and name of the rule: ``PC201``, ``explosion``.
    severity
        error, warning or note.
    site
        Where it is; None for the whole model.
    metric, value, expected
        What was measured, its value, and the value or limit that was expected.
    message
        What is wrong and where, in words.
    remedy
        What to change.
    source
        Source of the rule.
    also
        Consequences that are not reported as findings themselves: ``PC302 at 41 sites``.
    """

    rule: str
    name: str
    severity: Severity
    site: Place | None
    metric: str
    value: float | str | None
    expected: float | str | None
    message: str
    remedy: str
    source: str = ""
    also: tuple[str, ...] = ()
