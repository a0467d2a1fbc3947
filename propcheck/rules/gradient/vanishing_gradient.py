"""PC302: the gradient shrinks by a factor in every block on its way back, or is exactly zero."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from propcheck.analysis.growth import gradient_growth
from propcheck.analysis.name_patterns import subject, verb
from propcheck.analysis.profile import compounding, gradient_steps
from propcheck.formatting import count, number
from propcheck.records import Place
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label
from propcheck.rules.trends import growth_law, judged_blocks, judged_sites
from propcheck.rules.zero_init import is_factor, is_trained_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run, SiteRecord

RULE = Rule(
    id="PC302",
    name="vanishing-gradient",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor that the gradient's decay compounds to over the depth; an error above its square, else a warning",
    sees="A gradient that every block shrinks on its way back, or that is exactly zero from some place on toward the input.",
    why="The first blocks do not learn: their gradients fall below what the optimiser's epsilon and the dtype can tell from "
    "zero.",
    formula="r = geometric mean of grad_stream_norm(block) / grad_stream_norm(block after), over the blocks after the first "
    "quarter, without the smallest tenth. Broken if r^blocks < 1 / threshold, or if the gradient is exactly zero at every site "
    "up to some place. A head that starts at zero and has a gradient of its own gives a note, since the first step ends that. "
    "So do zero gates and matrices with a gradient of their own through which another stream may read this one (a gated "
    "cross-attention).",
    basis="Pre-norm cannot shrink a gradient (the factor is 1 + b/S); post-norm was measured at 0.61 over 48 layers. 10 is "
    "outside both, and 0.9^64 = 0.0012 is far outside. No published cut-off was found; the number is this tool's own.",
    source="Xiong 2020, arXiv 2002.04745, Theorem 1; Hanin and Rolnick 2018, arXiv 1803.01719.",
    remedy="Check the residual path for a factor below 1, a missing residual or a detach. In fp16, scale the loss.",
    example=Example(
        broken="logits = self.head(self.norm(x.detach()))  # no gradient enters the blocks",
        repaired="logits = self.head(self.norm(x))",
    ),
    caused_by=(("PC206", "same"),),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Judge exact zeros toward the input, else the average decay of the gradient per block."""
    zero_hit = _zero_toward_input(profile, run)
    if zero_hit is not None:
        return [zero_hit]
    steps, units, noun = gradient_steps(profile), len(profile.units), profile.noun
    trend = compounding(steps, units, rising=False)
    if trend is None or not trend.compounded < 1 / threshold:
        return []
    steepest = profile.units[min(trend.kept, key=lambda j: steps[j])][0]
    return [
        Hit(
            sites=judged_sites(profile, trend),
            place=place_of(steepest),
            metric=f"grad_stream_norm factor a {noun}, backward",
            value=trend.factor,
            expected=1.0,
            message=f"The gradient shrinks x{number(trend.factor)} per {noun} on its way back over "
            f"{judged_blocks(profile, trend)}, which compounds to x{number(trend.compounded)} over {count(units, noun)}. The "
            f"residual path alone would keep it at x1 or above.{growth_law(gradient_growth(profile), 'goes', noun)}",
            severity="error" if trend.compounded < 1 / threshold**2 else "warning",
        )
    ]


# ---------------------------------------------------------------------- exactly zero


def _zero_toward_input(profile: Profile, run: Run) -> Hit | None:
    """Find the place from which on every gradient toward the input is exactly zero."""
    observed = [site for site in profile.sites if site.grad_stream_norm is not None]
    zero = list(itertools.takewhile(lambda site: site.grad_stream_norm == 0, observed))
    if not zero:
        return None
    last = zero[-1]
    if len(zero) < len(observed) or (last.grad_sum_norm is not None and last.grad_sum_norm > 0):
        more = f", so {count(len(zero), 'site')} get none" if len(zero) > 1 else ""
        return Hit(
            sites=_numbers(zero),
            place=place_of(last),
            metric="grad_stream_norm",
            value=0.0,
            expected="above 0",
            message=f"No gradient passes {site_label(last)} toward the input{more}: it is exactly zero there, but not after "
            "it. What lies before does not learn.",
            severity="error",
        )
    head = _zero_head(run)
    if head is not None:
        return _zero_head_hit(zero, head)
    readers = _zero_readers(run, zero)
    if readers:
        return _zero_readers_hit(zero, readers)
    # A loss that is not finite belongs to PC305 or PC209, and may have zero gradients, as a mean over no targets has.
    loss = run.loss.value
    return None if loss is not None and not math.isfinite(loss) else _no_gradient_enters(zero)


def _numbers(sites: Sequence[SiteRecord]) -> tuple[int, ...]:
    return tuple(site.site for site in sites)


def _zero_head(run: Run) -> ParameterRecord | None:
    """Find the factor after all streams that is zero and trained, if no stream of the run gets a gradient."""
    if any(site.grad_stream_norm for site in run.sites):
        return None
    outside = (p for p in run.parameters if p.block is None and p.site is None and p.role is not None)
    return next((p for p in outside if is_trained_zero(p) and is_factor(p)), None)


def _zero_head_hit(zero: Sequence[SiteRecord], head: ParameterRecord) -> Hit:
    return _first_step_hit(
        zero,
        Place(parameter=head.name),
        f", because {head.name} starts at zero and passes none. It has a gradient of its own, so the first step ends this. "
        "Until then the gradients say nothing about the blocks.",
    )


def _zero_readers(run: Run, stream: Sequence[SiteRecord]) -> list[ParameterRecord]:
    """List the factors that are zero and trained, and through which the rest of the model may read a stream.

    They lie outside the blocks, or in branches of another stream after the last site of this one. If several branches share a
    factor, a later branch may be the reader.
    """
    numbers, last = {site.site for site in stream}, stream[-1].site
    readers = []
    for p in run.parameters:
        if not (is_trained_zero(p) and is_factor(p)):
            continue
        if p.site is None:
            after = p.block is None
        else:
            after = (p.site not in numbers and p.site > last) or (p.branches is not None and p.branches > 1)
        if after:
            readers.append(p)
    return readers


def _zero_readers_hit(zero: Sequence[SiteRecord], readers: Sequence[ParameterRecord]) -> Hit:
    starts, have = verb(readers, "starts", "start"), verb(readers, "has", "have")
    gradients = verb(readers, "a gradient of its own", "gradients of their own")
    it = verb(readers, "it", "one of them")
    return _first_step_hit(
        zero,
        place_of(zero[-1]),
        f". {subject(readers)} {starts} at zero and {have} {gradients}: if {it} reads this stream, the first step ends this. "
        "Until then the gradients say nothing about this stream.",
    )


def _first_step_hit(zero: Sequence[SiteRecord], place: Place, reason: str) -> Hit:
    ends = "" if len(zero) == 1 else f" from {site_label(zero[0])} to {site_label(zero[-1])}"
    return Hit(
        sites=_numbers(zero),
        place=place,
        metric="grad_stream_norm",
        value=0.0,
        expected="above 0 after the first step",
        message=f"No gradient reaches any of the {count(len(zero), 'site')}{ends}{reason}",
        severity="note",
        remedy="Nothing, if the zero is intended. To see the gradients of the blocks, scan once with another init of it.",
    )


def _no_gradient_enters(zero: Sequence[SiteRecord]) -> Hit:
    last = zero[-1]
    return Hit(
        sites=_numbers(zero),
        place=place_of(last),
        metric="grad_stream_norm",
        value=0.0,
        expected="above 0",
        message="No gradient of the loss enters the blocks: it is exactly zero at the last observed site, "
        f"{site_label(last)}, and at all sites before it. No block learns.",
        severity="error",
        remedy="Look after the last block: a detached output, a head or norm that is zero and frozen, a loss that does not "
        "depend on the logits, or an underflow (scale the loss in fp16).",
    )
