"""Dtypes that are not what was meant, and numbers at the ends of their range: PC211, PC212."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import count, number, percent
from propcheck.records import Place
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, Run, SiteRecord

# Largest finite number and smallest normal one, as torch.finfo gives them.
LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": (2 - 2**-52) * 2.0**1023,
}
SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_HALF = frozenset({"float16", "bfloat16"})
# A norm divides by the root of a mean square that is far above eps, so that its output has the RMS of its gain.
_ABOVE_EPS = 100.0


def _dtype_drift(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    return [*_promoted_stream(curve, run), *_coarse_tables(run, limit), *_coarse_angles(run, limit)]


def _promoted_stream(curve: Profile, run: Run) -> list[Hit]:
    """Find where the stream becomes wider though no cast says so: before an addition, or by it."""
    meant = _parameter_dtype(run)
    if meant is None:
        return []
    sums = {record.site: _sum_dtype(record) for record in curve.sites}
    found: list[tuple[SiteRecord, str, str, str]] = []  # the site, the dtype before and after, and why
    for record in curve.sites:
        before = meant if record.continues is None else sums.get(record.continues) or meant
        stream, after = record.stream_dtype or "", sums[record.site] or ""
        # Under autocast the parameters are wide, and so may the stream be.
        if record.promoted is not None and _is_wider(stream, meant):
            found.append((record, before, stream, f"no cast widened it, but {record.promoted}"))
        elif stream == meant and _is_wider(after, meant):
            found.append((record, stream, after, f"the update that is added there is {record.update_dtype}"))
    if not found:
        return []
    first, before, after, why = found[0]
    behind = [record for record in curve.sites if record.site > first.site]
    carrying = [record for record in behind if record.stream_dtype == after]
    again = f" It happens again at {count(len(found) - 1, 'later site')}." if len(found) > 1 else ""
    return [
        Hit(
            sites=tuple(sorted({*(record.site for record, *_ in found), *(record.site for record in carrying)})),
            place=place_of(first),
            metric="stream_dtype",
            value=after,
            expected=before,
            message=f"The stream turns from {before} into {after} at {site_label(first)}: {why}. Of the "
            f"{count(len(behind), 'site')} behind it {len(carrying)} found it in {after}.{again}",
            remedy="Cast the factor or the update to the stream's dtype; if the wider stream is meant, cast the stream where "
            "it begins, so that the code says it.",
        )
    ]


def _is_wider(dtype: str, than: str) -> bool:
    return _WIDTH.get(dtype, 0) > _WIDTH[than]


def _sum_dtype(record: SiteRecord) -> str | None:
    """Give the dtype of a sum, as torch promotes its operands; None where it is not known."""
    stream, update = record.stream_dtype, record.update_dtype
    if stream not in _WIDTH or update not in _WIDTH:
        return None
    if stream != update and _WIDTH[stream] == _WIDTH[update]:
        return "float32"  # bf16 + fp16
    return max(stream, update, key=lambda dtype: _WIDTH[dtype])


def _parameter_dtype(run: Run) -> str | None:
    """Give the dtype of most of the model's parameters."""
    amounts: dict[str, int] = {}
    for record in run.parameters:
        if record.kind == "parameter" and record.dtype in _WIDTH:
            amounts[record.dtype] = amounts.get(record.dtype, 0) + record.numel
    return max(amounts, key=lambda dtype: amounts[dtype]) if amounts else None


def _coarse_tables(run: Run, limit: float) -> list[Hit]:
    bad = [p for p in run.parameters if p.kind == "buffer" and p.dtype in _HALF and (p.fp64_error or 0.0) > limit]
    if not bad:
        return []
    worst = max(bad, key=lambda p: p.fp64_error or 0.0)
    error = worst.fp64_error or 0.0
    (first, *more) = folded(sorted(bad, key=lambda p: -(p.fp64_error or 0.0)))
    others = f" So {verb(more[0], 'is', 'are')} {count(sum(map(len, more)), 'more buffer')}." if more else ""
    return [
        Hit(
            sites=(),
            place=place(worst),
            metric="fp64_error",
            value=error,
            expected=f"at most {number(limit)}",
            message=f"{subject(first)} {verb(first, 'was', 'were')} computed in half precision ({worst.init_calls}): beside "
            f"the same calls in fp64 {verb(first, 'it is', 'they are')} off by up to {number(error)} of the largest number, "
            f"beyond what one rounding to {worst.dtype} explains.{others}",
            remedy="Compute the table in fp32 (positions, frequencies, sine and cosine), and round at the end if at all; keep "
            "`model.to(dtype)` and the default dtype off what it is computed from.",
        )
    ]


def _coarse_angles(run: Run, limit: float) -> list[Hit]:
    bad = [angle for angle in run.angles if angle.error > limit]
    if not bad:
        return []
    worst = max(bad, key=lambda angle: angle.error)
    what = worst.parameter or "what the forward pass computed"
    where = f" in {worst.module}" if worst.module else ""
    more = f" So it is at {count(len(bad) - 1, 'more place')}." if len(bad) > 1 else ""
    return [
        Hit(
            sites=(),
            place=Place(block=worst.block, module=worst.module, parameter=worst.parameter),
            metric="angle error",
            value=worst.error,
            expected=f"at most {number(limit)} radians",
            message=f"Sines or cosines{where} are taken of angles up to {number(worst.largest)} radians that are known to "
            f"{number(worst.error)} only: {what} is {worst.dtype}.{more}",
            remedy="Compute positions times frequencies in fp32, frequencies included, and round the sine and cosine.",
        )
    ]


def _activation_range(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    return [*_overflowing_norms(curve, run), *_near_the_largest(curve, limit), *_below_normal(curve)]


def _near_the_largest(curve: Profile, limit: float) -> list[Hit]:
    shares = {record.site: share for record in curve.sites if (share := _share_of_range(record)) is not None}
    near = [record for record in curve.sites if shares.get(record.site, 0.0) > limit]
    if not near:
        return []
    worst = max(near, key=lambda record: shares[record.site])
    dtype = _sum_dtype(worst) or ""
    first = f", from {site_label(near[0])} on" if near[0].site != worst.site else ""
    more = f" {count(len(near), 'sum')} {'is' if len(near) == 1 else 'are'} that large{first}." if len(near) > 1 else ""
    return [
        Hit(
            sites=tuple(record.site for record in near),
            place=place_of(worst),
            metric="sum_absmax",
            value=worst.sum_absmax,
            expected=f"at most {number(limit * LARGEST[dtype])}",
            message=f"The largest element of the sum at {site_label(worst)} is {number(worst.sum_absmax)}, "
            f"{percent(shares[worst.site])} of the largest {dtype} number, {number(LARGEST[dtype])}: growth by "
            f"x{number(1 / shares[worst.site])} makes it infinite.{more}",
        )
    ]


def _share_of_range(record: SiteRecord) -> float | None:
    dtype = _sum_dtype(record)
    if dtype is None or record.sum_absmax is None or not math.isfinite(record.sum_absmax):
        return None  # what is infinite already is PC209's
    return record.sum_absmax / LARGEST[dtype]


def _overflowing_norms(curve: Profile, run: Run) -> list[Hit]:
    seed = curve.sites[0].seed if curve.sites else run.seeds[0]
    bad = [norm for norm in run.norms if norm.seed == seed and _overflows(norm)]
    if not bad:
        return []
    first = bad[0]
    bound = math.sqrt(LARGEST[first.dtype])
    name = first.module or first.parameter or f"norm {first.norm}"
    lost = (
        f"{percent(first.zero_share)} of its vectors come out as zero"
        if first.zero_share
        else f"its output has RMS {number(first.output_rms)} where its gain alone gives {number(_gain(first))}"
    )
    more = f" So it is at {count(len(bad) - 1, 'more norm')}." if len(bad) > 1 else ""
    sites = tuple(sorted({norm.site for norm in bad if norm.site is not None}))
    return [
        Hit(
            sites=sites,
            place=Place(site=first.site, block=first.block, module=first.module, parameter=first.parameter),
            metric="zero_share" if first.zero_share else "output_rms",
            value=first.zero_share or first.output_rms,
            expected=0.0 if first.zero_share else _gain(first),
            message=f"The norm {name} squares its input in {first.dtype}, where everything above {number(bound)} has an "
            f"infinite square; its input reaches {number(first.input_absmax)} (RMS {number(first.input_rms)}), and {lost}: "
            f"divided by infinity, and finite everywhere.{more}",
            severity="error",
            remedy="Compute the statistic in fp32 (x.float().pow(2).mean(-1)) and cast the normalised result back.",
        )
    ]


def _overflows(norm: NormRecord) -> bool:
    """Whether a norm gave nothing for vectors that are not zero, and its squares can be the reason."""
    if norm.dtype not in LARGEST or norm.input_absmax is None or norm.gain == 0:
        return False
    # The distance to a mean may be twice the largest element.
    reach = norm.input_absmax * (2 if norm.kind == "variance" else 1)
    if not reach > math.sqrt(LARGEST[norm.dtype]):
        return False
    if norm.zero_share:
        return True
    if norm.kind != "mean_square" or norm.input_rms is None or norm.output_rms is None:
        return False  # a constant vector has no variance; a length is a root of what is rounded only afterwards
    return norm.input_rms**2 > _ABOVE_EPS * (norm.eps or 0.0) and norm.output_rms < _gain(norm) / 2


def _gain(norm: NormRecord) -> float:
    return 1.0 if norm.gain is None else norm.gain


def _below_normal(curve: Profile) -> list[Hit]:
    values: dict[int, tuple[SiteRecord, str, float, str]] = {}
    for record in curve.sites:
        for what, rms, dtype in (
            ("stream", record.stream_rms, record.stream_dtype),
            ("update", record.update_rms, record.update_dtype),
        ):
            if rms is not None and 0 < rms < SMALLEST_NORMAL.get(dtype or "", 0.0):
                values.setdefault(record.site, (record, what, rms, dtype or ""))
    if not values:
        return []
    record, what, rms, dtype = min(values.values(), key=lambda one: one[2])
    more = f" So it is at {count(len(values) - 1, 'more site')}." if len(values) > 1 else ""
    return [
        Hit(
            sites=tuple(values),
            place=place_of(record),
            metric=f"{what}_rms",
            value=rms,
            expected=f"at least {number(SMALLEST_NORMAL[dtype])}",
            message=f"The {what} at {site_label(record)} has RMS {number(rms)}, below the smallest normal {dtype} number, "
            f"{number(SMALLEST_NORMAL[dtype])}: the smaller an element is, the fewer bits it keeps, down to none.{more}",
            severity="note",
            remedy="Use bf16 or fp32 for what is this small, or scale it up (a residual scale can be kept in fp32).",
        )
    ]


DTYPE_DRIFT = Rule(
    scope="run",
    id="PC211",
    name="dtype-drift",
    severity="warning",
    threshold=0.1,
    unit="error of a half-precision table, relative to its largest number, and of an angle, in radians; a widened stream has "
    "none",
    sees="Numbers in another dtype than was meant: a stream that turns wider though nothing cast it, tables that were "
    "computed in half precision, and sines and cosines of angles that half precision left too coarse.",
    why="A stream that a single fp32 factor promotes costs twice the memory and bandwidth from there on, runs everything "
    "that reads it in another precision than planned, and hides what bf16 would have done. Half precision has 8 or 11 bits: "
    "above 256 (bf16) or 2048 (fp16) not every position is a number of its own, and a rotation by a position that is off by "
    "radians is a random one.",
    formula="One finding for each kind. (1) promoted is not null at a site: a function on the stream, and not a cast, made "
    "it wider since the sum before; or the addition itself does: the stream has the dtype of most parameters and the update "
    "a wider one. A stream that is wide from its beginning, or by a cast, or under autocast, is silent. (2) fp64_error > "
    "threshold: a bf16 or fp16 buffer differs from what its recorded calls give in fp64 by more than one rounding to its own "
    "dtype explains, in units of its largest number. (3) the error that rounding may have left in the angles of a sine or "
    "cosine > threshold radians.",
    basis="An angle that is off by e moves sine and cosine by up to e, and they are at most 1, so one number serves for "
    "both: 0.1 is a tenth of a radian, 6 degrees, or a tenth of the largest cosine, 26 times the rounding of bf16 (1/256). "
    "It is this tool's own. Computed in bf16, tables of 2048 positions are off by 2, the whole range; frequencies alone by "
    "up to 0.04 of themselves and 0.003 of the largest, which only their angles show.",
    source="EleutherAI/gpt-neox issue 1003 (rotary tables in half precision); autoresearch-mlx issue 3 (an fp32 scalar "
    "promotes a bf16 stream from block 0 on).",
    remedy="Say every change of dtype with a cast; compute tables and angles in fp32.",
    check=_dtype_drift,
)

ACTIVATION_RANGE = Rule(
    scope="run",
    id="PC212",
    name="activation-range",
    severity="warning",
    threshold=1 / 16,
    unit="share of the largest finite number of the sum's dtype; the other two ends have none",
    sees="Numbers near the ends of what their dtype can hold: sums near its largest number, norms whose squares lie beyond "
    "it, and streams or updates below its smallest normal number. In practice that is fp16.",
    why="fp16 ends at 65504, and a square does so from 256 on. A norm whose mean square overflowed divides by infinity: its "
    "output is zero, finite everywhere, and the sublayer reads nothing. Streams grow in training, so that one near the limit "
    "at the start passes it. Below 6.1e-5 fp16 numbers lose one bit with each halving.",
    formula="sum_absmax / largest number of the sum's dtype > threshold: warning. A norm with zero_share > 0 (vectors that "
    "are not zero and come out as zero), or with an output RMS below half its gain while its mean square is above 100 eps, "
    "whose gain is not zero and whose input reaches above the root of the largest number of the dtype that it computes in "
    "(above half of it where it takes the mean off): error. stream_rms or update_rms above 0 and below the smallest normal "
    "number of its dtype: note.",
    basis="1/16 leaves a factor of 16 for training and is this tool's own; no published cut-off was found. It is no error "
    "however near the limit: nothing is lost until the sum is infinite, which is PC209. The bound on squares is arithmetic: "
    "256^2 = 65536 > 65504. So is the smallest normal number, 2^-14.",
    source="Peri-LN, arXiv 2502.02732 (pre-norm streams pass the range of fp16 early in training); pytorch/pytorch issue "
    "133085 (an fp16 RMSNorm without upcast: input of std 300, output exactly 0); IEEE 754.",
    remedy="Use bf16 or fp32 for the stream, or make the updates smaller (depth scaling, a norm on the update).",
    check=_activation_range,
    seeds="any",
)

RULES = (DTYPE_DRIFT, ACTIVATION_RANGE)
