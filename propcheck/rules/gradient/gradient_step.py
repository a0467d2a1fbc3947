"""PC306: the gradient jumps at one site, unlike at its neighbours, or does not go back along the stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.analysis.profile import log_ratio, safe_exp
from propcheck.analysis.theory import expected_gradient_step
from propcheck.formatting import count, number
from propcheck.rules.neighbour_steps import neighbours, outlying_step, step_into
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

RULE = Rule(
    id="PC306",
    name="gradient-step",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a step of the gradient differs from the same step in the blocks around it",
    sees="A jump of the gradient at one addition, or between two, that its neighbours do not have and the forward pass does "
    "not explain; also a stream along which no gradient goes back.",
    why="Everything before the jump is trained with gradients of another size than everything after it, while the forward pass "
    "may look right. Causes are a branch that amplifies gradients only, a detached or rescaled part of the residual path, or a "
    "backward pass that is wrong or counts twice.",
    formula="Each site has two steps on the way back. (1) grad_stream_norm / grad_sum_norm. Of this the update explains sqrt(1 "
    "+ (b/f) update_ratio^2), with b/f as in PC301, at most 2^((b/f)/2), the value for an update as large as the "
    "stream. (2) grad_sum_norm of the site before / grad_stream_norm. Of this stream_rms / sum_rms of the site before "
    "is explained, since a factor on the stream (a norm, a scale) is one on the gradient.\n\n"
    "Anything between x1 and the explained factor counts as explained. The rest is compared with the median of the "
    "three nearest siblings on either side, as in PC205. It must differ from both sides, and from x1, by more than the "
    "threshold, in the same direction. It is a note if the gradient grows while param_grad_norm / grad_sum_norm of the "
    "branch does not stand out too: another reader of the stream (a loss or a head on an inner block) adds its "
    "gradient, and the records cannot tell that from a backward pass that counts twice.\n\n"
    "Not judged: the first block (the step from a small embedding belongs to PC205), a site without a sibling between "
    "it and that block, and the step over a state-space mixer. The last site of its kind is judged by those before it.\n\n"
    "Detached: grad_stream_norm is null, but grad_sum_norm and that of the sum before (which is the stream) are above "
    "0. This is judged in any number of blocks, but not at the first site, where an embedding may be frozen. If PC206, "
    "PC205 or PC204 reports the same place, only that is reported.",
    basis="This is PC205 for the backward pass, with its threshold: a stream half of which is detached makes a step of 2. "
    "Measured at the initialisation of twelve small causal LMs of 12 blocks, the unexplained rest is x0.998 to x1.11 after the "
    "first block, but x2.1 in the second block of OLMo 2. In 72 stock configs of up to 80 blocks the last site of its kind is "
    "x0.989 to x1.013 off those before it, and no stream is without a gradient. In Mamba-130M the step is x1 to x2.5 by chance "
    "of the seed, since its steps and gates depend on the tokens: state-space mixers have no usual step. The number is this "
    "tool's own; no published cut-off was found.",
    source="Backward recurrence derived from Xiong 2020, arXiv 2002.04745, as in PC301.",
    remedy="Compare the backward pass of that block with its neighbours': a detach, a scaled gradient, a custom backward, a "
    "branch without its norm or with other weights.",
    example=Example(
        broken="x = (x + x.detach()) / 2 + self.mlp(self.norm(x))  # half of the gradient is lost here",
        repaired="x = x + self.mlp(self.norm(x))",
    ),
    caused_by=(("PC206", "touching"), ("PC205", "touching"), ("PC204", "touching")),
)

_Metric = Literal["grad_stream_norm / grad_sum_norm", "grad_sum_norm before / grad_stream_norm"]


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of the gradient on its way back, and the part of it that the forward pass explains, as logarithms."""

    metric: _Metric
    taken: float
    explained: float

    @property
    def unexplained(self) -> float:
        """Distance of the step from the range between 0 and the explained step."""
        low, high = sorted((0.0, self.explained))
        return self.taken - min(max(self.taken, low), high)


@dataclass(frozen=True, slots=True)
class _Jump:
    """A step that is out of line, and what its siblings leave unexplained."""

    step: _Step
    expected: float

    @property
    def distance(self) -> float:
        return abs(self.step.unexplained - self.expected)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Look for detached streams, and judge the two steps of the gradient at each site."""
    limit = math.log(threshold)
    over = [_step_over(site) for site in profile.sites]
    into = [_step_into(profile.sites, index) for index in range(len(profile.sites))]
    jumps: dict[int, _Jump] = {}  # by site number
    flagged = []
    for index, site in enumerate(profile.sites):
        # The step from a small embedding lies in the first block, and the step into the second block lies after it: PC205.
        jump = _jump(profile, index, over, 1, limit) or _jump(profile, index, into, 2, limit)
        if jump is not None:
            flagged.append(index)
            jumps[site.site] = jump
    return [*_detached(profile), *(_hit(profile, group, jumps, limit) for group in grouped(profile, flagged))]


def _step_over(site: SiteRecord) -> _Step | None:
    """Return the step over an addition. Its update explains at most the step of an update as large as the stream.

    The bound on updates by depth does not apply to a single step: a larger update than the neighbours' is PC205's or PC204's.
    """
    if site.sublayer == "ssm":
        return None  # its step sizes, and so its gradients, depend on the tokens, and differ between blocks that are alike
    taken = log_ratio(site.grad_stream_norm, site.grad_sum_norm)
    return None if taken is None else _Step("grad_stream_norm / grad_sum_norm", taken, expected_gradient_step((site,), 1))


def _step_into(sites: Sequence[SiteRecord], index: int) -> _Step | None:
    """Return the step from the stream at a site to the sum before it: a factor on the stream is one on the gradient."""
    forward = step_into(sites, index)
    taken = None if forward is None else log_ratio(sites[index - 1].grad_sum_norm, sites[index].grad_stream_norm)
    if forward is None or taken is None:
        return None
    return _Step("grad_sum_norm before / grad_stream_norm", taken, forward)


def _jump(profile: Profile, index: int, steps: Sequence[_Step | None], skip_units: int, limit: float) -> _Jump | None:
    """Return a site's step if the part that is not explained stands out among its siblings."""
    around = neighbours(profile, index, skip_units=skip_units)
    before, after = ([i for i in side if steps[i] is not None] for side in around)
    if index < sum(len(unit) for unit in profile.units[:skip_units]) or not before or (around[1] and not after):
        return None  # may be the beginning of a regime; only the last of its kind cannot begin one
    step = steps[index]
    if step is None or abs(step.unexplained) <= limit:
        return None  # explained by the forward pass; if its siblings are not, they are out of line
    unexplained = {i: None if other is None else other.unexplained for i, other in enumerate(steps)}
    outlier = outlying_step(index, unexplained, around, limit)
    return None if outlier is None else _Jump(step, outlier[1])


def _hit(profile: Profile, group: Sequence[SiteRecord], jumps: Mapping[int, _Jump], limit: float) -> Hit:
    worst = max(group, key=lambda site: jumps[site.site].distance)
    jump, index = jumps[worst.site], profile.sites.index(worst)
    step = jump.step
    is_over = step.metric == "grad_stream_norm / grad_sum_norm"
    if is_over:
        where = f"over the addition at {site_label(worst)}"
        start, end = worst.grad_sum_norm, worst.grad_stream_norm
    else:
        where = f"between {site_label(worst)} and the addition before it"
        start, end = worst.grad_stream_norm, profile.sites[index - 1].grad_sum_norm
    # The gradient of a stream is the sum over everything that reads it.
    may_be_reader = step.unexplained > jump.expected and not (is_over and _branch_amplifies(profile, index, limit))
    reader = " Another reader of the stream (a loss or a head on an inner block, which is no fault) may add this."
    others = f" {count(len(group) - 1, 'adjacent site')} {'is' if len(group) == 2 else 'are'} out of line too."
    return Hit(
        sites=tuple(site.site for site in group),
        place=place_of(worst),
        metric=step.metric,
        value=safe_exp(step.taken),
        expected=safe_exp(step.taken - step.unexplained + jump.expected),
        message=f"On its way back {where} the gradient goes from {number(start)} to {number(end)}, "
        f"x{number(safe_exp(step.taken))}. The forward pass explains x{number(safe_exp(step.taken - step.unexplained))}, which "
        f"leaves x{number(safe_exp(step.unexplained))}. In the blocks around it, x{number(safe_exp(jump.expected))} is "
        f"left.{reader if may_be_reader else ''}{others if len(group) > 1 else ''}",
        severity="note" if may_be_reader else None,
        remedy="Nothing, if something else reads the stream there, as in deep supervision. Otherwise look for a backward pass "
        "that is wrong or counts twice."
        if may_be_reader
        else None,
    )


def _branch_amplifies(profile: Profile, index: int, limit: float) -> bool:
    """Whether the gradient of a branch's parameters stands out like that of the stream: then the branch causes the step."""
    gradients = {i: log_ratio(site.param_grad_norm, site.grad_sum_norm) for i, site in enumerate(profile.sites)}
    outlier = outlying_step(index, gradients, neighbours(profile, index, skip_units=1), limit)
    return outlier is not None and outlier[0] > outlier[1]


# ---------------------------------------------------------------------- detached streams


def _detached(profile: Profile) -> list[Hit]:
    """Find additions whose stream gets no gradient while their sum has one. No threshold and no neighbours are needed."""
    sites = {site.site: site for site in profile.sites}
    before = {site.site: sites[site.continues] for site in profile.sites if site.continues in sites}
    flagged = [
        index
        for index, site in enumerate(profile.sites)
        if site.grad_stream_norm is None and site.grad_sum_norm and site.site in before and before[site.site].grad_sum_norm
    ]
    hits = []
    for group in grouped(profile, flagged):
        first = group[0]
        more = f" The same holds at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
        hits.append(
            Hit(
                sites=tuple(site.site for site in group),
                place=place_of(first),
                metric="grad_stream_norm",
                value="none",
                expected="above 0",
                message=f"The stream is detached at {site_label(first)}: the sum there has a gradient of "
                f"{number(first.grad_sum_norm)}, but none of it goes back along the stream. The gradient of the sum before, "
                f"{number(before[first.site].grad_sum_norm)}, arrives only by other ways, such as through the branch.{more}",
                remedy="Add the update to the stream itself, not to its .data or .detach(), nor to a result of no_grad.",
            )
        )
    return hits
