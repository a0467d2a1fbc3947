"""Rules: each reads a run's records and says where they break it.

Rules judge; they neither render nor know how the run was made.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from propcheck.analysis import profile as depth
from propcheck.errors import PropcheckError
from propcheck.rules import (
    backward,
    dead,
    forward,
    head,
    initial,
    jumps,
    nonfinite,
    observed,
    precision,
    ranges,
    reading,
    residual,
    steps,
    tokens,
    unused,
    values,
)
from propcheck.rules.causes import Found, fold
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from propcheck.records import Finding, Run, Severity

__all__ = ["ALL", "Rule", "RuleSetting", "chosen", "explain", "find", "judge", "markdown", "matching"]

ALL: tuple[Rule, ...] = tuple(
    sorted(
        (
            rule
            for family in (
                values,
                initial,
                forward,
                jumps,
                nonfinite,
                residual,
                steps,
                precision,
                ranges,
                backward,
                dead,
                unused,
                observed,
                reading,
                tokens,
                head,
            )
            for rule in family.RULES
        ),
        key=lambda rule: rule.id,
    )
)


class RuleSetting(Protocol):
    """What a probe may change of a rule; ``None`` keeps the default."""

    @property
    def threshold(self) -> float | None: ...  # noqa: D102

    @property
    def severity(self) -> Severity | None: ...  # noqa: D102


def find(name: str) -> Rule:
    """Find a rule by its id or its name.

    Raises
    ------
    PropcheckError
        There is none; the message names the nearest.
    """
    for rule in ALL:
        if name.lower() in (rule.id.lower(), rule.name):
            return rule
    names = [text for rule in ALL for text in (rule.id, rule.name)]
    near = difflib.get_close_matches(name.upper() if name[:2].upper() == "PC" else name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(rule.id for rule in ALL)}"
    raise PropcheckError(f"unknown rule {name}{hint}")


def matching(name: str) -> list[Rule]:
    """Return the rules that an id, a name or a family stands for; a family is the start of an id, such as ``PC1``.

    Raises
    ------
    PropcheckError
        There is none; the message names the nearest.
    """
    family = [rule for rule in ALL if re.fullmatch(r"PC\d{1,2}", name.upper()) and rule.id.startswith(name.upper())]
    return family or [find(name)]


def chosen(select: Collection[str] = (), ignore: Collection[str] = ()) -> list[Rule]:
    """Return the rules that :func:`judge` applies.

    Parameters
    ----------
    select, ignore
        Ids, names or families of rules to apply (empty: all) and to skip.

    Raises
    ------
    PropcheckError
        A rule is unknown.
    """
    selected = {rule.id for name in select for rule in matching(name)} or {rule.id for rule in ALL}
    selected -= {rule.id for name in ignore for rule in matching(name)}
    return [rule for rule in ALL if rule.id in selected]


def judge(
    run: Run,
    settings: Mapping[str, RuleSetting] = MappingProxyType({}),
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Judge a run by the rules.

    Parameters
    ----------
    run
        The run; its own ``findings`` are not looked at.
    settings
        Threshold and severity by rule id. A severity given here holds for every finding of the rule.
    select, ignore
        As :func:`chosen` takes them.

    Returns
    -------
    tuple of Finding
        Errors first, then by rule and site. With several seeds each message ends with how many of them show the finding.

    Raises
    ------
    PropcheckError
        An id is unknown.
    """
    changes = {find(name).id: setting for name, setting in settings.items()}
    limits = {rule.id: rule.threshold for rule in ALL}
    limits |= {id_: change.threshold for id_, change in changes.items() if change.threshold is not None}
    rules = chosen(select, ignore)

    seeds = sorted({record.seed for record in run.sites})
    whole = [(depth.profile(run), [depth.profile(run, seed) for seed in seeds])]
    runs = [replace(run, norms=tuple(norm for norm in run.norms if norm.seed == seed)) for seed in seeds]
    streams = list(zip(depth.streams(run), zip(*(depth.streams(run, seed) for seed in seeds), strict=True), strict=True))
    hits = {
        rule.id: [
            hit
            for curve, single in (streams if rule.of == "stream" else whole)
            for hit in _hits(rule, (run, curve), list(zip(runs, single, strict=True)), limits[rule.id])
        ]
        for rule in rules
    }
    found = [Found(rule, hit, note) for rule in rules for hit, note in hits[rule.id]]
    return fold(found, {id_: change.severity for id_, change in changes.items() if change.severity is not None})


def _hits(
    rule: Rule, whole: tuple[Run, depth.Profile], single: Sequence[tuple[Run, depth.Profile]], limit: float
) -> list[tuple[Hit, str]]:
    """Judge all seeds together and each by itself, and write behind each hit how many seeds show it."""
    run, curve = whole
    if len(single) < 2:
        return [(hit, "") for hit in rule.check(curve, run, limit)]
    each = [rule.check(own_curve, own_run, limit) for own_run, own_curve in single]
    hits = next((found for found in each if found), []) if rule.pool == "any" else rule.check(curve, run, limit)
    pairs = []
    for hit in hits:
        agreeing = sum(any(set(hit.sites) & set(other.sites) for other in found) for found in each)
        # Parameters are recorded of one seed, and so is what hits without a site judge.
        pairs.append((hit, f" Seen in {agreeing} of {len(single)} seeds." if hit.sites else ""))
    return pairs


def explain(name: str) -> str:
    """Explain a rule: what it sees, why it matters, how its threshold was chosen, what to do.

    Raises
    ------
    PropcheckError
        There is no such rule; the message names the nearest.
    """
    return find(name).explain()


def markdown() -> str:
    """Render ``docs/rules.md``."""
    head = (
        "# Rules\n\nGenerated from `propcheck/rules/` by `python docs/generate.py`; do not edit.\n\n`error` means that the "
        "model will not train, or does not compute what it says; `warning`, that published evidence ties what was seen to "
        "instability or waste; `note`, that it is worth knowing. `--select`, `--ignore` and a probe's `[rules.PC204]` "
        "tables (keys `threshold`, `severity`) change what is judged and how."
    )
    return "\n\n".join([head, *(rule.explain() for rule in ALL)]) + "\n"
