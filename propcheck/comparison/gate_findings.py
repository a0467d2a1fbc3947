"""The findings of a gate: one per changed quantity, with the place where the change starts, and one per structural change."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Literal

from propcheck.comparison.match_findings import new_and_gone
from propcheck.comparison.places import describe_place, parameter_place, site_place
from propcheck.comparison.quantities import BACKWARD, FORWARD, QUANTITIES
from propcheck.formatting import count, number, places, times
from propcheck.records import Finding, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from propcheck.comparison.differences import Difference
    from propcheck.comparison.match_parameters import ParameterMatching
    from propcheck.comparison.match_sites import SiteMatching
    from propcheck.config.tolerances import Quantity
    from propcheck.records import ParameterRecord, SiteRecord

CHECKS: dict[str, str] = {
    "gate-nonfinite": "Either run has a NaN or an infinity; no tolerance applies.",
    "gate-sites": "Only one of the runs has a residual addition.",
    "gate-parameters": "Only one of the runs has a parameter. Renamed and fused parameters count as present in both.",
    "gate-init": "The initial RMS of a parameter differs by more than the tolerance.",
    "gate-stream": "The RMS of the stream or of an update differs by more than the tolerance.",
    "gate-gradient": "A gradient norm differs by more than the tolerance: of the stream or the update at a residual addition, "
    "of a branch's parameters, or of a single parameter.",
    "gate-loss": "The first loss differs by more than the tolerance.",
    "gate-findings": "A rule reports an error or a warning that the baseline does not have.",
}

ACCEPT = (
    "If the change is intended, update the baseline with --update-baseline and commit it. "
    "If not, look first at the code where the change starts."
)
_LISTED_SITES, _LISTED_PARAMETERS = 8, 4  # names of parameters are long

Presence = Literal["missing", "new"]


def nonfinite_findings(differences: Sequence[Difference]) -> list[Finding]:
    """Report where a NaN or an infinity is, in one finding."""
    nonfinite = [each for each in differences if each.kind == "nonfinite"]
    if not nonfinite:
        return []
    # The first in the direction in which it spreads.
    forward = [each for each in nonfinite if QUANTITIES[each.quantity].direction == "forward"]
    first = min(forward, key=_position) if forward else max(nonfinite, key=_position)
    amounts = Counter(each.quantity for each in nonfinite)
    listed = ", ".join(f"{quantity} at {count(amount, 'place')}" for quantity, amount in amounts.items())
    message = (
        f"NaN or infinity in {listed}. First at {describe_place(first.place)}: {first.quantity} is {number(first.value)} in "
        f"this run and {number(first.baseline)} in the baseline."
    )
    remedy = (
        "If this run has it, the findings of its scan name the operation that made the first one. "
        "If the baseline has it, update the baseline from a model without."
    )
    return [_finding("gate-nonfinite", first, message, remedy)]


def structure_findings(sites: SiteMatching, parameters: ParameterMatching) -> list[Finding]:
    """Report sites and parameters that only one run has."""
    return [
        *([_sites_finding(sites.missing, "missing", sites)] if sites.missing else []),
        *([_sites_finding(sites.new, "new", sites)] if sites.new else []),
        *([_parameters_finding(parameters.missing, "missing")] if parameters.missing else []),
        *([_parameters_finding(parameters.new, "new")] if parameters.new else []),
    ]


def _sites_finding(sites: Sequence[SiteRecord], presence: Presence, matching: SiteMatching) -> Finding:
    first, *others = sites
    place = site_place(first)
    text = (
        f"The residual addition at {describe_place(place)} of the baseline is missing in this run."
        if presence == "missing"
        else f"The residual addition at {describe_place(place)} is new: the baseline does not have it."
    )
    if others:
        listed = ", ".join(str(site.site) for site in others[:_LISTED_SITES]) + (" ..." if len(others) > _LISTED_SITES else "")
        noun, verb = ("site", "is") if len(others) == 1 else ("sites", "are")
        text += f" {len(others)} more {verb} {presence}: {noun} {listed}."
    text += "".join(f" {note}" for note in matching.block_notes)
    return Finding("gate-sites", presence, "error", place, "site", presence, None, text, ACCEPT)


def _parameters_finding(parameters: Sequence[ParameterRecord], presence: Presence) -> Finding:
    listed = ", ".join(f"{parameter.name} {list(parameter.shape)}" for parameter in parameters[:_LISTED_PARAMETERS])
    more = f" and {len(parameters) - _LISTED_PARAMETERS} more" if len(parameters) > _LISTED_PARAMETERS else ""
    verb = "is" if len(parameters) == 1 else "are"
    text = (
        f"{count(len(parameters), 'parameter')} of the baseline {verb} missing in this run: {listed}{more}."
        if presence == "missing"
        else f"{count(len(parameters), 'parameter')} of this run {verb} new: {listed}{more}."
    )
    place = parameter_place(parameters[0])
    return Finding("gate-parameters", presence, "error", place, "parameter", presence, None, text, ACCEPT)


def change_findings(differences: Sequence[Difference], compared: Mapping[Quantity, int]) -> list[Finding]:
    """Report one finding for each quantity that changed."""
    findings = []
    for quantity in ("parameter_rms", *FORWARD, *BACKWARD, "grad_norm", "loss"):
        changed = [each for each in differences if each.quantity == quantity and each.kind != "nonfinite"]
        if changed:
            first = first_difference(changed)
            message = _change_message(changed, first, compared[quantity])
            findings.append(_finding(QUANTITIES[quantity].check, first, message, ACCEPT))
    return findings


def first_difference(differences: Sequence[Difference]) -> Difference:
    """Return the first difference of one quantity in the direction in which it spreads."""
    is_backward = QUANTITIES[differences[0].quantity].direction == "backward"
    return (max if is_backward else min)(differences, key=_position)


def _position(difference: Difference) -> int:
    return difference.position


def _change_message(changed: Sequence[Difference], first: Difference, compared: int) -> str:
    quantity = QUANTITIES[first.quantity]
    if quantity.noun == "loss":
        return f"The first loss is {_values(first)}."
    blocks = [each.place.block for each in changed if each.place.block is not None]
    inside = f" ({places('block', blocks)})" if blocks else ""
    where = "First on the way back from the loss" if quantity.direction == "backward" else "First"
    text = (
        f"The {quantity.phrase} ({first.quantity}) differs at {len(changed)} of {count(compared, quantity.noun)}{inside}. "
        f"{where} at {describe_place(first.place)}: {_values(first)}."
    )
    largest = max(changed, key=lambda each: each.size)
    if largest is not first:
        text += f" Most at {describe_place(largest.place)}: {_values(largest, with_limit=False)}."
    return text


def _values(difference: Difference, *, with_limit: bool = True) -> str:
    """Return ``0.6 instead of 0.5 (x1.2, limit +5 %)``."""
    if difference.kind == "unobserved":
        return f"no value instead of {number(difference.baseline)} (nothing reaches it, or it could not be observed)"
    if difference.kind == "observed":
        return f"{number(difference.value)}, where the baseline has no value"
    text = f"{number(difference.value)} instead of {number(difference.baseline)}"
    ratio = difference.ratio
    if ratio is None:
        return text
    limit = difference.tolerance if ratio > 1 else 1 / difference.tolerance  # 5 % up is 4.76 % down
    return f"{text} ({times(ratio)}{f', limit {times(limit)}' if with_limit else ''})"


def _finding(check: str, difference: Difference, message: str, remedy: str) -> Finding:
    return Finding(
        rule=check,
        name=difference.quantity,
        severity="error",
        site=difference.place if difference.place != Place() else None,
        metric=difference.quantity,
        value=difference.value,
        expected=difference.baseline,
        message=message,
        remedy=remedy,
    )


def rule_findings(base: Sequence[Finding], other: Sequence[Finding], accepted_factor: Callable[[str], float]) -> list[Finding]:
    """Report errors and warnings of the rules that are new, and, as a note, findings that are gone.

    Parameters
    ----------
    base, other
        The findings of the rules in the two runs.
    accepted_factor
        The factor by which a metric may differ by chance or by the tolerance. A new finding whose value is that near to its
        limit is a note, since an accepted change may have caused it. Findings on initial values (PC1xx) are always errors.
    """
    new, gone = new_and_gone(base, other)
    findings = [_new_finding(finding, accepted_factor) for finding in new if finding.severity != "note"]
    return [*findings, _gone_finding(gone)] if gone else findings


def _new_finding(finding: Finding, accepted_factor: Callable[[str], float]) -> Finding:
    marginal = not finding.rule.startswith("PC1") and _is_marginal(finding, accepted_factor(finding.metric))
    note = " It does not fail the gate, since its value is within the tolerance of the rule's limit." if marginal else ""
    return dataclasses.replace(
        finding,
        rule="gate-findings",
        name=finding.rule,
        severity="note" if marginal else "error",
        message=f"New {finding.severity} {finding.rule} {finding.name}: {finding.message}{note}",
        also=(),
    )


def _gone_finding(gone: Sequence[Finding]) -> Finding:
    amounts = Counter(f"{finding.rule} {finding.name}" for finding in gone)
    names = ", ".join(f"{name} ({amount} times)" if amount > 1 else name for name, amount in amounts.items())
    return Finding(
        rule="gate-findings",
        name="lost",
        severity="note",
        site=gone[0].site,
        metric=gone[0].metric,
        value=None,
        expected=gone[0].value,
        message=f"No longer found: {names}.",
        remedy="Update the baseline with --update-baseline, so that the gate fails if they come back.",
    )


def _is_marginal(finding: Finding, factor: float) -> bool:
    """Whether the value of a finding is within a factor of its limit."""
    value, limit = finding.value, finding.expected
    if not isinstance(value, int | float) or not isinstance(limit, int | float):
        return False
    return 0 < value < math.inf and 0 < limit < math.inf and abs(math.log(value / limit)) <= math.log(factor)
