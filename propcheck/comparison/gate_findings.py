"""What a gate says of the differences it found: one finding for each quantity, with the place where the change starts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from propcheck.comparison.differences import BACKWARD, FORWARD
from propcheck.comparison.places import parameter_place, place_of
from propcheck.formatting import count, number, percent, places
from propcheck.records import Finding, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.comparison.differences import Difference
    from propcheck.comparison.match_parameters import ParameterPairing
    from propcheck.comparison.match_sites import SitePair
    from propcheck.config.tolerances import Quantity
    from propcheck.records import ParameterRecord, SiteRecord

CHECKS: dict[str, str] = {
    "gate-nonfinite": "A NaN or an infinity on either side: no tolerance holds for it.",
    "gate-sites": "Residual additions that only one of the two has.",
    "gate-parameters": "Parameters that only one of the two has; one that was renamed, or fused with others, is in both.",
    "gate-init": "A parameter starts from values of another size: the RMS of its elements differs by more than the tolerance.",
    "gate-stream": "The RMS of the stream or of an update differs by more than the tolerance.",
    "gate-gradient": "The norm of a gradient differs by more than the tolerance: of the stream or the update at a residual "
    "addition, of a branch's parameters, or of a single parameter.",
    "gate-loss": "The first loss differs by more than the tolerance.",
    "gate-findings": "A rule found an error or a warning that it did not find in the baseline.",
}

_WORDS: dict[Quantity, str] = {
    "stream_rms": "RMS of the stream",
    "update_rms": "RMS of the update",
    "grad_stream_norm": "gradient of the stream",
    "grad_update_norm": "gradient of the update",
    "param_grad_norm": "gradient of a branch's parameters",
    "parameter_rms": "RMS of a parameter's elements",
    "grad_norm": "gradient of a parameter",
    "loss": "first loss",
}
_RULES: dict[Quantity, str] = {
    "parameter_rms": "gate-init",
    "stream_rms": "gate-stream",
    "update_rms": "gate-stream",
    "loss": "gate-loss",
}
MEANT = "If the change is meant, make the baseline again with --update-baseline and commit it."
_LISTED = 8  # sites of a kind that are named; parameters half as many, since their names are long


def where(place: Place) -> str:
    """Say where something is: ``site 11 (mlp of block 5, layers.5.mlp)``."""
    if place.parameter is not None:
        return place.parameter
    if place.site is None:
        return "the whole model"
    kind = place.sublayer or "update"
    inside = kind if place.block is None else f"{kind} of block {place.block}"
    return f"site {place.site} ({inside}{f', {place.module}' if place.module else ''})"


def nonfinite(found: Sequence[Difference]) -> list[Finding]:
    """Say where a NaN or an infinity is."""
    bad = [one for one in found if one.how == "nonfinite"]
    if not bad:
        return []
    forward = [one for one in bad if one.forward]
    # The first in the direction in which it travels.
    first = min(forward, key=lambda one: one.position) if forward else max(bad, key=lambda one: one.position)
    listed = [f"{name} at {count(amount, 'place')}" for name, amount in Counter(one.quantity for one in bad).items()]
    return [
        _of(
            "gate-nonfinite",
            first,
            f"NaN or infinity: {', '.join(listed)}. First at {where(first.place)}: {first.quantity} is {number(first.value)} "
            f"here and {number(first.baseline)} in the baseline.",
            "A run with a NaN is no baseline: make it again from a model that is whole. If this run has it, its scan "
            "says which operation made the first.",
        )
    ]


def structure(pairs: Sequence[SitePair], parameters: ParameterPairing, notes: Sequence[str]) -> list[Finding]:
    """Say which sites and parameters only one side has."""
    missing = [pair.base for pair in pairs if pair.other is None and pair.base is not None]
    new = [pair.other for pair in pairs if pair.base is None and pair.other is not None]
    findings = [_lone_sites(sites, word, notes) for sites, word in ((missing, "missing"), (new, "new")) if sites]
    for records, word in ((parameters.missing, "missing"), (parameters.new, "new")):
        findings += [_lone_parameters(records, word)] if records else []
    return findings


def _lone_sites(sites: Sequence[SiteRecord], word: str, notes: Sequence[str]) -> Finding:
    first = place_of(sites[0])
    rest = sites[1:]
    said = "of the baseline is missing here" if word == "missing" else "is new: the baseline has none there"
    text = f"The residual addition at {where(first)} {said}."
    if rest:
        listed = ", ".join(str(record.site) for record in rest[:_LISTED]) + (" ..." if len(rest) > _LISTED else "")
        text += f" So {'are' if len(rest) > 1 else 'is'} {len(rest)} more: {listed}."
    text += "".join(f" {note}" for note in notes if "site" not in note)
    return Finding("gate-sites", word, "error", first, "site", word, None, text, MEANT)


def _lone_parameters(records: Sequence[ParameterRecord], word: str) -> Finding:
    first, most = records[0], _LISTED // 2
    listed = ", ".join(f"{one.name} {list(one.shape)}" for one in records[:most])
    more = f" and {len(records) - most} more" if len(records) > most else ""
    side = "of the baseline" if word == "missing" else "of this run"
    said = ("is" if len(records) == 1 else "are") + (" missing here" if word == "missing" else " new")
    place = parameter_place(first)
    text = f"{count(len(records), 'parameter')} {side} {said}: {listed}{more}."
    return Finding("gate-parameters", word, "error", place, "parameter", word, None, text, MEANT)


def changed(found: Sequence[Difference], compared: Counter[Quantity]) -> list[Finding]:
    """Make one finding for each quantity that changed."""
    findings = []
    for quantity in ("parameter_rms", *FORWARD, *BACKWARD, "grad_norm", "loss"):
        these = [one for one in found if one.quantity == quantity and one.how != "nonfinite"]
        if these:
            rule = _RULES.get(quantity, "gate-gradient")
            first = first_of(these)
            findings.append(_of(rule, first, _text(these, first, compared[quantity]), MEANT))
    return findings


def first_of(these: Sequence[Difference]) -> Difference:
    """Return the one that lies first in the direction in which the quantity travels; all are of one quantity."""
    backward = these[0].quantity in (*BACKWARD, "grad_norm")
    return (max if backward else min)(these, key=lambda one: one.position)


def _text(these: Sequence[Difference], first: Difference, compared: int) -> str:
    quantity = first.quantity
    if quantity == "loss":
        return f"The first loss: {_values(first)}{_beyond(first)}."
    noun = "parameter" if quantity in ("grad_norm", "parameter_rms") else "site"
    blocks = [one.place.block for one in these if one.place.block is not None]
    inside = f" ({places('block', blocks)})" if blocks else ""
    which = "first on the way back" if quantity in (*BACKWARD, "grad_norm") else "first"
    text = (
        f"The {_WORDS[quantity]} ({quantity}) differs at {len(these)} of {count(compared, noun)}{inside}; {which} at "
        f"{where(first.place)}: {_values(first)}{_beyond(first)}."
    )
    worst = max(these, key=size_of)
    if worst is not first:
        text += f" Most at {where(worst.place)}: {_values(worst)}{'' if worst.ratio is None else f', {times(worst.ratio)}'}."
    return text


def _values(one: Difference) -> str:
    if one.how == "unobserved":
        return f"{number(one.baseline)} in the baseline, none here (nothing leads to it, or it could not be seen)"
    if one.how == "observed":
        return f"none in the baseline, {number(one.value)} here"
    return f"{number(one.baseline)} in the baseline, {number(one.value)} here"


def _beyond(one: Difference) -> str:
    if one.ratio is None:
        return ""
    edge = one.tolerance if one.ratio > 1 else 1 / one.tolerance  # 5 % up is 4.76 % down
    return f", {times(one.ratio)} where {'up' if one.ratio > 1 else 'down'} to {times(edge)} passes"


def times(ratio: float) -> str:
    """Write a ratio: ``x2.1``; near 1 by what it differs, ``+0.12 %``."""
    if ratio == 1:
        return "x1"
    return f"{'+' if ratio > 1 else ''}{percent(ratio - 1)}" if 0.9 < ratio < 1.1 else f"x{number(ratio)}"


def size_of(one: Difference) -> float:
    """Return how far off a value is: the logarithm of the ratio, either way; infinite where there is none."""
    return math.inf if one.ratio is None else abs(math.log(one.ratio))


def _of(rule: str, one: Difference, message: str, remedy: str) -> Finding:
    return Finding(
        rule=rule,
        name=one.quantity,
        severity="error",
        site=one.place if one.place != Place() else None,
        metric=one.quantity,
        value=one.value,
        expected=one.baseline,
        message=message,
        remedy=remedy,
    )


def finding_set(base: Sequence[Finding], other: Sequence[Finding], by_chance: Callable[[str], float]) -> list[Finding]:
    """Say which errors and warnings were won, and which findings lost; these are a note.

    Parameters
    ----------
    base, other
        What the rules found in the two runs.
    by_chance
        The factor by which a number may differ by chance or by the tolerance of all numbers: a finding whose value lies that
        near to its limit is a note, since what passes may make it or not. What parameters start from is known, however it is
        drawn.
    """
    won, lost = won_and_lost(base, other)
    findings = []
    for one in won:
        if one.severity == "note":
            continue
        marginal = not one.rule.startswith("PC1") and _marginal(one, by_chance(one.metric))
        more = " Its value lies nearer to the limit than what the tolerances let pass." if marginal else ""
        findings.append(
            dataclasses.replace(
                one,
                rule="gate-findings",
                name=one.rule,
                severity="note" if marginal else "error",
                message=f"New {one.severity} {one.rule} {one.name}: {one.message}{more}",
                also=(),
            )
        )
    if lost:
        counted = Counter(f"{one.rule} {one.name}" for one in lost)
        names = ", ".join(f"{name} ({amount} times)" if amount > 1 else name for name, amount in counted.items())
        findings.append(
            Finding(
                rule="gate-findings",
                name="lost",
                severity="note",
                site=lost[0].site,
                metric=lost[0].metric,
                value=None,
                expected=lost[0].value,
                message=f"No longer found: {names}.",
                remedy="Make the baseline again with --update-baseline, so that it stays so.",
            )
        )
    return findings


def _marginal(finding: Finding, widest: float) -> bool:
    value, limit = finding.value, finding.expected
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return False
    return 0 < value < math.inf and 0 < limit < math.inf and abs(math.log(value / limit)) <= math.log(widest)


def won_and_lost(base: Sequence[Finding], other: Sequence[Finding]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Return the findings that only ``other`` has, and those that only ``base`` has.

    Two are the same if rule and place agree; what is left, if rule and kind of sublayer do; then if the rule does: which of
    many like blocks a finding names is a matter of chance.
    """
    gone, come = list(base), list(other)
    keys: tuple[Callable[[Finding], object], ...] = (
        lambda one: (one.rule, one.site and (one.site.block, one.site.sublayer, one.site.parameter)),
        lambda one: (one.rule, one.site and (one.site.block, one.site.sublayer)),
        lambda one: (one.rule, one.site and one.site.sublayer),
        lambda one: one.rule,
    )
    for key in keys:
        free: dict[object, list[Finding]] = defaultdict(list)
        for one in gone:
            free[key(one)].append(one)
        still = [one for one in come if not free[key(one)] or not free[key(one)].pop(0)]
        come, gone = still, [one for some in free.values() for one in some]
    return tuple(come), tuple(gone)
