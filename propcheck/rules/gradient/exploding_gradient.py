"""PC301: the gradient grows by a factor in every block on its way back."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.growth import gradient_growth
from propcheck.analysis.profile import NORM_ON_STREAM, compounding, gradient_steps, safe_exp
from propcheck.analysis.theory import expected_gradient_step
from propcheck.formatting import count, number
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of
from propcheck.rules.trends import growth_law, judged_blocks, judged_sites

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

RULE = Rule(
    id="PC301",
    name="exploding-gradient",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor over the whole depth beyond what the forward pass explains; an error if the growth itself is above its square",
    sees="A gradient that every block multiplies on its way back.",
    why="The first blocks get gradients of another order of magnitude than the last ones. Clipping, which acts on the total "
    "norm, silences all but the first, and a step size that suits one end of the network destroys the other. In half precision "
    "the gradients overflow.",
    formula="Step of a block: ln(grad_stream_norm before it / before the next), minus the step that the forward pass predicts: "
    "1/2 ln(1 + (b/f) update_ratio^2) summed over its sites, at most (b/f)/2 ln((l+1)/l) at depth l, and 0 if a norm follows "
    "each addition. b/f is 2.07 for mlp and moe, 3 for attention, 5 for linear attention and state-space mixers. r = e^mean "
    "over the blocks after the first quarter, without the largest tenth. Broken if r^blocks > threshold. Pre-norm growth "
    "toward the input like 1/sqrt(l) or 1/l is therefore not flagged, and neither is the jump from a small embedding. If the "
    "stream is doubled at all of these sites (PC206), or grows there too (PC201), that finding is reported instead.",
    basis="The prediction is meant as an upper bound: at the initialisation of transformers' Llama, GPT-2 and Qwen3.5 (12 to "
    "16 blocks) the gradient grew by 0.06 to 1.05 of it over the blocks after the first. A factor of 10 beyond it leaves room "
    "for sublayers whose b/f is unknown. No published cut-off was found; the number is this tool's own.",
    source="Backward recurrence derived from Xiong 2020, arXiv 2002.04745; b/f computed for each activation; google/maxtext "
    "issue 614 (gradients growing x100 a layer: 12 layers train, 17 give NaN).",
    remedy="Put the norm on the branch (pre-norm), or scale the branch by 1/sqrt(2 x blocks). With post-norm use DeepNorm's "
    "scales. Check the residual path for a gain above 1.",
    example=Example(
        broken="x = self.norm(alpha * x + self.mlp(x))  # DeepNorm's alpha, but all weights drawn with std 0.02",
        repaired="nn.init.xavier_normal_(self.mlp.down.weight, gain=(8 * blocks) ** -0.25)  # DeepNorm's beta",
    ),
    caused_by=(("PC206", "same"), ("PC201", "touching")),
)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge the average growth of the gradient per block, beyond what the forward pass explains."""
    units, noun = len(profile.units), profile.noun
    steps = gradient_steps(profile)
    # The excess over the prediction is judged and trimmed.
    excess = {j: step - expected_gradient_step(profile.units[j], j) for j, step in steps.items() if j}
    trend = compounding(excess, units, rising=True)
    if trend is None or not trend.compounded > threshold:
        return []
    measured = statistics.fmean(steps[j] for j in trend.kept)
    expected = statistics.fmean(steps[j] - excess[j] for j in trend.kept)
    steepest = profile.units[max(trend.kept, key=lambda j: excess[j])][0]
    if any(site.placement in NORM_ON_STREAM for site in profile.sites):
        explanation = "A norm after each addition keeps it near x1 only if branches amplify gradients no more than activations."
    else:
        explanation = (
            f"The additions of the forward pass explain at most x{number(safe_exp(expected))} per {noun}, "
            f"x{number(safe_exp(expected * units))} in all."
        )
    return [
        Hit(
            sites=judged_sites(profile, trend),
            place=place_of(steepest),
            metric=f"grad_stream_norm factor a {noun}, backward",
            value=safe_exp(measured),
            expected=safe_exp(expected),
            message=f"The gradient grows x{number(safe_exp(measured))} per {noun} on its way back over "
            f"{judged_blocks(profile, trend)}, which compounds to x{number(safe_exp(measured * units))} over "
            f"{count(units, noun)}. {explanation}{growth_law(gradient_growth(profile), 'goes', noun)}",
            severity="error" if safe_exp(measured * units) > threshold**2 else "warning",
        )
    ]
