"""The gradient at one addition against its neighbours, and where it does not pass: PC306."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.profile import log_ratio, safe_exp
from propcheck.analysis.theory import expected_gradient_step
from propcheck.formatting import count, number
from propcheck.rules.neighbours import link, sides, stands_out
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

# Said where the gradient grows and no branch is known to make it. The gradient of a stream is the sum over all that read it.
_ADDED = " Another reader of the stream there (a loss or a head on an inner block, which is no fault) may add this."
_OF_ADDED = (
    "Nothing, if something else reads the stream there, as in deep supervision; else look for a backward pass that is wrong or "
    "counts twice."
)
_OVER, _BETWEEN = "grad_stream_norm / grad_sum_norm", "grad_sum_norm before / grad_stream_norm"


@dataclass(frozen=True, slots=True)
class _Step:
    """Logs of one step of the gradient on its way back, and of what the forward pass explains of it."""

    metric: str
    taken: float
    explained: float

    @property
    def beyond(self) -> float:
        """What lies outside of all between no step and the explained one."""
        low, high = sorted((0.0, self.explained))
        return self.taken - min(max(self.taken, low), high)


def _gradient_step(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    overs = [_over(curve.sites, index) for index in range(len(curve.sites))]
    links = [_between(curve.sites, index) for index in range(len(curve.sites))]
    odd: dict[int, tuple[_Step, float]] = {}  # by site: the step, and what its siblings do beyond what is explained
    for index, record in enumerate(curve.sites):
        # The first block takes the step that a small embedding makes, and the link into the second one lies behind it: PC205.
        for steps, skipped in ((overs, 1), (links, 2)):
            step, expected = steps[index], _odd(curve, index, steps, skipped, math.log(limit))
            if step is not None and expected is not None and record.site not in odd:
                odd[record.site] = (step, expected)
    hits = []
    for group in grouped(curve, [index for index, record in enumerate(curve.sites) if record.site in odd]):
        worst = max(group, key=lambda record: abs(odd[record.site][0].beyond - odd[record.site][1]))
        (step, expected), before = odd[worst.site], curve.sites[curve.sites.index(worst) - 1]
        where, ends = {
            _OVER: (f"over the addition at {site_label(worst)}", (worst.grad_sum_norm, worst.grad_stream_norm)),
            _BETWEEN: (
                f"between {site_label(worst)} and the addition before it",
                (worst.grad_stream_norm, before.grad_sum_norm),
            ),
        }[step.metric]
        grows = step.beyond > expected
        added = grows and not (step.metric == _OVER and _amplifies(curve, curve.sites.index(worst), math.log(limit)))
        others = f" {count(len(group) - 1, 'site')} beside it {'is' if len(group) == 2 else 'are'} out of line too."
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric=step.metric,
                value=safe_exp(step.taken),
                expected=safe_exp(step.taken - step.beyond + expected),
                message=f"On its way back {where} the gradient goes from {number(ends[0])} to {number(ends[1])}, "
                f"x{number(safe_exp(step.taken))}. The forward pass explains x{number(safe_exp(step.taken - step.beyond))} of "
                f"it and leaves x{number(safe_exp(step.beyond))}, where it leaves x{number(safe_exp(expected))} in the blocks "
                f"around it.{_ADDED if added else ''}{others if len(group) > 1 else ''}",
                severity="note" if added else None,
                remedy=_OF_ADDED if added else None,
            )
        )
    return [*_detached(curve), *hits]


def _amplifies(curve: Profile, index: int, limit: float) -> bool:
    """Whether the gradient of a branch's own parameters stands out as that of the stream does, so that the branch makes it."""
    gradients = {i: log_ratio(record.param_grad_norm, record.grad_sum_norm) for i, record in enumerate(curve.sites)}
    found = stands_out(index, gradients, sides(curve, index, skip_units=1), limit)
    return found is not None and found[0] > found[1]


def _detached(curve: Profile) -> list[Hit]:
    """Find additions whose stream takes no gradient, while the sum that it is has one: no threshold, and no neighbours."""
    records = {record.site: record for record in curve.sites}
    before = {record.site: records[record.continues] for record in curve.sites if record.continues in records}
    flagged = [
        index
        for index, record in enumerate(curve.sites)
        if record.grad_stream_norm is None
        and record.grad_sum_norm
        and record.site in before
        and before[record.site].grad_sum_norm
    ]
    hits = []
    for group in grouped(curve, flagged):
        first = group[0]
        more = f" It is so at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(first),
                metric="grad_stream_norm",
                value="none",
                expected="above 0",
                message=f"The stream is detached at {site_label(first)}: the sum there has a gradient of "
                f"{number(first.grad_sum_norm)}, and none of it goes back along the stream. The sum before has one of "
                f"{number(before[first.site].grad_sum_norm)}, which comes to it by other ways, as through the branch.{more}",
                remedy="Take the stream itself into the sum, not its .data or .detach(), nor what a no_grad made of it.",
            )
        )
    return hits


def _odd(curve: Profile, index: int, steps: Sequence[_Step | None], skip_units: int, limit: float) -> float | None:
    """Give what a step's siblings do beyond what is explained if it stands out among them."""
    around = sides(curve, index, skip_units=skip_units)
    before, after = ([i for i in side if steps[i] is not None] for side in around)
    if index < sum(len(unit) for unit in curve.units[:skip_units]) or not before or (around[1] and not after):
        return None  # nothing tells a step from the beginning of a regime; the last of its kind begins none
    own = steps[index]
    if own is None or abs(own.beyond) <= limit:
        return None  # it does what the forward pass explains; if its siblings do not, they are what is odd
    found = stands_out(index, {i: None if step is None else step.beyond for i, step in enumerate(steps)}, around, limit)
    return None if found is None else found[1]


def _over(sites: Sequence[SiteRecord], index: int) -> _Step | None:
    """Step over an addition: its update explains up to what one as large as the stream gives.

    How the depth bounds the updates is no matter of one step: an update larger than its neighbours' is PC205's or PC204's.
    """
    record = sites[index]
    if record.sublayer == "ssm":
        return None  # its step sizes depend on the tokens, and so does what it does to gradients, in like blocks unlike
    taken = log_ratio(record.grad_stream_norm, record.grad_sum_norm)
    return None if taken is None else _Step(_OVER, taken, expected_gradient_step((record,), 1))


def _between(sites: Sequence[SiteRecord], index: int) -> _Step | None:
    """Step from the stream at a site to the sum before it: what multiplies the stream there multiplies the gradient alike."""
    forward = link(sites, index)
    taken = None if forward is None else log_ratio(sites[index - 1].grad_sum_norm, sites[index].grad_stream_norm)
    return None if forward is None or taken is None else _Step(_BETWEEN, taken, forward)


GRADIENT_STEP = Rule(
    id="PC306",
    name="gradient-step",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a step of the gradient differs from the same step in the blocks around it",
    sees="A jump of the gradient at one addition, or between two, that its neighbours do not have and the forward pass does "
    "not explain; and a stream that no gradient goes back along.",
    why="Everything before it is trained with gradients of another size than everything behind it, while the forward pass may "
    "look as it should: a branch that amplifies gradients alone, a detached or rescaled part of the residual path, a backward "
    "pass that is wrong or counts twice.",
    formula="Two steps a site on the way back: grad_stream_norm / grad_sum_norm, of which the update explains "
    "sqrt(1 + (b/f) update_ratio^2), with b/f as in PC301, at most 2^((b/f)/2), what an update as large as the stream gives; "
    "and grad_sum_norm of the site before / grad_stream_norm, of which stream_rms / sum_rms of the site before is explained, "
    "since a factor on the stream (a norm, a scale) is one on the gradient. All between x1 and that counts as explained. What "
    "is left is compared with the median of the three nearest siblings on either side, as in PC205, and must differ from both "
    "by more than the threshold, in the same direction, as must what is left from x1. Where the gradient grows and "
    "param_grad_norm / grad_sum_norm of the branch does not stand out so too, it is a note: another reader of the stream (a "
    "loss or a head on an inner block) adds its gradient, and the records do not tell that from a backward pass that counts "
    "twice. Not judged are the first block (the step that a small embedding makes "
    "there is PC205's), a site that has no sibling between it and that block, and the step over a state-space mixer; the last "
    "of its kind is judged by those before it. Detached: grad_stream_norm is null where grad_sum_norm and that of the sum "
    "before, which is the stream, are above 0; in however many blocks, but not at the first site, where an embedding may be "
    "frozen. Where PC206, PC205 or PC204 sees the same place, it leads.",
    basis="The backward twin of PC205, with its threshold: a stream half of which is detached makes a step of 2. Measured at "
    "the initialisation of twelve small causal LMs of 12 blocks, what the forward pass leaves is x0.998 to x1.11 behind the "
    "first block, but x2.1 in the second block of OLMo 2. In 72 stock configs of up to 80 blocks the last site of its kind is "
    "x0.989 to x1.013 off those before it, and no stream is without a gradient. In Mamba-130M the step is x1 to x2.5 by "
    "chance of the seed, since its steps and gates depend on the tokens: state-space mixers have no usual step. The number is "
    "this tool's own, no published cut-off was found.",
    source="Backward recurrence derived from Xiong 2020, arXiv 2002.04745, as in PC301.",
    remedy="Compare the backward pass of that block with its neighbours': a detach, a scaled gradient, a custom backward, a "
    "branch without its norm or with other weights.",
    check=_gradient_step,
    caused_by=(("PC206", "touching"), ("PC205", "touching"), ("PC204", "touching")),
)

RULES = (GRADIENT_STEP,)
