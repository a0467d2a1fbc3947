"""Judging of a run: every chosen rule on every stream, over all seeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from propcheck.analysis.profile import Profile, profile, streams
from propcheck.rules.causes import Violation, fold
from propcheck.rules.registry import ALL, chosen, find

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from propcheck.records import Finding, Run, Severity
    from propcheck.rules.rule import Rule


class RuleSetting(Protocol):
    """A probe's changes to a rule; ``None`` keeps the default."""

    @property
    def threshold(self) -> float | None: ...  # noqa: D102

    @property
    def severity(self) -> Severity | None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class _Scope:
    """A stream or a whole run: its profile over all seeds, and the profile and the run of each seed alone."""

    profile: Profile
    run: Run
    by_seed: tuple[tuple[Profile, Run], ...]


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
        The run. Its existing ``findings`` are not read.
    settings
        Threshold and severity by rule id. A severity set here applies to every finding of the rule.
    select
        Ids, names or families (``PC1``) of the rules to judge by; empty means all.
    ignore
        Ids, names or families of the rules to leave out.

    Returns
    -------
    tuple of Finding
        Errors first, then by rule and site. With several seeds, each message ends with the number of seeds that show the
        finding.

    Raises
    ------
    PropcheckError
        If a rule is unknown.
    """
    overrides = {find(name).id: setting for name, setting in settings.items()}
    thresholds = {rule.id: rule.threshold for rule in ALL}
    thresholds |= {id_: setting.threshold for id_, setting in overrides.items() if setting.threshold is not None}
    severities = {id_: setting.severity for id_, setting in overrides.items() if setting.severity is not None}
    rules = chosen(select, ignore)
    scopes = _scopes(run)
    violations = [
        violation
        for rule in rules
        for scope in scopes[rule.scope]
        for violation in _violations(rule, scope, thresholds[rule.id])
    ]
    return fold(violations, severities)


def _scopes(run: Run) -> dict[str, list[_Scope]]:
    """Return what a rule judges, by the rule's ``scope``."""
    seeds = sorted({site.seed for site in run.sites})
    runs = [replace(run, norms=tuple(norm for norm in run.norms if norm.seed == seed)) for seed in seeds]
    streams_by_seed = zip(*(streams(run, seed) for seed in seeds), strict=True)
    return {
        "run": [_Scope(profile(run), run, tuple((profile(run, seed), each) for seed, each in zip(seeds, runs, strict=True)))],
        "stream": [
            _Scope(stream, run, tuple(zip(by_seed, runs, strict=True)))
            for stream, by_seed in zip(streams(run), streams_by_seed, strict=True)
        ],
    }


def _violations(rule: Rule, scope: _Scope, threshold: float) -> list[Violation]:
    """Check a rule on one scope, and count for each hit the seeds that show it."""
    if len(scope.by_seed) < 2:
        return [Violation(rule, hit) for hit in rule.check(scope.profile, scope.run, threshold)]
    by_seed = [rule.check(profile, run, threshold) for profile, run in scope.by_seed]
    if rule.seeds == "any":
        hits = next((hits for hits in by_seed if hits), [])
    else:
        hits = rule.check(scope.profile, scope.run, threshold)
    violations = []
    for hit in hits:
        showing = sum(any(set(hit.sites) & set(other.sites) for other in hits_of_seed) for hits_of_seed in by_seed)
        # Parameters are recorded for one seed only, and so is everything that a hit without sites is about.
        seen = f" Seen in {showing} of {len(by_seed)} seeds." if hit.sites else ""
        violations.append(Violation(rule, replace(hit, message=hit.message + seen)))
    return violations
