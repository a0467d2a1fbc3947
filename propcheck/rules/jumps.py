"""One addition against its neighbours: PC204 and PC205."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import NORM_ON_STREAM, Profile, log_ratio, median, safe_exp
from propcheck.formatting import count, number
from propcheck.rules.neighbours import link, sides, stands_out
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import grouped, place_of, siblings, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Run

# The first block is judged by what it makes of the embedding as a whole: additive growth from a small embedding is steep there
# by law, and only the scale of the embedding is to blame.
FIRST_BLOCK_LIMIT = 10.0


def _dominant_update(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    flagged = [i for i, r in enumerate(curve.sites) if r.update_ratio is not None and limit < r.update_ratio < math.inf]
    hits = []
    for group in grouped(curve, flagged):
        worst = max(group, key=lambda record: record.update_ratio or 0.0)
        before, after = siblings(curve, curve.sites.index(worst))
        more = (
            f" {count(len(group), 'site').capitalize()} from {site_label(group[0])} to {site_label(group[-1])} are above "
            f"x{number(limit)}."
            if len(group) > 1
            else ""
        )
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric="update_ratio",
                value=worst.update_ratio,
                expected=median([curve.sites[i].update_ratio for i in (*before, *after)]),
                message=f"The update at {site_label(worst)} is x{number(worst.update_ratio)} the stream it is added to (RMS "
                f"{number(worst.update_rms)} on {number(worst.stream_rms)}): the block replaces the stream.{more}",
            )
        )
    return hits


def _discontinuity(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    start = _first_block(curve)
    hits = [] if start is None else [start]
    covered = set(start.sites) if start else set()
    odd: dict[int, tuple[str, float, float]] = {}
    for index, record in enumerate(curve.sites):
        if record.site in covered:
            continue
        found = _odd_step(curve, index, math.log(limit))
        if found is not None:
            odd[index] = found
    position = {record.site: index for index, record in enumerate(curve.sites)}
    for group in grouped(curve, list(odd)):
        worst = max(group, key=lambda record: abs(odd[position[record.site]][1] - odd[position[record.site]][2]))
        what, step, expected = odd[position[worst.site]]
        more = f" {count(len(group) - 1, 'site')} beside it are out of line too." if len(group) > 2 else ""
        more = " One site beside it is out of line too." if len(group) == 2 else more
        before = curve.sites[position[worst.site] - 1].sum_rms
        here, after = number(worst.stream_rms), number(worst.sum_rms)
        if what == "stream_rms / sum_rms before":
            where = f"The stream comes to {site_label(worst)} at RMS {here} where the sum before was {number(before)}"
        else:
            where = f"The addition at {site_label(worst)} takes the stream from RMS {here} to {after}"
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric=what,
                value=safe_exp(step),
                expected=safe_exp(expected),
                message=f"{where}, x{number(safe_exp(step))}; the same step is x{number(safe_exp(expected))} in the blocks "
                f"around it.{more}",
            )
        )
    return hits


def _first_block(curve: Profile) -> Hit | None:
    """Judge what the first block makes of the embedding."""
    if not curve.units:
        return None
    unit = curve.units[0]
    first, last = unit[0], unit[-1]
    jump = log_ratio(last.sum_rms, first.stream_rms)
    if jump is None or jump <= math.log(FIRST_BLOCK_LIMIT):
        return None
    second = curve.units[1][-1].sum_rms if len(curve.units) > 1 else None
    next_step = log_ratio(second, last.sum_rms)
    ratios = [record for record in unit if record.update_ratio is not None and math.isfinite(record.update_ratio)]
    normed = any(record.placement in NORM_ON_STREAM for record in unit)
    if normed:
        why = "the norm after the first addition lifts the embedding"
    elif ratios:
        worst = max(ratios, key=lambda record: record.update_ratio or 0.0)
        why = f"the first updates dwarf the embedding (update/stream {number(worst.update_ratio)} at {site_label(worst)})"
    else:
        why = "the first updates dwarf the embedding"
    falls = []
    for unit_index in dict.fromkeys((1, len(curve.units) - 1)) if len(curve.units) > 1 else ():
        deeper = curve.units[unit_index][0].grad_stream_norm
        fall = log_ratio(first.grad_stream_norm, deeper)
        if fall is not None:
            falls.append(f"x{number(safe_exp(fall))} that before {curve.noun} {curve.label(unit_index)} ({number(deeper)})")
    gradients = (
        f" The gradient of the stream before {curve.noun} {curve.label(0)} is {number(first.grad_stream_norm)}, "
        f"{' and '.join(falls)}."
        if falls
        else ""
    )
    return Hit(
        sites=tuple(record.site for record in unit),
        place=place_of(max(unit, key=lambda record: log_ratio(record.sum_rms, record.stream_rms) or 0.0)),
        metric=f"sum_rms after the first {curve.noun} / stream_rms before it",
        value=safe_exp(jump),
        expected=None if next_step is None else safe_exp(next_step),
        message=f"The stream enters {curve.noun} {curve.label(0)} at RMS {number(first.stream_rms)} and leaves it at "
        f"{number(last.sum_rms)}, x{number(safe_exp(jump))}: {why}.{gradients}",
        severity="note" if normed else None,
        remedy="Give the embedding a standard deviation near that of the updates (about 1, or multiply it by sqrt(width)), or "
        "scale the residual projections of the first block down.",
    )


def _odd_step(curve: Profile, index: int, limit: float) -> tuple[str, float, float] | None:
    """Compare the two steps at a site, into it and over its addition, with those of its siblings.

    Returns the metric, the log step and the log step expected, or ``None`` where both are in line.
    """
    first_unit = len(curve.units[0])
    around = sides(curve, index)
    links = {i: link(curve.sites, i) for side in ([index], *around) for i in side}
    if 0 in around[0]:
        links[0] = 0.0  # nothing lies between the beginning of a stream and its first site
    found = stands_out(index, links, around, limit)
    # Where a norm acts on the stream, the first norm after the embedding does what no later one does: it sets the scale. Where
    # the placement is not known, later steps that are not x1 tell that something acts on the stream. Earlier sites do not tell:
    # a norm that stands behind them in one block alone is what is looked for.
    normed = any(curve.sites[i].placement in NORM_ON_STREAM for i in around[1])
    sets_scale = index <= first_unit and found is not None and (normed or abs(found[1]) > 0.01)
    if found is not None and not sets_scale:
        return ("stream_rms / sum_rms before", *found)
    if index < first_unit:
        return None
    around = sides(curve, index, skip_units=1)
    adds = {i: log_ratio(curve.sites[i].sum_rms, curve.sites[i].stream_rms) for side in ([index], *around) for i in side}
    found = stands_out(index, adds, around, limit)
    return None if found is None else ("sum_rms / stream_rms", *found)


DOMINANT_UPDATE = Rule(
    id="PC204",
    name="dominant-update",
    severity="warning",
    threshold=10.0,
    unit="update_rms / stream_rms",
    sees="An update that dwarfs the stream it is added to.",
    why="The sum then is the update: what earlier blocks wrote is drowned, the identity path carries almost nothing, and a "
    "small change of that branch's parameters changes the whole output.",
    formula="update_ratio > threshold. Sites side by side, or consecutive among their kind, are one finding. Where all of "
    "them lie in the first block and PC205 already says that the first block dwarfs the embedding, PC205 alone reports it; and "
    "PC208 where the stream is so small at all of them that the eps of a norm outweighs it.",
    basis="Updates as large as the stream are normal in the first blocks and in post-norm (a ratio of 1.4 at the first site "
    "without depth scaling, 3.4 with wide gated networks). At 10 the stream makes up 1 % of the mean square of the sum. No "
    "published cut-off was found: the number is this tool's own.",
    source="Liu 2020, arXiv 2004.08249 (heavy dependency on residual branches amplifies parameter changes and makes training "
    "unstable).",
    remedy="Scale the branch's output projection down (1/sqrt(2 x blocks)), or bring the embedding up to the scale of the "
    "updates.",
    check=_dominant_update,
    caused_by=(("PC205", "same"), ("PC206", "touching"), ("PC208", "same")),
)

DISCONTINUITY = Rule(
    id="PC205",
    name="residual-discontinuity",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a step of the stream differs from the same step in the blocks around it",
    sees="A jump of the stream at one addition, or between two, that its neighbours do not have; and a first block that dwarfs "
    "the embedding.",
    why="A single block that doubles, drops or renormalises the stream is nearly always a mistake in that block. A first "
    "block that dwarfs the embedding raises the embedding's gradient by as much or more, which published work ties to loss "
    "spikes.",
    formula="Two steps a site: sum_rms / stream_rms, and stream_rms / sum_rms of the site before. Each is compared with the "
    "median of the three nearest siblings (same kind, same role in the block; of two, the one that differs less) on either "
    "side, and must differ from both by more than the threshold, in the same direction. Where a norm acts on the stream in "
    "all blocks, the first one sets the scale and is not judged so. Before the first addition nothing is judged: a norm there "
    "is one of the embedding. The first block is judged as a whole: its last sum_rms over the first "
    f"stream_rms, more than {FIRST_BLOCK_LIMIT:g}.",
    basis="The steepest healthy step after the first block is sqrt(2), and differs from the next, sqrt(1.5), by a factor of "
    "1.15; a residual that is doubled gives 2 or more. 1.5 lies midway. (One that is missing ends the stream, and is PC206.) "
    "For the first block, embeddings of one "
    f"third of the first updates (GPT-2) gives 2.8; {FIRST_BLOCK_LIMIT:g} is this tool's own, no published cut-off was found.",
    source="Takase 2023, arXiv 2312.16903 (embeddings of std 0.02 invite spikes, of about 1 avoid them); additive law from "
    "Xiong 2020, arXiv 2002.04745, Lemma 2.",
    remedy="Compare the forward code and the init of that block with its neighbours': a residual missing, doubled or taken "
    "after the norm, or an output projection drawn at another scale.",
    check=_discontinuity,
    caused_by=(("PC206", "touching"),),
)

RULES = (DOMINANT_UPDATE, DISCONTINUITY)
