"""PC303: a branch gets no gradient, although one reaches its sum."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from propcheck.analysis.name_patterns import subject, verb
from propcheck.formatting import count, number
from propcheck.rules.gradient.dead_gradient.never_added import never_added, never_added_hit
from propcheck.rules.gradient.dead_gradient.untrained_branches import branch_parameters, is_untrained, reached_sites
from propcheck.rules.gradient.dead_gradient.zero_pairs import zero_pairs
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run, SiteRecord

RULE = Rule(
    scope="run",
    id="PC303",
    name="dead-gradient",
    severity="error",
    threshold=0.0,
    unit="trainable parameters of a branch with a gradient above zero; this rule always judges at 0",
    sees="A branch none of whose trainable parameters gets a gradient, although one reaches its sum; a sublayer that is "
    "computed but never added; and adapters both of whose matrices are zero.",
    why="The branch stays at its initial values however long the model trains, while the loss falls by what the others learn.",
    formula="Untrained branch: grad_sum_norm or grad_update_norm > 0, and grad_state of every trainable parameter of the "
    "site's branch is zero or none (of every matrix, if no path leads into the update: a norm may be shared with the "
    "other branch of a parallel block).\n\n"
    "Never added: used parameters of a block that are in no branch and have grad_state none, at least one of them a "
    "matrix, while the same parameters of a later block are in a branch and have a gradient, or while the block adds "
    "the stream to itself.\n\n"
    "Zero pair: two linear matrices in a row in one branch (the outputs of one are as many as the inputs of the other, "
    "nearest by name) that are entirely zero with a gradient of exactly zero, while no zero of that branch has a "
    "gradient: a zero with a gradient may block the others until the first step. So these are not flagged: an adapter "
    "with one zero matrix, and an output projection, scale or gate that starts at zero and is trained, even if several "
    "branches share it (ReZero, adaLN-zero, a gate outside the blocks). The bias of a norm or matrix that is not zero, "
    "or that is part of the pair, blocks nothing.\n\n"
    "Not judged: experts without a token, branches masked by stochastic depth, and unobserved parameters. A parameter "
    "that several branches share counts in the first. If the update is zero too, PC203 is reported instead. A gradient "
    "that ends before the site is PC302, a model without any gradient PC304.",
    basis="No threshold: an exact zero does not come from rounding, and a product of two zero factors has a zero gradient in "
    "both.",
    source="nvidia-cosmos/cosmos-predict2.5 pull request 15 (an init that ran after the adapters were added set their first "
    "matrix to zero: no training); Hu 2021, arXiv 2106.09685 (A random, B zero); kyegomez/BitNet issue 32 (x = x + x).",
    remedy="Look for a detach, a no_grad, a result that is dropped, or two factors in a row that start at zero.",
    example=Example(
        broken="with torch.no_grad():\n    update = self.mlp(self.norm(x))\nx = x + update",
        repaired="x = x + self.mlp(self.norm(x))",
    ),
    caused_by=(("PC203", "same"),),
)

# Why a branch is untrained: no path from the loss, zeros that keep each other zero, or exactly zero for another reason. "part":
# zeros that keep each other zero in a branch that is trained otherwise.
_Reason = Literal["none", "pair", "zero", "part"]


@RULE.checked_by
def check(profile: Profile, run: Run, _threshold: float) -> list[Hit]:
    """Look for untrained branches, zero pairs and sublayers that are never added."""
    branches = branch_parameters(run)
    untrained: dict[_Reason, dict[int, list[ParameterRecord]]] = {}  # by reason and site number
    flagged: dict[_Reason, list[int]] = {}
    for index, site in enumerate(profile.sites):
        branch = branches.get(site.site, [])
        pairs = zero_pairs(run, site, branch)
        if is_untrained(run, site, branch):
            reason: _Reason = "none" if any(p.grad_state == "none" for p in branch) else "pair" if pairs else "zero"
        elif pairs:
            reason = "part"
        else:
            continue
        untrained.setdefault(reason, {})[site.site] = pairs if reason == "part" else branch
        flagged.setdefault(reason, []).append(index)
    hits = [
        _branch_hit(group, parameters, reason)
        for reason, parameters in untrained.items()
        for group in grouped(profile, flagged[reason])
    ]
    return [*hits, *(never_added_hit(group) for group in never_added(run))]


def reported_parameters(run: Run) -> frozenset[str]:
    """Return the names of the parameters without a path that this rule reports, so that no other rule does."""
    reached = reached_sites(run)
    untrained = [branch for site, branch in branch_parameters(run).items() if is_untrained(run, reached[site], branch)]
    without_path = [p for branch in untrained for p in branch if p.grad_state == "none"]
    return frozenset(p.name for p in (*without_path, *(p for group in never_added(run) for p in group)))


_ROW = "matrices in a row are zero, and the gradient of each is a product with the other"
_ADAPTER_REMEDY = (
    "Start only one of the two at zero (in an adapter the second; draw the first at random), and initialise them after the "
    "init of the model, which may reset them to zero."
)
_REMEDIES: dict[_Reason, str] = {
    "none": "Look for a no_grad, a detach or .data around the branch. If it is not meant to be trained, set requires_grad = "
    "False.",
    "pair": _ADAPTER_REMEDY,
    "zero": "Look for a factor that is zero and not trained, for units that are saturated or never active, or for an underflow "
    "(scale the loss in fp16).",
    "part": _ADAPTER_REMEDY,
}


def _branch_hit(group: Sequence[SiteRecord], untrained: Mapping[int, Sequence[ParameterRecord]], reason: _Reason) -> Hit:
    first = group[0]
    parameters = [p for site in group for p in untrained[site.site]]
    return Hit(
        sites=tuple(site.site for site in group),
        place=dataclasses.replace(place_of(first), parameter=parameters[0].name if reason == "part" else None),
        metric="grad_state",
        value="none" if reason == "none" else "zero",
        expected="norm",
        message=_message(group, parameters, reason),
        remedy=_REMEDIES[reason],
    )


def _message(group: Sequence[SiteRecord], parameters: Sequence[ParameterRecord], reason: _Reason) -> str:
    first = group[0]
    where = site_label(first) if len(group) == 1 else f"{site_label(first)} and {count(len(group) - 1, 'more site')}"
    arriving = first.grad_update_norm if first.grad_update_norm is not None else first.grad_sum_norm
    although = f"although one of {number(arriving)} reaches the sum"
    names = subject(parameters)
    if reason == "part":
        are, get = verb(parameters, "is", "are"), verb(parameters, "gets", "get")
        state = f"{are} zero and {get} a gradient of exactly zero"
        return f"{names} at {where} {state}, {although}: {_ROW}. No training step changes them."
    if reason == "none":
        what = f"No trainable parameter of the branch at {where} gets a gradient, {although}: it has no path to the loss"
    else:
        cause = f": {_ROW}" if reason == "pair" else ""
        what = f"Every trainable parameter of the branch at {where} has a gradient of exactly zero, {although}{cause}"
    return f"{what}. {names} {verb(parameters, 'is', 'are')} never trained."
