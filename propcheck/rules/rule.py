"""Types of a rule: its text and thresholds (`Rule`), and one place where it is broken (`Hit`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Place, Run, Severity

Relation = Literal["any", "same", "touching", "after", "before"]


@dataclass(frozen=True, slots=True)
class Hit:
    """One place, or one cause over several places, where a rule is broken.

    Attributes
    ----------
    sites
        All sites that the hit covers; empty if it concerns no site.
    place
        The worst or first of these sites, or a module or parameter.
    metric, value, expected
        The measured quantity, its value, and the value expected there.
    message
        What is wrong, where, and what it leads to.
    severity, remedy
        Replace the rule's own, if set.
    """

    sites: tuple[int, ...]
    place: Place
    metric: str
    value: float | str | None
    expected: float | str | None
    message: str
    severity: Severity | None = None
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """Code (or a config, if ``language`` says so) that breaks a rule, and the same with the fault repaired."""

    broken: str
    repaired: str
    language: str = "python"


Check = Callable[["Profile", "Run", float], Sequence[Hit]]


def _unset(_profile: Profile, _run: Run, _threshold: float) -> Sequence[Hit]:
    raise NotImplementedError


@dataclass(slots=True, kw_only=True, eq=False)
class Rule:
    """One rule: its documentation, its default threshold, and the function that checks it.

    A rule's file puts the text first and the check below it::

        RULE = Rule(id="PC201", name="explosion", ...)


        @RULE.checked_by
        def check(profile: Profile, run: Run, threshold: float) -> list[Hit]: ...

    Attributes
    ----------
    id, name
        Stable identifiers, as in ``--select PC201`` and ``--select explosion``.
    severity
        Severity of a hit that does not set its own.
    threshold, unit
        Default threshold and its unit. 0 means that the rule has no threshold to set.
    least
        A threshold set by a user must be above this: 1 for a factor (every value differs from 1 by some factor), else 0.
    sees, why
        What the rule detects, and what goes wrong in training because of it.
    formula
        The condition, in terms of the columns of a run.
    basis, source
        How the threshold was chosen, and the publications and reported faults behind the rule.
    remedy
        What to do, unless a hit gives a more specific remedy.
    example
        Code that breaks the rule, and its repair.
    scope
        What one call of the check judges: a single stream of the model, or the whole run.
    seeds
        With several seeds, "median" checks the median over seeds at each site; "any" checks every seed and reports the first
        with a hit.
    caused_by
        Rules that can be the cause of this one, each with the relation that the sites of the two hits must have. If there is
        such a hit, this rule's hit is listed under it and is no finding of its own. "any": the cause may lie anywhere; "same":
        all sites of this hit are among the cause's; "touching": at least one is; "after": none lies before the cause's first;
        "before": none lies after the cause's last.
    """

    id: str
    name: str
    severity: Severity
    threshold: float
    unit: str
    least: float = 0.0
    sees: str
    why: str
    formula: str
    basis: str
    source: str
    remedy: str
    example: Example
    scope: Literal["stream", "run"] = "stream"
    seeds: Literal["median", "any"] = "median"
    caused_by: tuple[tuple[str, Relation], ...] = ()
    check: Check = field(default=_unset, repr=False)

    def checked_by(self, check: Check) -> Check:
        """Register the function that checks this rule; a decorator."""
        self.check = check
        return check
