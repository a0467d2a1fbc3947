"""The stream over the depth, and branches that add nothing to it: PC201, PC202, PC203."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.growth import describe, stream_growth
from propcheck.analysis.profile import Compounding, Profile, compounding, log_ratio, median, stream_steps
from propcheck.formatting import count, number, places
from propcheck.rules.held import holding
from propcheck.rules.rule import Hit, Rule, grouped, in_words, place_of, siblings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Growth, Run

# Square-root growth over the judged three quarters, as a factor over the whole depth: 4^(2/3).
_ADDITIVE = 4 ** (2 / 3)


def kept_blocks(curve: Profile, trend: Compounding) -> str:
    """Write ``blocks 17 to 63`` for the blocks that a trend was judged over."""
    return places(curve.noun, [curve.label(j) for j in trend.kept])


def law(growth: Growth | None, verb: str, noun: str) -> str:
    """Say by which law a trend goes, as a sentence; empty where blocks are too few, or where what was fitted is flat."""
    if growth is None or growth.law in (None, "flat"):
        return ""
    return f" It {verb} {describe(growth, noun)}."


def _main_kind(curve: Profile, trend: Compounding) -> str:
    """Name the kind of sublayer whose additions make most of a trend, as a sentence; empty where none does."""
    shares: dict[str, float] = {}
    for j in trend.kept:
        previous = curve.units[j - 1][-1].sum_rms
        for record in curve.units[j]:
            step = log_ratio(record.sum_rms, previous)
            if step is None:
                return ""
            shares[record.sublayer] = shares.get(record.sublayer, 0.0) + step
            previous = record.sum_rms
    total = sum(shares.values())
    if len(shares) < 2 or total == 0:
        return ""
    kind = max(shares, key=lambda name: shares[name] / total)
    return f" Most of it comes at the {kind} additions." if shares[kind] / total > 0.7 else ""


def _explosion(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    steps, units = stream_steps(curve), len(curve.units)
    trend = compounding(steps, units, rising=True)
    if trend is None or not trend.compounded > limit:
        return []
    worst = curve.units[max(trend.kept, key=lambda j: steps[j])][-1]
    healthy = _ADDITIVE ** (1 / units)
    return [
        Hit(
            sites=tuple(record.site for j in trend.kept for record in curve.units[j]),
            place=place_of(worst),
            metric=f"sum_rms factor a {curve.noun}",
            value=trend.factor,
            expected=healthy,
            message=f"The stream grows x{number(trend.factor)} a {curve.noun} over {kept_blocks(curve, trend)}, which "
            f"compounds to x{number(trend.compounded)} over {count(units, curve.noun)}; updates of one size would give about "
            f"x{number(healthy)} a {curve.noun}, x{number(_ADDITIVE)} in all.{law(stream_growth(curve), 'grows', curve.noun)}"
            f"{_main_kind(curve, trend)}",
            severity="error" if trend.compounded > limit**2 else "warning",
        )
    ]


def _collapse(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    # A stream may begin with zeros (queries that are learned at the first additions); what comes after must not be zero.
    begun = next((i for i, record in enumerate(curve.sites) if record.stream_rms != 0 or record.sum_rms != 0), 0)
    zero = [record for record in curve.sites[begun:] if record.sum_rms == 0]
    if zero:
        more = f", and so are {count(len(zero) - 1, 'more sum')}" if len(zero) > 1 else ""
        return [
            Hit(
                sites=tuple(record.site for record in zero),
                place=place_of(zero[0]),
                metric="sum_rms",
                value=0.0,
                expected="above 0",
                message=f"The stream is exactly zero after {in_words(zero[0])}{more}: nothing of the input is left there.",
                severity="error",
            )
        ]
    steps, units = stream_steps(curve), len(curve.units)
    trend = compounding(steps, units, rising=False)
    if trend is None or not trend.compounded < 1 / limit:
        return []
    worst = curve.units[min(trend.kept, key=lambda j: steps[j])][-1]
    return [
        Hit(
            sites=tuple(record.site for j in trend.kept for record in curve.units[j]),
            place=place_of(worst),
            metric=f"sum_rms factor a {curve.noun}",
            value=trend.factor,
            expected=1.0,
            message=f"The stream shrinks x{number(trend.factor)} a {curve.noun} over {kept_blocks(curve, trend)}, which "
            f"compounds to x{number(trend.compounded)} over {count(units, curve.noun)}; additions do not shrink a stream: x1 "
            f"or more is expected.{law(stream_growth(curve), 'goes', curve.noun)}{_main_kind(curve, trend)}",
            severity="error" if trend.compounded < 1 / limit**2 else "warning",
        )
    ]


def _dead_branch(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    flagged = [i for i in range(len(curve.sites)) if _is_dead(curve, run, i, limit)]
    hits = []
    for group in grouped(curve, flagged):
        first = group[0]
        exact = first.update_rms == 0
        weak = f"adds an update of RMS {number(first.update_rms)}, negligible beside its siblings,"
        what = "adds exactly zero" if exact else weak
        gradient = (
            "gets no gradient" if first.param_grad_norm == 0 else f"gets a gradient of {number(first.param_grad_norm)} only"
        )
        more = f" The same holds at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
        lasts = ": the first step of training does not revive it" if exact else ""
        alike = [curve.sites[i].update_rms for side in siblings(curve, curve.sites.index(first)) for i in side]
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(first),
                metric="update_rms",
                value=first.update_rms,
                expected="above 0" if exact and not median(alike) else median(alike),
                message=f"The branch at {in_words(first)} {what} and {gradient} in its own parameters, although the "
                f"gradient of the loss reaches its output{lasts}.{more}",
                severity="error" if exact else "warning",
            )
        )
    return hits


def _is_dead(curve: Profile, run: Run, index: int, limit: float) -> bool:
    record = curve.sites[index]
    arriving = record.grad_update_norm if record.grad_update_norm is not None else record.grad_sum_norm
    if record.update_rms is None or record.param_grad_norm is None or arriving is None or not arriving > 0:
        return False
    if record.update_rms == 0:
        # A mask that was drawn is another one at the next step, and a zero that is trained no zero any more.
        return record.param_grad_norm == 0 and not record.masked and not holding(run, record)
    before, after = siblings(curve, index)
    alike = [curve.sites[i] for i in (*before, *after)]
    update = median([other.update_rms for other in alike])
    gradient = median([other.param_grad_norm for other in alike])
    if update is None or gradient is None:
        return False
    return record.update_rms < limit * update and record.param_grad_norm < limit * gradient


EXPLOSION = Rule(
    id="PC201",
    name="explosion",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor that the average block's growth compounds to over the depth; an error above its square, a warning up to there",
    sees="A stream that every block multiplies, in place of adding to it.",
    why="A factor a block is raised to the power of the depth: 1.1^64 = 446. The last sublayers then work at another scale "
    "than the first, half precision overflows, and networks whose activations grow exponentially with depth fail to start "
    "training.",
    formula="r = geometric mean of sum_rms(block) / sum_rms(block before), over the blocks after the first quarter of the "
    "depth, without the largest tenth of the factors (a jump is PC205). The rule is broken when r^blocks > threshold. A "
    "power law depth^p gives 4^(4p/3) at any depth, so growth like sqrt(depth) gives 2.52 and is never flagged, however "
    "large its end value. The message says whether depth^p or a factor a block fits better, by least squares of the logarithm "
    "over the same blocks.",
    basis="Updates of one size cannot take the stream faster than linearly from the first block on: 6.35. Trained GPT-2 XL "
    "grows x1.045 a layer, 1.045^48 = 8.3, and is healthy. 10 is above both, and 1.1^64 = 446 is far above it. No published "
    "cut-off was found: the number is this tool's own.",
    source="Hanin and Rolnick 2018, arXiv 1803.01719 (activation length that grows with depth, residual networks included); "
    "Xiong 2020, arXiv 2002.04745, Lemma 2 (additive pre-norm growth); Heimersheim and Turner 2023 (trained GPT-2 XL).",
    remedy="Let the branch read the stream through a norm, or scale the branch by 1/sqrt(2 x blocks); look for x = x + x or "
    "a gain above 1 on the residual path.",
    check=_explosion,
)

COLLAPSE = Rule(
    id="PC202",
    name="collapse",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor by which the average block's decay compounds over the depth; an error above its square, a warning up to there",
    sees="A stream that every block shrinks, or that is exactly zero somewhere.",
    why="0.9^64 = 0.0012: what the input put into the stream is gone before the head reads it.",
    formula="r as in PC201, without the smallest tenth of the factors. Broken when r^blocks < 1 / threshold, or when some "
    "sum_rms is exactly 0. A flat stream, as post-norm has, gives 1.",
    basis="An addition of an update that does not cancel the stream never shrinks it, so anything clearly below 1 is "
    "foreign to residual architectures; 10 mirrors PC201. No published cut-off was found: the number is this tool's own.",
    source="Hanin and Rolnick 2018, arXiv 1803.01719 (vanishing activation length keeps networks from starting to train).",
    remedy="Look for a factor below 1 on the residual path (x * a + F), updates that cancel the stream (cosine near -1), "
    "or, for exact zeros, an underflow or a norm that overflowed just before.",
    check=_collapse,
)

DEAD_BRANCH = Rule(
    id="PC203",
    name="dead-branch",
    severity="error",
    threshold=1e-3,
    unit="fraction of the siblings' median below which an update and its parameters' gradient are negligible",
    sees="A branch that adds nothing and whose own parameters get no gradient, although the loss gradient reaches its output.",
    why="It costs time and memory, and a step of training does not bring it to life. A branch that starts at zero but has "
    "a gradient of its own (zero-initialised output projection, ReZero, LayerScale, LoRA) is healthy and is not flagged.",
    formula="update_rms = 0 and param_grad_norm = 0 while grad_update_norm > 0: error, unless a zero that is trained is shared "
    "with other branches or lies outside the blocks (one gate for all of them): it may be what holds the gradient back until "
    "the first step. Or update_rms and param_grad_norm both below threshold x the median of the sites of the same kind: "
    "warning.",
    basis="Exact zeros need no threshold. For the rest a thousandth is far outside the spread of like branches at "
    "initialisation; the number is this tool's own.",
    source="De and Smith 2020, arXiv 2002.10444, and Bachlechner 2020, arXiv 2003.04887 (branches that start at zero train, "
    "because their own scale has a gradient).",
    remedy="Start only one factor of the branch at zero, not two in a row; check for a detach, a no_grad or a mask on the way.",
    check=_dead_branch,
)

RULES = (EXPLOSION, COLLAPSE, DEAD_BRANCH)
