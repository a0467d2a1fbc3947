"""The gradient over the depth: PC301, PC302."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.growth import gradient_growth
from propcheck.analysis.name_patterns import subject, verb
from propcheck.analysis.profile import NORM_ON_STREAM, Profile, compounding, gradient_steps, safe_exp
from propcheck.analysis.theory import expected_gradient_step
from propcheck.formatting import count, number
from propcheck.records import Place, Run, SiteRecord
from propcheck.rules.forward import kept_blocks, law
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label
from propcheck.rules.zero_init import holds, multiplies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord


def _exploding(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    units = len(curve.units)
    steps = gradient_steps(curve)
    # A block's step is compared with what its own forward pass predicts, so the excess is what is judged and trimmed.
    excess = {j: step - expected_gradient_step(curve.units[j], j) for j, step in steps.items() if j}
    trend = compounding(excess, units, rising=True)
    if trend is None or not trend.compounded > limit:
        return []
    measured = statistics.fmean(steps[j] for j in trend.kept)
    expected = statistics.fmean(steps[j] - excess[j] for j in trend.kept)
    worst = curve.units[max(trend.kept, key=lambda j: excess[j])][0]
    if any(record.placement in NORM_ON_STREAM for record in curve.sites):
        limits = "a norm after each addition keeps it near x1 only where branches amplify gradients no more than activations"
    else:
        limits = (
            f"the additions of the forward pass explain at most x{number(safe_exp(expected))} a {curve.noun}, "
            f"x{number(safe_exp(expected * units))} in all"
        )
    return [
        Hit(
            sites=tuple(record.site for j in trend.kept for record in curve.units[j]),
            place=place_of(worst),
            metric=f"grad_stream_norm factor a {curve.noun}, backward",
            value=safe_exp(measured),
            expected=safe_exp(expected),
            message=f"The gradient grows x{number(safe_exp(measured))} a {curve.noun} on its way back over "
            f"{kept_blocks(curve, trend)}, which compounds to x{number(safe_exp(measured * units))} over "
            f"{count(units, curve.noun)}; {limits}.{law(gradient_growth(curve), 'goes', curve.noun)}",
            severity="error" if safe_exp(measured * units) > limit**2 else "warning",
        )
    ]


def _vanishing(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    cut = _cut_off(curve, run)
    if cut is not None:
        return [cut]
    steps, units = gradient_steps(curve), len(curve.units)
    trend = compounding(steps, units, rising=False)
    if trend is None or not trend.compounded < 1 / limit:
        return []
    worst = curve.units[min(trend.kept, key=lambda j: steps[j])][0]
    return [
        Hit(
            sites=tuple(record.site for j in trend.kept for record in curve.units[j]),
            place=place_of(worst),
            metric=f"grad_stream_norm factor a {curve.noun}, backward",
            value=trend.factor,
            expected=1.0,
            message=f"The gradient shrinks x{number(trend.factor)} a {curve.noun} on its way back over "
            f"{kept_blocks(curve, trend)}, which compounds to x{number(trend.compounded)} over {count(units, curve.noun)}; "
            f"the residual path alone would keep it at x1 or above.{law(gradient_growth(curve), 'goes', curve.noun)}",
            severity="error" if trend.compounded < 1 / limit**2 else "warning",
        )
    ]


def _cut_off(curve: Profile, run: Run) -> Hit | None:
    """Find the place from which on every gradient toward the input is exactly zero."""
    observed = [record for record in curve.sites if record.grad_stream_norm is not None]
    zero: list[SiteRecord] = []
    for record in observed:
        if record.grad_stream_norm != 0:
            break
        zero.append(record)
    if not zero:
        return None
    last, sites = zero[-1], tuple(record.site for record in zero)
    if len(zero) < len(observed) or (last.grad_sum_norm is not None and last.grad_sum_norm > 0):
        more = f", so {count(len(zero), 'site')} get none" if len(zero) > 1 else ""
        return Hit(
            sites=sites,
            place=place_of(last),
            metric="grad_stream_norm",
            value=0.0,
            expected="above 0",
            message=f"No gradient passes {site_label(last)} toward the input{more}: it is exactly zero there, "
            "and not after it.",
            severity="error",
        )
    head, readers = _zero_head(run), _zero_readers(run, zero)
    if head is None and not readers:
        # A loss that is not finite is PC305's or PC209's, and may well have zero gradients, as the mean over no targets has.
        spoilt = run.loss.value is not None and not math.isfinite(run.loss.value)
        return None if spoilt else _nothing_enters(zero)
    if head is not None:
        why = f", because {head.name} is zero at the start and passes none; it has a gradient of its own, so the first step"
        silent = "nothing else"
    else:
        have, own, it = ("has a gradient", "its", "it") if len(readers) == 1 else ("have gradients", "their", "one of them")
        start = f"{subject(readers)} {verb(readers, 'is', 'are')} zero at the start and {have} of {own} own"
        why, silent = f". {start}: if {it} is what reads this stream, the first step", "nothing else of it"
    return Hit(
        sites=sites,
        place=place_of(last) if head is None else Place(parameter=head.name),
        metric="grad_stream_norm",
        value=0.0,
        expected="above 0 after the first step",
        message=f"No gradient reaches any of the {_from_to(zero)}{why} ends this. The backward pass of this scan says "
        f"{silent}.",
        severity="note",
        remedy="Nothing, if the zero is meant; to see the gradients of the blocks, scan once with another init of it.",
    )


def _zero_head(run: Run) -> ParameterRecord | None:
    """Find the factor behind all streams that is zero and trained, where no stream of the run gets a gradient."""
    if any(record.grad_stream_norm for record in run.sites):
        return None
    outside = (p for p in run.parameters if p.block is None and p.site is None and p.role is not None)
    return next((p for p in outside if holds(p) and multiplies(p)), None)


def _zero_readers(run: Run, stream: Sequence[SiteRecord]) -> list[ParameterRecord]:
    """List the factors that are zero and trained, and may be what the rest of the model reads a stream through.

    They lie outside the blocks, or in branches of another stream behind the last site of this one; where several branches share
    one, a later branch may be it.
    """
    own, last = {record.site for record in stream}, stream[-1].site
    found = []
    for p in run.parameters:
        if not (holds(p) and multiplies(p)):
            continue
        if p.site is None:
            behind = p.block is None
        else:
            behind = (p.site not in own and p.site > last) or (p.branches is not None and p.branches > 1)
        if behind:
            found.append(p)
    return found


def _nothing_enters(zero: Sequence[SiteRecord]) -> Hit:
    last = zero[-1]
    return Hit(
        sites=tuple(record.site for record in zero),
        place=place_of(last),
        metric="grad_stream_norm",
        value=0.0,
        expected="above 0",
        message="No gradient of the loss enters the stack: it is exactly zero at the last observed site, "
        f"{site_label(last)}, and at all before it.",
        severity="error",
        remedy="Look behind the last block: a detached output, a head or norm that is zero and frozen, a loss that does not "
        "depend on the logits, or an underflow (scale the loss in fp16).",
    )


def _from_to(sites: Sequence[SiteRecord]) -> str:
    """Write ``8 sites from site 0 (mlp of block 0) to site 7 (mlp of block 7)``: which stream it is."""
    ends = "" if len(sites) == 1 else f" from {site_label(sites[0])} to {site_label(sites[-1])}"
    return f"{count(len(sites), 'site')}{ends}"


EXPLODING = Rule(
    id="PC301",
    name="exploding-gradient",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor over the whole depth beyond what the forward pass explains; an error where the growth itself is above its "
    "square",
    sees="A gradient that every block multiplies on its way back.",
    why="The first blocks then get gradients of another order than the last ones: clipping, which goes by the total, "
    "silences all but them, and a step that suits one end of the network destroys the other. In half precision they "
    "overflow.",
    formula="Step of a block: ln(grad_stream_norm before it / before the next), less the step that the forward pass "
    "predicts: 1/2 ln(1 + (b/f) update_ratio^2) summed over its sites, at most (b/f)/2 ln((l+1)/l) at depth l, and 0 where "
    "a norm follows each addition. b/f is 2.07 for mlp and moe, 3 for attention, 5 for linear attention and state-space "
    "mixers. r = e^mean over the blocks after the first quarter, without the largest tenth. Broken when r^blocks > "
    "threshold. Pre-norm growth toward the input like 1/sqrt(l) or 1/l is therefore silent, and so is the jump that a small "
    "embedding gives. Where the stream is doubled at all of them (PC206), or grows so too (PC201), that leads.",
    basis="The prediction is meant as an upper bound: at the initialisation of transformers' Llama, GPT-2 and Qwen3.5 (12 to "
    "16 blocks) the gradient grew by 0.06 to 1.05 of it over the blocks after the first. 10 beyond it leaves room for "
    "sublayers whose b/f is not known. No published cut-off was found: the number is this tool's own.",
    source="Backward recurrence derived from Xiong 2020, arXiv 2002.04745; b/f computed for each activation; google/maxtext "
    "issue 614 (gradients growing x100 a layer: 12 layers train, 17 give NaN).",
    remedy="Put the norm on the branch (pre-norm) or scale the branch by 1/sqrt(2 x blocks); with post-norm use DeepNorm's "
    "scales; look for a gain above 1 on the residual path.",
    check=_exploding,
    caused_by=(("PC206", "same"), ("PC201", "touching")),
)

VANISHING = Rule(
    id="PC302",
    name="vanishing-gradient",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor by which the gradient's decay compounds over the depth; an error above its square, a warning up to there",
    sees="A gradient that every block shrinks on its way back, or that is exactly zero from some place on toward the input.",
    why="The first blocks do not learn: their gradients fall below what the optimiser's epsilon and the dtype can tell from "
    "zero.",
    formula="r = geometric mean of grad_stream_norm(block) / grad_stream_norm(block after), over the blocks after the first "
    "quarter, without the smallest tenth. Broken when r^blocks < 1 / threshold, or when the gradient is exactly zero at "
    "every site up to one place. A head that is zero at the start and has a gradient of its own gives a note, since the "
    "first step ends it; so do zero gates and matrices with a gradient of their own through which another stream may read this "
    "one (a gated cross-attention).",
    basis="Pre-norm cannot shrink a gradient (the factor is 1 + b/S); post-norm was measured at 0.61 over 48 layers. 10 is "
    "outside both, and 0.9^64 = 0.0012 is far outside. No published cut-off was found: the number is this tool's own.",
    source="Xiong 2020, arXiv 2002.04745, Theorem 1; Hanin and Rolnick 2018, arXiv 1803.01719.",
    remedy="Look for a factor below 1 on the residual path, a residual that is missing, or a detach; in fp16 scale the loss.",
    check=_vanishing,
    caused_by=(("PC206", "same"),),
)

RULES = (EXPLODING, VANISHING)
