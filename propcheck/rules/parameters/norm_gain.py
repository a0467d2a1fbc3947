"""PC106: norms whose gain starts far from 1, and sublayers that also read the stream without their norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number
from propcheck.rules.norm_groups import kinds, norms_of, place, sites, subject
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.site_groups import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, ParameterRecord, Run, SiteRecord

RULE = Rule(
    scope="run",
    id="PC106",
    name="norm-gain",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which an effective gain is off 1, and by which a direct and a normed read of one stream differ",
    sees="A norm whose effective gain starts far from 1. Also a sublayer that reads the stream both through its norm and "
    "directly, at two scales.",
    why="A gain scales everything that the sublayer reads or writes, in every block, and so undoes the scale that the rest of "
    "the init was chosen for. A direct read brings the stream's own scale into the sublayer, which the norm is there to "
    "remove.",
    formula="gain in norms.parquet > threshold or < 1 / threshold. The gain is the RMS of the factor that the normalised value "
    "is multiplied by (of 1 + weight, where that is applied). Judged: RMSNorm and LayerNorm, not normalisations to length 1. "
    "On the output of a branch only a gain above 1 is reported: a small one is a residual scale. 1 / sqrt(block), counting "
    "from 1, is LayerNorm Scaling (arXiv 2502.05795) and not reported. Inside a branch (queries and keys) the gain may be a "
    "temperature, so it is a note. One finding per kind of norm.\n\n"
    "Direct reads: bare_read is true, and stream_rms / norm_output_rms differs from 1 by more than the threshold. This is a "
    "note, because a gate (as in a highway network) or a router may read the stream directly on purpose, and the records do "
    "not show what the sublayer does with it.",
    basis="Norms start with gain 1 in all common architectures, so any other gain needs a reason. 1.5 is this tool's own "
    "choice, as in PC104 and PC205; no published cut-off was found. The reported fault is a gain of exactly 2.",
    source="Ba 2016, arXiv 1607.06450, and Zhang and Sennrich 2019, arXiv 1910.07467 (gains start at 1); "
    "huggingface/transformers issue 40224 (ones in a norm that adds 1 itself: a gain of 2 in every norm); "
    "facebookresearch/xformers pull request 233 (a pre-norm wrapper that normalised only the first of query, key and value).",
    remedy="Initialise gains to 1, or to 0 where the norm adds 1 itself. Exclude norms from the general init.",
    example=Example(
        broken="nn.init.ones_(self.norm.weight)  # the forward pass multiplies by 1 + weight: a gain of 2",
        repaired="nn.init.zeros_(self.norm.weight)",
    ),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Check the gain of every norm and every direct read of the stream."""
    weights = {p.name: p for p in run.parameters}
    off = [
        norm
        for norm in norms_of(run)
        if _is_off(norm, threshold) and _is_elementwise_gain(norm, weights.get(norm.parameter or ""))
    ]
    return [*(_gain_hit(group, profile, run) for group in kinds(off)), *_direct_read_hits(profile, threshold)]


def _gain_hit(group: Sequence[NormRecord], profile: Profile, run: Run) -> Hit:
    worst = max(group, key=lambda norm: _log_distance(norm.gain))
    gain = worst.gain or 0.0
    applies, its = ("applies", "its output is") if len(group) == 1 else ("apply", "their outputs are")
    return Hit(
        sites=sites(group),
        place=place(worst, profile),
        metric="gain",
        value=gain,
        expected=1.0,
        message=f"{subject(group)} {applies} a gain of RMS {number(gain)} at initialisation, where 1 is usual: {its} "
        f"{'exactly zero' if gain == 0 else f'{number(gain)} times the usual scale'}.{_added_one(worst, run)}",
        severity="note" if worst.place == "inside" else None,
    )


def _is_off(norm: NormRecord, threshold: float) -> bool:
    gain = norm.gain
    if gain is None or not math.isfinite(gain) or norm.kind == "length":
        return False
    if norm.place == "written" and gain < 1:
        return False  # a residual scale
    if norm.block is not None and math.isclose(gain, (norm.block + 1) ** -0.5, rel_tol=0.05):
        return False  # LayerNorm Scaling, folded into the gain
    return gain > threshold or gain * threshold < 1


def _is_elementwise_gain(norm: NormRecord, weight: ParameterRecord | None) -> bool:
    """Whether the weight has a number for each element and was written (else PC102 reports it)."""
    return weight is None or (weight.init_calls is not None and weight.numel % norm.width == 0)


def _log_distance(factor: float | None) -> float:
    return abs(math.log(factor)) if factor else math.inf


def _added_one(norm: NormRecord, run: Run) -> str:
    """Say so if the gain is 1 + weight."""
    name = norm.parameter or f"{norm.module}.weight"  # a fused norm that was called with 1 + weight does not name it
    weight = next((p for p in run.parameters if p.name == name), None)
    if weight is None or weight.mean is None or weight.std is None or norm.gain is None or not abs(weight.mean) > 0.1:
        return ""
    if not math.isclose(math.hypot(1 + weight.mean, weight.std), norm.gain, rel_tol=0.01):
        return ""
    calls = f" ({weight.init_calls})" if weight.init_calls else ""
    return f" The gain is applied as 1 + weight, and the weight starts at {number(weight.mean)}{calls}."


def _direct_read_hits(profile: Profile, threshold: float) -> list[Hit]:
    """Report sublayers that read the stream both through a norm and directly, at different scales."""
    by_sublayer: dict[str, list[tuple[SiteRecord, float]]] = {}
    for site in profile.sites:
        ratio = _direct_read_ratio(site)
        if ratio is not None and (ratio > threshold or ratio * threshold < 1):
            by_sublayer.setdefault(site.sublayer, []).append((site, ratio))
    return [_direct_read_hit(group) for group in by_sublayer.values()]


def _direct_read_ratio(site: SiteRecord) -> float | None:
    if not site.bare_read or not site.norm_output_rms or not site.stream_rms:
        return None
    ratio = site.stream_rms / site.norm_output_rms
    return ratio if 0 < ratio < math.inf else None


def _direct_read_hit(group: Sequence[tuple[SiteRecord, float]]) -> Hit:
    worst, ratio = max(group, key=lambda pair: _log_distance(pair[1]))
    more = f" The same happens at {count(len(group) - 1, 'more site')} of this kind." if len(group) > 1 else ""
    return Hit(
        sites=tuple(site.site for site, _ in group),
        place=place_of(worst),
        metric="stream_rms / norm_output_rms",
        value=ratio,
        expected=1.0,
        message=f"The sublayer at {site_label(worst)} reads the stream through its norm, at RMS "
        f"{number(worst.norm_output_rms)}, and also directly, at RMS {number(worst.stream_rms)}. What it computes from the "
        f"direct read therefore has a different scale.{more} "
        "A gate or a router may do this on purpose; queries, keys and values rarely do.",
        severity="note",  # the records do not tell a gate from a key
        remedy="Pass the norm's output to all inputs of the sublayer (query, key and value). If the direct read is intended, "
        "no action is needed.",
    )
