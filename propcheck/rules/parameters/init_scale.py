"""PC104: weights whose init scale differs from their siblings, their declared scheme, or Mamba's range of step sizes."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import families, place, subject, verb
from propcheck.formatting import count, number
from propcheck.rules.parameters.drawn_weights import drawn_parameters, is_large_weight
from propcheck.rules.parameters.init_scheme import SIGMAS, differs_from, scheme_hits
from propcheck.rules.parameters.step_sizes import MAX_STEP, MIN_STEP, step_size_hits
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run

# Fewer parameters of one name do not show what is usual.
_MIN_SIBLINGS = 4

RULE = Rule(
    scope="run",
    id="PC104",
    name="init-scale",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a scale is off its siblings, its declared scheme, or its range",
    sees="Three faults. (1) A weight drawn at another scale than the weights of the same name in the blocks around it. (2) "
    "Weights that do not follow the scheme that the probe declares in `[expect]` (or in `[init]`, for the reference decoder), "
    "even if all blocks are wrong alike. (3) Biases of step sizes that start far outside Mamba's range.",
    why="An init function missed a module (one created later, replaced, or named differently), or applied a depth factor "
    "nowhere or everywhere. The branch then writes updates of another size than intended. A step size sets how much of its "
    "state a recurrence keeps from one token to the next: a step of 1.31, from a bias left at 1, keeps 27 % at decay rate 1, "
    "so the state is forgotten within a few tokens.",
    formula=f"Siblings: at least {_MIN_SIBLINGS} parameters of the same name (apart from numbers), role and shape. One is "
    f"reported if |ln(std / median)| > ln(threshold) + {SIGMAS:g} / sqrt(2 numel), where the second term allows for sampling "
    "noise; if at most one in ten (or a single one) is off, none of them first or last; and if all others were made by the "
    "same calls. A scheme with a scale for each depth, or with alternating scales, is therefore not reported.\n\n"
    "Declared scheme: the same test, with the scheme's std in place of the median. Judged: the token embedding and the head "
    "(the matrices with one row per vocabulary entry), the residual projections (which write a site's update) and all other "
    "matrices of the branches. One finding per name, or per kind of weight if many names are off. The formulas are those of "
    "`init.scheme`, with the model's number of blocks as the number of layers. For he and fan-in, the side of the matrix that "
    "fits better is taken as its fan-in, and stacks of experts are skipped: their shape does not say which side is summed "
    "over. Not judged: routers, convolutions, norms, biases, position embeddings, and reference decoders whose placement "
    "scales weights itself (deepnorm, sub-ln). Without a declared scheme, a scale that is off in every block alike is not "
    "seen. Zero weights are never compared.\n\n"
    "Step biases (vectors added before a softplus whose result is the step of a recurrence): softplus(mean) below "
    f"{MIN_STEP:g} / threshold or above {MAX_STEP:g} x threshold. The mean stands for the vector, whose values are not stored. "
    "A warning in state-space sublayers, where the harm was reported; a note elsewhere.",
    basis="Sampling noise is accounted for, so the threshold only says which differences matter. 1.5 is this tool's own "
    "choice, as in PC205; no published cut-off was found. A depth factor that one block missed is sqrt(2 x blocks), 4.9 at 12 "
    "blocks. torch's default for linear layers differs from std 0.02 by x2.6 at width 128, and by only x1.04 at width 768, "
    "which is not reported. Schemes that count depth in blocks rather than sublayers differ by 1.41 and are not reported.",
    source="None for a single block. In all blocks: huggingface/transformers issue 47458 (a depth factor whose name test never "
    "matched; scales off by 4.9) and facebookresearch/lingua issue 39 (a depth factor on q, k and v too). Step sizes: Gu and "
    "Dao 2023, arXiv 2312.00752 (softplus(bias) drawn from 0.001 to 0.1); fla-org/flash-linear-attention pull request 739 "
    "(Mamba-2 with biases of 1: a significantly worse loss at 7B); huggingface/transformers issue 43717.",
    remedy="Initialise this weight like its siblings. Look for a module that was created or replaced after the init function "
    "ran, or that the function does not recognise by name.",
    example=Example(
        broken='if name == "c_proj":  # named_modules() gives "blocks.3.attn.c_proj"\n'
        "    nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers))",
        repaired='if name.endswith("c_proj"):\n    nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * layers))',
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Compare weights with their siblings and their scheme, and step biases with their range."""
    drawn = drawn_parameters(run)
    weights = [p for p in drawn if is_large_weight(p) and 0 < (p.std or 0.0) < math.inf]
    off_scheme = scheme_hits(run, weights, threshold)
    reported = {p.name for group, _ in off_scheme for p in group}
    return [
        *(hit for _, hit in off_scheme),
        *_sibling_hits([p for p in weights if p.name not in reported], threshold),
        *step_size_hits(drawn, threshold),
    ]


def _sibling_hits(weights: Sequence[ParameterRecord], threshold: float) -> list[Hit]:
    hits = []
    for siblings in families(weights):
        outliers = _outliers(siblings, threshold)
        if outliers:
            hits.append(_sibling_hit(outliers, [p for p in siblings if p not in outliers]))
    return hits


def _outliers(siblings: Sequence[ParameterRecord], threshold: float) -> list[ParameterRecord]:
    """Find the few siblings whose std is off; none if they are first or last, or if the others differ in their calls."""
    if len(siblings) < _MIN_SIBLINGS:
        return []
    usual = statistics.median(p.std or 0.0 for p in siblings)
    outliers = [index for index, record in enumerate(siblings) if differs_from(record, usual, threshold)]
    if len(outliers) > max(1, len(siblings) // 10) or 0 in outliers or len(siblings) - 1 in outliers:
        return []
    if len({record.init_calls for index, record in enumerate(siblings) if index not in outliers}) > 1:
        return []  # a scheme with a scale for each depth
    return [siblings[index] for index in outliers]


def _sibling_hit(outliers: Sequence[ParameterRecord], others: Sequence[ParameterRecord]) -> Hit:
    usual = statistics.median(p.std or 0.0 for p in others)
    worst = max(outliers, key=lambda p: abs(math.log((p.std or 0.0) / usual)))
    its, it = ("Its", "it") if len(outliers) == 1 else ("Their", "them")
    return Hit(
        sites=(),
        place=place(worst),
        metric="std",
        value=worst.std,
        expected=usual,
        message=f"{subject(outliers)} {verb(outliers, 'has', 'have')} std {number(worst.std)} ({worst.init_calls}), "
        f"{number((worst.std or 0.0) / usual)} times the {number(usual)} ({others[0].init_calls}) of the "
        f"{count(len(others), 'parameter')} of the same name before and after it. {its} outputs start at another scale than "
        f"those of the siblings; the init function probably missed {it}.",
    )
