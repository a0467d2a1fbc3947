"""Branches that no gradient trains, although it passes them: PC303."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.analysis.name_patterns import path, pattern, subject, verb
from propcheck.formatting import count, number, places
from propcheck.records import Place
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import grouped, place_of, site_label
from propcheck.rules.zero_init import holding, is_zero

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run, SiteRecord

# How a branch is dead: no path from the loss, zeros that keep each other zero, or exactly zero for some other reason; or how a
# part of it is: zeros that keep each other zero.
_Why = Literal["none", "pair", "zero", "part"]

_MATRICES = ("linear", "convolution")


@dataclass(frozen=True, slots=True)
class _Found:
    why: _Why
    parameters: list[ParameterRecord]


def untrained(run: Run) -> frozenset[str]:
    """Give the names of the parameters without a path that this rule reports, so that no other one does."""
    reached = _reached(run)
    branches = [branch for site, branch in _branches(run).items() if branch and _is_dead(run, reached[site], branch)]
    dead = [p for branch in branches for p in branch if p.grad_state == "none"]
    return frozenset(p.name for p in (*dead, *(p for group in _never_added(run) for p in group)))


def _dead(curve: Profile, run: Run, _limit: float) -> Sequence[Hit]:
    branches = _branches(run)
    found: dict[int, _Found] = {}  # by index into the sites
    for index, record in enumerate(curve.sites):
        branch = branches.get(record.site, [])
        pairs = _zero_pairs(run, record, branch)
        if branch and _is_dead(run, record, branch):
            why: _Why = "none" if any(p.grad_state == "none" for p in branch) else "pair" if pairs else "zero"
            found[index] = _Found(why, branch)
        elif pairs:
            found[index] = _Found("part", pairs)
    hits = []
    for why in dict.fromkeys(one.why for one in found.values()):
        same = {curve.sites[index].site: one.parameters for index, one in found.items() if one.why == why}
        hits += [_branch_hit(group, same, why) for group in grouped(curve, [i for i in found if found[i].why == why])]
    return [*hits, *(_never_added_hit(group) for group in _never_added(run))]


def _reached(run: Run) -> dict[int, SiteRecord]:
    """Give the sites whose sum a gradient reaches, in the seed that the parameters are of: the first."""
    first = run.sites[0].seed if run.sites else None
    return {
        r.site: r
        for r in run.sites
        # A mask that was drawn is another one at the next step.
        if r.seed == first and not r.masked and any(g is not None and g > 0 for g in (r.grad_sum_norm, r.grad_update_norm))
    }


def _trainable(run: Run) -> list[ParameterRecord]:
    idle = idle_parameters(run)
    return [p for p in run.parameters if p.kind == "parameter" and p.requires_grad and p.name not in idle]


def _branches(run: Run) -> dict[int, list[ParameterRecord]]:
    """List the trainable parameters of each branch whose sum a gradient reaches and of which each one was observed."""
    reached = _reached(run)
    found: dict[int, list[ParameterRecord]] = {}
    for p in _trainable(run):
        if p.site is not None and p.site in reached:
            found.setdefault(p.site, []).append(p)
    for site, branch in found.items():
        # Where no path leads into the update, a norm with a gradient has it from another branch of a parallel block.
        if reached[site].grad_update_norm is None:
            found[site] = [p for p in branch if p.role in _MATRICES or p.grad_state != "norm"]
    return {site: branch for site, branch in found.items() if all(p.grad_state is not None for p in branch)}


def _is_dead(run: Run, site: SiteRecord, branch: Sequence[ParameterRecord]) -> bool:
    """Whether no parameter of a branch has a gradient, for good: a zero that it shares with others may hold one back."""
    states = {p.grad_state for p in branch}
    return states <= {"zero", "none"} and ("zero" not in states or not holding(run, site))


def _zero_pairs(run: Run, site: SiteRecord, branch: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """List matrices that are zero, get a gradient of exactly zero, and follow one another: each keeps the other one so.

    A zero that has a gradient (the second matrix of an adapter, an output projection, a scale) may be what keeps the gradient
    from others until the first step: where there is one, nothing is said.
    """
    dead = {p.name: p for p in branch if is_zero(p) and p.grad_state == "zero" and p.role == "linear" and len(p.shape) == 2}
    paired: set[str] = set()
    for one in dead.values():
        for axis in (0, 1):
            others = _next_to(one, axis, branch)
            back = [_next_to(other, 1 - axis, branch) for other in others]
            rows = {p.name for p in itertools.chain([one], others, *back)}
            if others and all(one in row for row in back) and rows <= dead.keys():
                paired |= rows
    if paired and holding(run, site, paired):
        return []
    return [p for name, p in dead.items() if name in paired]


def _next_to(one: ParameterRecord, axis: int, branch: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """List the matrices that read what one gives, or give what it reads (which axis is which, a layout says): the nearest."""
    fitting = [p for p in branch if p is not one and len(p.shape) == 2 and p.shape[1 - axis] == one.shape[axis]]
    nearest = max((_beside(one, p) for p in fitting), default=0)
    return [p for p in fitting if _beside(one, p) == nearest]


def _beside(one: ParameterRecord, other: ParameterRecord) -> int:
    """Measure how near two parameters stand by name: the matrices of one adapter share the longest beginning."""
    return _common(path(one), path(other))


def _common(*sequences: Sequence[str]) -> int:
    """Count the elements with which all sequences begin alike."""
    return sum(1 for _ in itertools.takewhile(lambda elements: len(set(elements)) == 1, zip(*sequences, strict=False)))


def _branch_hit(group: Sequence[SiteRecord], found: Mapping[int, list[ParameterRecord]], why: _Why) -> Hit:
    first, parameters = group[0], [p for record in group for p in found[record.site]]
    at = site_label(first) if len(group) == 1 else f"{site_label(first)} and {count(len(group) - 1, 'more site')}"
    reaching = first.grad_update_norm if first.grad_update_norm is not None else first.grad_sum_norm
    although = f"although one of {number(reaching)} reaches the sum"
    names, gets = subject(parameters), verb(parameters, "gets", "get")
    stays = f"{names} {verb(parameters, 'stays as it is', 'stay as they are')}."
    row = "matrices in a row are zero, and the gradient of each is a product with the other"
    message = {
        "none": f"No trainable parameter of the branch at {at} gets a gradient, {although}: there is no path. {stays}",
        "pair": f"Every trainable parameter of the branch at {at} has a gradient of exactly zero, {although}: {row}. {stays}",
        "zero": f"Every trainable parameter of the branch at {at} has a gradient of exactly zero, {although}. {stays}",
        "part": f"{names} at {at} {verb(parameters, 'is', 'are')} zero and {gets} a gradient of exactly zero, {although}: "
        f"{row}. No step of training changes them.",
    }[why]
    adapters = (
        "Start only one of the two at zero (of an adapter the second, the first at random), and draw them after the init of "
        "the model, which may set them to zero again."
    )
    remedy = {
        "none": "Look for a no_grad, a detach or .data around the branch; if it is not to be trained, say requires_grad = "
        "False.",
        "pair": adapters,
        "zero": "Look for a factor that is zero and not trained, units that are saturated or never active, or an underflow "
        "(scale the loss in fp16).",
        "part": adapters,
    }[why]
    return Hit(
        sites=tuple(record.site for record in group),
        place=dataclasses.replace(place_of(first), parameter=parameters[0].name if why == "part" else None),
        metric="grad_state",
        value="none" if why == "none" else "zero",
        expected="norm",
        message=message,
        remedy=remedy,
    )


# ---------------------------------------------------------------------- computed and never added


def _never_added(run: Run) -> list[list[ParameterRecord]]:
    """Find the parameters of branches that are computed and added nowhere, those of one name in several blocks together.

    In a block with a gradient: used, in no branch, without a path; and meant to be in one. That they were meant is told by the
    same parameters of a later block, which are in a branch and get a gradient, or by an addition of the stream to itself in
    that block, where the part has no other use in it. A part that only chooses (an index, a router) shows neither; nor does the
    end of a second stream that the loss does not read, since no later block adds to it.
    """
    blocks: dict[int, list[ParameterRecord]] = {}
    alive: dict[str, int] = {}  # by name: the last block in which it is in a branch and has a gradient
    for p in _trainable(run):
        if p.block is not None:
            blocks.setdefault(p.block, []).append(p)
            if p.site is not None and p.grad_state == "norm":
                alive[pattern(path(p))] = max(p.block, alive.get(pattern(path(p)), 0))
    reached, doubled = {record.block for record in _reached(run).values()}, {one.block for one in run.doublings}
    groups: dict[frozenset[str], list[ParameterRecord]] = {}
    for block, own in blocks.items():
        bad = [p for p in own if p.site is None and p.used and p.grad_state == "none"] if block in reached else []
        parts = _parts(own, {p.name for p in bad}) if block in doubled else set()
        meant = [p for p in bad if p.name in parts or block < alive.get(pattern(path(p)), -1)]
        if any(p.role in _MATRICES for p in meant):
            groups.setdefault(frozenset(pattern(path(p)) for p in meant), []).extend(meant)
    return list(groups.values())


def _parts(own: Sequence[ParameterRecord], bad: set[str]) -> set[str]:
    """Name the parameters of the direct children of a block all of whose parameters are bad."""
    common = _common(*(path(p).split(".") for p in own))
    children: dict[str, list[ParameterRecord]] = {}
    for p in own:
        children.setdefault(".".join(path(p).split(".")[: common + 1]), []).append(p)
    return {p.name for members in children.values() if all(p.name in bad for p in members) for p in members}


def _never_added_hit(parameters: Sequence[ParameterRecord]) -> Hit:
    first = next(p for p in parameters if p.role in _MATRICES)
    blocks = [p.block for p in parameters if p.block is not None]
    matrices = [path(p).split(".") for p in parameters if p.role in _MATRICES and p.block == first.block]
    module = ".".join(matrices[0][: min(_common(*matrices), len(matrices[0]) - 1)])
    return Hit(
        sites=(),
        place=Place(block=first.block, sublayer=first.sublayer, module=module or None),
        metric="grad_state",
        value="none",
        expected="norm",
        message=f"What {pattern(module) if len(set(blocks)) > 1 else module} computes in {places('block', blocks)} is added to "
        f"nothing: the forward pass uses it, but it is in no branch, and no gradient arrives at its trainable parameters. "
        f"{subject(parameters)} {verb(parameters, 'stays as it is', 'stay as they are')}.",
        remedy="Add its output to the stream (x = x + F(x)); look for a result that is dropped, or for x + x.",
    )


DEAD_GRADIENT = Rule(
    scope="run",
    id="PC303",
    name="dead-gradient",
    severity="error",
    threshold=0.0,
    unit="trainable parameters of a branch with a gradient above zero; this rule always judges at 0",
    sees="A branch none of whose trainable parameters gets a gradient, although one reaches its sum; a sublayer that is "
    "computed and never added; and adapters both of whose matrices are zero.",
    why="The branch stays as it was drawn, however long one trains, while the loss falls by what the others learn.",
    formula="grad_sum_norm or grad_update_norm > 0, and grad_state of every trainable parameter of the site's branch is zero "
    "or none (of every matrix, where no path leads into the update: a norm may be shared with the other branch of a parallel "
    "block). Or: used parameters of a block that are in no branch and have grad_state none, at least one of them a matrix, "
    "while the same parameters of a later block are in a branch and have a gradient, or while the block adds the stream to "
    "itself. Or: two linear matrices of one branch in a row (the outputs of one are as many as the inputs of the other, "
    "nearest by name) that are entirely zero with a gradient of exactly zero, while no zero of that branch has a gradient: one "
    "that has may be what holds it back, until the first step. Silent therefore are an adapter with one zero matrix, an output "
    "projection, a scale or a gate that starts at zero and is trained, one that several branches share included (ReZero, "
    "adaLN-zero, a gate outside the blocks). The bias of a norm or matrix that is not zero, or that is itself one of the two, "
    "holds nothing back. Not judged: experts without a token, branches that stochastic depth has masked, parameters that were "
    "not observed. A parameter that several branches share counts in the first. Where the update is zero too PC203 leads; a "
    "gradient that ends before the site is PC302, a model without any is PC304.",
    basis="No threshold: an exact zero is none of rounding, and a product of two factors that are zero has a gradient of zero "
    "in both.",
    source="nvidia-cosmos/cosmos-predict2.5 pull request 15 (an init that ran after the adapters were added set their first "
    "matrix to zero: no training); Hu 2021, arXiv 2106.09685 (A random, B zero); kyegomez/BitNet issue 32 (x = x + x).",
    remedy="Look for a detach, a no_grad, a result that is dropped, or two factors in a row that start at zero.",
    check=_dead,
    caused_by=(("PC203", "same"),),
)

RULES = (DEAD_GRADIENT,)
