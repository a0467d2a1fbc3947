"""PC205: the stream jumps at one site, unlike at its neighbours, or in the first block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.analysis.profile import NORM_ON_STREAM, log_ratio, safe_exp
from propcheck.formatting import number
from propcheck.rules.neighbour_steps import neighbours, outlying_step, step_into
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.site_groups import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

# The first block is judged as a whole. Additive growth from a small embedding is steep there by law, and only the scale of the
# embedding is to blame.
_FIRST_BLOCK_LIMIT = 10.0

RULE = Rule(
    id="PC205",
    name="residual-discontinuity",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a step of the stream differs from the same step in the blocks around it",
    sees="A jump of the stream at one addition, or between two, that its neighbours do not have; also a first block that "
    "dwarfs the embedding.",
    why="A single block that doubles, drops or renormalises the stream is nearly always a mistake in that block. A first block "
    "that dwarfs the embedding raises the embedding's gradient by as much or more, which published work ties to loss spikes.",
    formula="Each site has two steps: sum_rms / stream_rms, and stream_rms / sum_rms of the site before. Each step is compared "
    "with the median of the three nearest siblings (same kind, same role in the block) on either side; of two, the closer one "
    "counts. It must differ from both sides by more than the threshold, in the same direction. If a norm acts on the stream in "
    "all blocks, the first such norm sets the scale and is not judged. Nothing is judged before the first addition, where a "
    "norm belongs to the embedding. The first block is judged as a whole: its last sum_rms over the first stream_rms, more "
    f"than {_FIRST_BLOCK_LIMIT:g}.",
    basis="The steepest healthy step after the first block is sqrt(2); it differs from the next, sqrt(1.5), by a factor of "
    "1.15. A doubled residual gives 2 or more. 1.5 lies midway. (A missing residual ends the stream, and is PC206.) For the "
    f"first block, embeddings of one third of the first updates (GPT-2) give 2.8; {_FIRST_BLOCK_LIMIT:g} is this tool's own "
    "number, no published cut-off was found.",
    source="Takase 2023, arXiv 2312.16903 (embeddings of std 0.02 invite spikes, of about 1 avoid them); additive law from "
    "Xiong 2020, arXiv 2002.04745, Lemma 2.",
    remedy="Compare the forward code and the init of that block with its neighbours'. Look for a residual that is missing, "
    "doubled or taken after the norm, and for an output projection drawn at another scale.",
    example=Example(
        broken="x = self.embedding(ids)  # std 0.02, while the first block writes updates of RMS 1",
        repaired="x = self.embedding(ids) * math.sqrt(width)",
    ),
    caused_by=(("PC206", "touching"),),
)

_Metric = Literal["stream_rms / sum_rms before", "sum_rms / stream_rms"]


@dataclass(frozen=True, slots=True)
class _Jump:
    """A log step that is out of line, and the log step of its neighbours."""

    metric: _Metric
    step: float
    expected: float


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge the first block as a whole, and the two steps at each later site."""
    first_block = _first_block(profile)
    hits = [] if first_block is None else [first_block]
    covered = set(first_block.sites) if first_block else set()
    jumps: dict[int, _Jump] = {}  # by site number
    flagged = []
    for index, site in enumerate(profile.sites):
        jump = None if site.site in covered else _jump(profile, index, math.log(threshold))
        if jump is not None:
            flagged.append(index)
            jumps[site.site] = jump
    return [*hits, *(_hit(profile, group, jumps) for group in grouped(profile, flagged))]


def _jump(profile: Profile, index: int, limit: float) -> _Jump | None:
    """Compare the step into a site, and the step over its addition, with those of its siblings."""
    sites, first_unit = profile.sites, len(profile.units[0])
    around = neighbours(profile, index)
    into = {i: step_into(sites, i) for side in ([index], *around) for i in side}
    if 0 in around[0]:
        into[0] = 0.0  # nothing lies between the beginning of a stream and its first site
    outlier = outlying_step(index, into, around, limit)
    # If a norm acts on the stream, the first norm after the embedding does what no later one does: it sets the scale. If the
    # placement is unknown, later steps other than x1 show that something acts on the stream. Earlier sites do not show it: a
    # norm after them in one block alone is what this rule looks for.
    normed = any(sites[i].placement in NORM_ON_STREAM for i in around[1])
    sets_scale = index <= first_unit and outlier is not None and (normed or abs(outlier[1]) > 0.01)
    if outlier is not None and not sets_scale:
        return _Jump("stream_rms / sum_rms before", *outlier)
    if index < first_unit:
        return None
    around = neighbours(profile, index, skip_units=1)
    over = {i: log_ratio(sites[i].sum_rms, sites[i].stream_rms) for side in ([index], *around) for i in side}
    outlier = outlying_step(index, over, around, limit)
    return None if outlier is None else _Jump("sum_rms / stream_rms", *outlier)


def _hit(profile: Profile, group: Sequence[SiteRecord], jumps: Mapping[int, _Jump]) -> Hit:
    worst = max(group, key=lambda site: abs(jumps[site.site].step - jumps[site.site].expected))
    jump = jumps[worst.site]
    if jump.metric == "sum_rms / stream_rms":
        rms, sum_rms = number(worst.stream_rms), number(worst.sum_rms)
        what = f"The addition at {site_label(worst)} takes the stream from RMS {rms} to {sum_rms}"
    else:
        previous = profile.sites[profile.sites.index(worst) - 1]
        what = (
            f"The stream arrives at {site_label(worst)} with RMS {number(worst.stream_rms)}, but left the addition before with "
            f"{number(previous.sum_rms)}"
        )
    others = {1: "", 2: " One adjacent site is out of line too."}.get(
        len(group), f" {len(group) - 1} adjacent sites are out of line too."
    )
    return Hit(
        sites=tuple(site.site for site in group),
        place=place_of(worst),
        metric=jump.metric,
        value=safe_exp(jump.step),
        expected=safe_exp(jump.expected),
        message=f"{what}: x{number(safe_exp(jump.step))}. The same step is x{number(safe_exp(jump.expected))} in the blocks "
        f"around it, so this is usually a mistake in that block.{others}",
    )


# ---------------------------------------------------------------------- the first block


def _first_block(profile: Profile) -> Hit | None:
    """Judge the factor by which the first block raises the stream above the embedding."""
    if not profile.units:
        return None
    unit = profile.units[0]
    first, last = unit[0], unit[-1]
    jump = log_ratio(last.sum_rms, first.stream_rms)
    if jump is None or jump <= math.log(_FIRST_BLOCK_LIMIT):
        return None
    second = profile.units[1][-1].sum_rms if len(profile.units) > 1 else None
    next_step = log_ratio(second, last.sum_rms)
    normed = any(site.placement in NORM_ON_STREAM for site in unit)
    return Hit(
        sites=tuple(site.site for site in unit),
        place=place_of(max(unit, key=lambda site: log_ratio(site.sum_rms, site.stream_rms) or 0.0)),
        metric=f"sum_rms after the first {profile.noun} / stream_rms before it",
        value=safe_exp(jump),
        expected=None if next_step is None else safe_exp(next_step),
        message=f"The stream enters {profile.noun} {profile.label(0)} at RMS {number(first.stream_rms)} and leaves it at "
        f"{number(last.sum_rms)}, x{number(safe_exp(jump))}: {_reason(unit, normed=normed)}.{_embedding_gradient(profile)}"
        f"{'' if normed else ' An embedding much smaller than the first updates is tied to loss spikes.'}",
        severity="note" if normed else None,
        remedy="Raise the embedding's standard deviation to that of the updates (about 1, or multiply it by sqrt(width)), or "
        "scale the residual projections of the first block down.",
    )


def _reason(unit: Sequence[SiteRecord], *, normed: bool) -> str:
    if normed:
        return "the norm after the first addition raises the small embedding"
    ratios = [site for site in unit if site.update_ratio is not None and math.isfinite(site.update_ratio)]
    if not ratios:
        return "the first updates dwarf the embedding"
    worst = max(ratios, key=lambda site: site.update_ratio or 0.0)
    return f"the first updates dwarf the embedding (update/stream {number(worst.update_ratio)} at {site_label(worst)})"


def _embedding_gradient(profile: Profile) -> str:
    """Compare the gradient before the first block with that before the second and the last, as a sentence."""
    first = profile.units[0][0]
    ratios = []
    for j in dict.fromkeys((1, len(profile.units) - 1)) if len(profile.units) > 1 else ():
        deeper = profile.units[j][0].grad_stream_norm
        ratio = log_ratio(first.grad_stream_norm, deeper)
        if ratio is not None:
            ratios.append(f"x{number(safe_exp(ratio))} that before {profile.noun} {profile.label(j)} ({number(deeper)})")
    if not ratios:
        return ""
    return (
        f" The gradient of the stream before {profile.noun} {profile.label(0)} is {number(first.grad_stream_norm)}, "
        f"{' and '.join(ratios)}."
    )
