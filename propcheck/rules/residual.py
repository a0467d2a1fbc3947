"""Additions that do not add: PC206."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern
from propcheck.analysis.profile import NORM_ON_STREAM, additions, log_ratio, median, safe_exp, streams
from propcheck.formatting import count, number, percent, places
from propcheck.records import Place
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Doubling, ParameterRecord, Run, SiteRecord

# Blocks on each side that a block is compared with.
_AROUND = 3
# Of the blocks, at most this share may miss an addition (one always may): where more do, it is how the model is made.
_MOST_MISSING = 1 / 8
# What takes one another's place in hybrid models: blocks that differ in this alone are alike.
_FAMILIES = {"attention": "mixer", "linear_attention": "mixer", "ssm": "mixer", "mlp": "mlp", "moe": "mlp"}
# Unit roundoff: half the distance from 1 to the next number.
_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
# A sum that is fused with a product (x + A B) adds up in another order than the product alone, which is what it is compared
# with: of the update, what fp32 accumulation can make of that.
_ACCUMULATION = 1e-5


def _broken(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    return [*_missing(curve, run), *_doubled(curve, run), *_not_the_sum(curve, limit)]


# ---------------------------------------------------------------------- missing


def _missing(curve: Profile, run: Run) -> list[Hit]:
    """Find blocks that lack an addition which the blocks around them have, and whose stream does not go on."""
    numbers = {record.block for record in curve.sites if record.block is not None}
    told = any(record.continues is not None for record in curve.sites)
    if not numbers or not told or run.unobserved:
        return []  # where something could not be followed, an addition may have been overlooked
    # A block that has no addition at all is known by its number only.
    own: dict[int, list[SiteRecord]] = {number: [] for number in range(max(run.model.blocks, max(numbers) + 1))}
    for record in curve.sites:
        if record.block is not None:
            own[record.block].append(record)
    hits = [hit for block in own if (hit := _missing_in(block, own, curve, run)) is not None]
    return hits if len(hits) <= max(1, len(own) * _MOST_MISSING) else []


def _missing_in(block: int, own: Mapping[int, Sequence[SiteRecord]], curve: Profile, run: Run) -> Hit | None:
    kinds = {number: _kinds(own[number]) for number in own if 0 < abs(number - block) <= _AROUND}
    if not kinds:
        return None
    usual, votes = Counter(kinds.values()).most_common(1)[0]
    alike = [number for number in kinds if kinds[number] == usual]
    here = _kinds(own[block])
    lacking = _without(usual, here)
    if votes < 2 or votes < len(kinds) * 2 / 3 or not lacking or any(usual[role] not in _FAMILIES.values() for role in lacking):
        return None
    told = any(p.site is not None for p in run.parameters)
    before = [number for number in alike if number < block]
    after = [number for number in alike if number > block]
    missed = [[own[number][role] for number in alike] for role in lacking]
    bypassed = _bypass(block, [record for role in missed for record in role], run.parameters)
    if told and not bypassed:
        return None  # there is no such sublayer, or it is in a branch
    if before and after:
        begun = _restart(block, own, curve)
        if begun is None:
            return None
        ended = curve.sites[curve.sites.index(begun) - 1]
        sites = (begun.site,)
        stream = (
            f"the stream before it ends at RMS {number(ended.sum_rms)}, and another one begins before {site_label(begun)} at "
            f"RMS {number(begun.stream_rms)}: it is replaced there, not added to"
        )
    else:
        if not bypassed:
            return None  # at an end of the stack no restart shows it
        sites = ((*own[block], curve.sites[0 if after else -1])[0].site,)
        stream = "its parameters are used and get a gradient, but are in no branch: what it computes is not added to the stream"
    names = " and ".join(" or ".join(dict.fromkeys(record.sublayer for record in role)) for role in missed)
    has = f"only {' and '.join(record.sublayer for record in own[block])}" if own[block] else "nothing"
    beside = [*before[-1:], *after[:1]]
    return Hit(
        sites=sites,
        place=Place(block=block, sublayer=missed[0][0].sublayer),
        metric="additions",
        value=float(len(here)),
        expected=float(len(usual)),
        message=f"The residual of the {names} of block {block} is missing: "
        f"{'blocks' if len(beside) > 1 else 'block'} {' and '.join(map(str, beside))} {'add' if len(beside) > 1 else 'adds'} "
        f"{' and '.join(record.sublayer for record in own[beside[0]])}, block {block} {has}; {stream}.",
        remedy="Write x = x + F(x) there, as in the blocks beside it.",
    )


def _kinds(records: Sequence[SiteRecord]) -> tuple[str, ...]:
    return tuple(_FAMILIES.get(record.sublayer, record.sublayer) for record in records)


def _without(usual: Sequence[str], here: Sequence[str]) -> list[int]:
    """Give the positions in ``usual`` that ``here`` leaves out; none where it is no part of it, in order."""
    left_out, rest = [], list(here)
    for role, kind in enumerate(usual):
        if rest and rest[0] == kind:
            rest.pop(0)
        else:
            left_out.append(role)
    return [] if rest else left_out


def _restart(block: int, own: Mapping[int, Sequence[SiteRecord]], curve: Profile) -> SiteRecord | None:
    """Find the site, in a block or the first behind it, where a new stream of the same width begins."""
    later = next((own[number] for number in range(block + 1, max(own) + 1) if own[number]), ())
    begun = next((record for record in (*own[block], *later[:1]) if record.continues is None), None)
    index = None if begun is None else curve.sites.index(begun)
    if begun is None or not index or curve.sites[index - 1].block not in (block - 1, block):
        return None
    widths = [_width(record) for record in (begun, curve.sites[index - 1])]
    if widths[0] is None or widths[1] is None or abs(widths[0] - widths[1]) > 0.01 * widths[0]:
        return None  # a stage of another width begins: no addition is possible
    return begun


def _width(record: SiteRecord) -> float | None:
    root = log_ratio(record.stream_norm, record.stream_rms)
    return None if root is None else safe_exp(2 * root)


def _bypass(block: int, missed: Sequence[SiteRecord], parameters: Sequence[ParameterRecord]) -> bool:
    """Whether the matrices that are in the missed branches elsewhere are used in this block, but in no branch."""
    branches = {record.site for record in missed}
    names = {pattern(path(p)) for p in parameters if p.site in branches and p.role in ("linear", "convolution")}
    own = [p for p in parameters if p.block == block and pattern(path(p)) in names]
    return bool(own) and all(p.site is None and p.used and (p.grad_state == "norm" or not p.requires_grad) for p in own)


# ---------------------------------------------------------------------- doubled


def _doubled(curve: Profile, run: Run) -> list[Hit]:
    alike: dict[str, list[Doubling]] = {}
    records = {record.site: record for record in curve.sites}
    single = len(streams(run)) == 1  # else the next site may be one of another stream
    for one in run.doublings:
        if not (single and _is_halved(one, records)):
            alike.setdefault(pattern(one.module or ""), []).append(one)
    return [_doubling(curve, members) for members in alike.values()]


def _doubling(curve: Profile, members: Sequence[Doubling]) -> Hit:
    records = {record.site: record for record in curve.sites}
    first, after = members[0], [records[one.site] for one in members if one.site in records]
    before = {one.site: records[one.continues] for one in after if one.continues in records}
    # A norm on the stream hides the factor.
    bare = [one for one in after if one.site in before and before[one.site].placement not in NORM_ON_STREAM]
    ratio = median([log_ratio(one.stream_rms, before[one.site].sum_rms) for one in bare])
    factor = 2.0 if ratio is None else safe_exp(ratio)
    # It lies between two sites; behind the last addition there is none that goes on from it.
    sites = tuple(sorted({one.site for one in (*after, *before.values())} or {one.site for one in curve.sites[-1:]}))
    blocks = [one.block for one in members if one.block is not None]
    name = pattern(first.module or "") if len(members) > 1 else first.module
    where = f" in {name}" if name else ""
    where += f" ({places('block', blocks)})" if blocks else ""
    where += f", before {site_label(after[0])}" if len(members) == len(after) == 1 else ""
    # x + (x + F) lies at the addition of F, in the same block; x + x lies at none, and a norm hides which of them it is.
    pairs = [(before[one.site], one) for one in bare]
    inner = next((b for b, a in pairs if a.site == first.site and b.block == first.block and not _is_twice(b, a)), None)
    meant = len(bare) == len(members) > 1 and _at_each(curve, pairs)
    amount = f" at {len(members)} additions" if len(members) > 1 else ""
    each = f" each time, x{number(factor ** len(members))} in all" if len(members) > 1 and ratio is not None else ""
    grows = (
        f"It comes out x{number(factor)}{each}, where a residual keeps x1."
        if bare or not before
        else "The norm behind it hides the factor."
    )
    return Hit(
        sites=sites,
        severity="warning" if meant else None,
        place=Place(
            site=None if inner is None else inner.site,
            block=first.block,
            sublayer=None if inner is None else inner.sublayer,
            module=first.module,
        ),
        metric="stream_rms / sum_rms before" if ratio is not None else "times that the stream is in the sum",
        value=factor,
        expected=1.0,
        message=f"The stream is added to itself{amount}{where}: x + x, or x + (x + F), counts it twice. {grows}"
        f"{' It is so behind every update of its kind, and may be meant.' if meant else ''}",
        remedy="Add what the sublayer computed, not the stream (x = x + F(x)); where the sublayer adds the stream itself, do "
        "not add it again around it.",
    )


def _at_each(curve: Profile, pairs: Sequence[tuple[SiteRecord, SiteRecord]]) -> bool:
    """Whether the stream is doubled behind every update of one kind, x + (x + F): then that is how the model is made.

    ``pairs`` are the sites before and after.
    """
    if any(_is_twice(before, after) for before, after in pairs):
        return False
    kinds = {(pattern(before.module or ""), before.sublayer) for before, _ in pairs}
    alike = {record.site for record in curve.sites if (pattern(record.module or ""), record.sublayer) in kinds}
    return alike == {before.site for before, _ in pairs}


def _is_halved(doubling: Doubling, records: Mapping[int, SiteRecord]) -> bool:
    """Whether the stream behind a doubling is no larger than before it, as in (x + x) / 2: then nothing is counted twice."""
    after = records.get(-1 if doubling.site is None else doubling.site)
    before = None if after is None else records.get(-1 if after.continues is None else after.continues)
    if after is None or before is None or before.placement in NORM_ON_STREAM:
        return False
    ratio = log_ratio(after.stream_rms, before.sum_rms)
    return ratio is not None and ratio < 1e-6  # fp32's digits


def _is_twice(before: SiteRecord, after: SiteRecord) -> bool:
    """Whether nothing tells a sum from x + x, which leaves an update out: its result is 2 x to the last digit."""
    ratio = log_ratio(after.stream_rms, before.sum_rms)
    return ratio is None or math.isclose(ratio, math.log(2), rel_tol=1e-9)


# ---------------------------------------------------------------------- not the sum of its operands


def _not_the_sum(curve: Profile, limit: float) -> list[Hit]:
    errors = {record.site: found for rows in additions(curve.sites) if (found := _error(rows)) is not None for record in rows}
    excess = {site: error / bound for site, (error, bound) in errors.items()}
    flagged = [index for index, record in enumerate(curve.sites) if excess.get(record.site, 0.0) > limit]
    hits = []
    for group in grouped(curve, flagged):
        worst = max(group, key=lambda record: excess[record.site])
        error, bound = errors[worst.site]
        more = f" It is so at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric="add_error",
                value=worst.add_error,
                expected=None if worst.add_error is None else worst.add_error * bound / error,
                message=f"The sum at {site_label(worst)} is not stream + update: it is off by RMS {number(error)}, "
                f"{percent(worst.add_error or 0.0)} of the update, where rounding of {worst.stream_dtype} and "
                f"{worst.update_dtype} explains at most {number(bound)}.{more}",
                remedy="Look for an operand that is changed in place before the sum is formed, for memory that overlaps "
                "(expand, then add_), or for a kernel that is wrong on this device.",
            )
        )
    return hits


def _error(rows: Sequence[SiteRecord]) -> tuple[float, float] | None:
    """Give the RMS error of one addition and the largest that rounding can make, or None where either is not known."""
    record, updates = rows[0], [one.update_rms for one in rows]
    roundoffs = [_ROUNDOFF.get(dtype or "") for one in rows for dtype in (one.stream_dtype, one.update_dtype)]
    values = (record.add_error, record.stream_rms, record.sum_rms, *updates)
    if record.nonfinite or any(value is None or not math.isfinite(value) for value in values) or None in roundoffs:
        return None
    known = [update for update in updates if update is not None]
    # add_error is relative to the sum of the updates, whose RMS is at least this, however they lie to each other.
    joint = max(0.0, 2 * max(known) - sum(known))
    error = (record.add_error or 0.0) * joint
    # One rounding of the sum, and one of each partial sum before it or of a product with alpha: none is larger than its terms.
    terms = (record.stream_rms or 0.0) + sum(known)
    roundings = max(1, len(known) - 1)
    unit = max(roundoff for roundoff in roundoffs if roundoff is not None)
    bound = unit * ((record.sum_rms or 0.0) + roundings * terms) + _ACCUMULATION * sum(known)
    return (error, bound) if bound > 2.0**-126 else None  # fp32's least normal number: below it digits are lost


BROKEN_RESIDUAL = Rule(
    scope="run",
    id="PC206",
    name="broken-residual",
    severity="error",
    threshold=4.0,
    least=1.0,
    unit="factor on the largest error that rounding can make of a sum; missing and doubled residuals need none",
    sees="A residual that is missing in one block, a stream that is added to itself, and a sum that is not stream + update.",
    why="The model does not compute what it says. A missing residual cuts the stream: what earlier blocks wrote goes on only "
    "through that sublayer. x + x in place of x + F multiplies the stream by 2 a block, 2^16 = 65536 over 16 blocks, and "
    "leaves the sublayer out of the model.",
    formula="Missing: a block lacks an addition that the three blocks on each side have (two thirds of them or more, mixers of "
    "different kinds alike), a new stream of the same width begins there (but for the first and the last block, where none "
    "can), and the matrices of that sublayer are used and in no branch. Not judged where more than an eighth of the blocks "
    "would be so (and more than one), where a place could not be observed (PC503), nor of convolutions and other kinds, whose "
    "stages do so by design. Doubled: both operands of an addition carry the stream, x + x or x + (x + F), "
    "and it is larger behind it (where no norm hides that); a warning only where x + (x + F) stands behind every update of its "
    "kind. Not the sum: add_error x update_rms > threshold x u (sum_rms + "
    "n (stream_rms + update_rms)), with u the unit roundoff of the coarser operand (bf16 2^-8, fp16 2^-11, fp32 2^-24), "
    "update_rms summed over the n + 1 updates of a parallel block (n = 1 where there is one), plus 1e-5 of the update.",
    basis="x + (x + F) at every place of a kind is how BLT is made (the cross-attention of each decoder layer), which trains; "
    "where it compounds, PC201 tells. A sum that is rounded once is off by at most u times itself, in RMS too, and each "
    "partial sum or product before it adds at most u times its terms. 1e-5 is for sums fused with a product, which add up in "
    "another order. 4 leaves room for kernels that reduce in half precision; a wrong sum is off by the order of the stream or "
    "the update. The number is this tool's own.",
    source="He 2015, arXiv 1512.03385 (what a residual is); Higham 2002, Accuracy and Stability of Numerical Algorithms, "
    "section 2.2 (rounding of a sum); kyegomez/BitNet issue 32 (x = x + x).",
    remedy="Compare the forward code of that block with its neighbours'.",
    check=_broken,
)

RULES = (BROKEN_RESIDUAL,)
