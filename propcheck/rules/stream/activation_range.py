"""PC212: numbers near the ends of the range of their dtype."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number, percent
from propcheck.records import Place
from propcheck.rules.dtypes import LARGEST, SMALLEST_NORMAL, sum_dtype
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, Run, SiteRecord

# A norm divides by the root of a mean square far above eps, so its output has the RMS of its gain.
_ABOVE_EPS = 100.0

RULE = Rule(
    scope="run",
    id="PC212",
    name="activation-range",
    severity="warning",
    threshold=1 / 16,
    unit="share of the largest finite number of the sum's dtype; the other two checks have no threshold",
    sees="Numbers near the ends of their dtype's range: sums near its largest number, norms whose squares exceed it, and "
    "streams or updates below its smallest normal number. In practice that dtype is fp16.",
    why="fp16 ends at 65504, and squares exceed that from 256 on. A norm whose mean square overflowed divides by infinity: its "
    "output is zero, finite everywhere, and the sublayer reads nothing. Streams grow in training, so one that starts near the "
    "limit passes it. Below 6.1e-5 fp16 numbers lose one bit with each halving.",
    formula="Warning: sum_absmax / largest number of the sum's dtype > threshold.\n\n"
    "Error: a norm with zero_share > 0 (non-zero vectors that come out as zero), or with an output RMS below half its "
    "gain while its mean square is above 100 eps. Its gain must not be zero, and its input must exceed the root of the "
    "largest number of the dtype that it computes in (half of that if it subtracts the mean).\n\n"
    "Note: stream_rms or update_rms is above 0 and below the smallest normal number of its dtype.",
    basis="1/16 leaves a factor of 16 for training and is this tool's own; no published cut-off was found. However near the "
    "limit, it is no error: nothing is lost until the sum is infinite, which is PC209. The bound on squares is arithmetic: "
    "256^2 = 65536 > 65504. So is the smallest normal number, 2^-14.",
    source="Peri-LN, arXiv 2502.02732 (pre-norm streams pass the range of fp16 early in training); pytorch/pytorch issue "
    "133085 (an fp16 RMSNorm without upcast: input of std 300, output exactly 0); IEEE 754.",
    remedy="Use bf16 or fp32 for the stream, or make the updates smaller (depth scaling, a norm on the update).",
    example=Example(
        broken="x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)  # fp16: 256^2 is infinite",
        repaired="h = x.float()\n(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)",
    ),
    seeds="any",
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Look for overflowing norms, sums near the largest number, and values below the smallest normal number."""
    return [*_overflowing_norms(profile, run), *_near_the_largest(profile, threshold), *_below_normal(profile)]


def _near_the_largest(profile: Profile, threshold: float) -> list[Hit]:
    shares = {site.site: share for site in profile.sites if (share := _share_of_range(site)) is not None}
    near = [site for site in profile.sites if shares.get(site.site, 0.0) > threshold]
    if not near:
        return []
    worst = max(near, key=lambda site: shares[site.site])
    dtype = sum_dtype(worst) or ""
    first = f", from {site_label(near[0])} on" if near[0].site != worst.site else ""
    more = f" {count(len(near), 'sum')} are above {percent(threshold)}{first}." if len(near) > 1 else ""
    return [
        Hit(
            sites=tuple(site.site for site in near),
            place=place_of(worst),
            metric="sum_absmax",
            value=worst.sum_absmax,
            expected=f"at most {number(threshold * LARGEST[dtype])}",
            message=f"The largest element of the sum at {site_label(worst)} is {number(worst.sum_absmax)}, "
            f"{percent(shares[worst.site])} of the largest {dtype} number, {number(LARGEST[dtype])}. Growth by "
            f"x{number(1 / shares[worst.site])} makes it infinite.{more}",
        )
    ]


def _share_of_range(site: SiteRecord) -> float | None:
    dtype = sum_dtype(site)
    if dtype is None or site.sum_absmax is None or not math.isfinite(site.sum_absmax):
        return None  # an infinite value is PC209's
    return site.sum_absmax / LARGEST[dtype]


def _overflowing_norms(profile: Profile, run: Run) -> list[Hit]:
    seed = profile.sites[0].seed if profile.sites else run.seeds[0]
    overflowing = [norm for norm in run.norms if norm.seed == seed and _overflows(norm)]
    if not overflowing:
        return []
    first = overflowing[0]
    bound = math.sqrt(LARGEST[first.dtype])
    name = first.module or first.parameter or f"norm {first.norm}"
    loss = (
        f"{percent(first.zero_share)} of its vectors come out as zero"
        if first.zero_share
        else f"its output has RMS {number(first.output_rms)} where its gain alone gives {number(_gain(first))}"
    )
    more = f" The same holds at {count(len(overflowing) - 1, 'more norm')}." if len(overflowing) > 1 else ""
    return [
        Hit(
            sites=tuple(sorted({norm.site for norm in overflowing if norm.site is not None})),
            place=Place(site=first.site, block=first.block, module=first.module, parameter=first.parameter),
            metric="zero_share" if first.zero_share else "output_rms",
            value=first.zero_share or first.output_rms,
            expected=0.0 if first.zero_share else _gain(first),
            message=f"The norm {name} squares its input in {first.dtype}, where everything above {number(bound)} has an "
            f"infinite square. Its input reaches {number(first.input_absmax)} (RMS {number(first.input_rms)}), and {loss}: it "
            f"divides by infinity, but every number stays finite.{more}",
            severity="error",
            remedy="Compute the statistic in fp32 (x.float().pow(2).mean(-1)) and cast the normalised result back.",
        )
    ]


def _overflows(norm: NormRecord) -> bool:
    """Whether a norm's output is nothing for non-zero vectors, and an overflow of its squares can be the reason."""
    if norm.dtype not in LARGEST or norm.input_absmax is None or norm.gain == 0:
        return False
    # The distance to a mean may be twice the largest element.
    reach = norm.input_absmax * (2 if norm.kind == "variance" else 1)
    if not reach > math.sqrt(LARGEST[norm.dtype]):
        return False
    if norm.zero_share:
        return True
    if norm.kind != "mean_square" or norm.input_rms is None or norm.output_rms is None:
        return False  # a constant vector has no variance; a length is a root that is rounded only afterwards
    return norm.input_rms**2 > _ABOVE_EPS * (norm.eps or 0.0) and norm.output_rms < _gain(norm) / 2


def _gain(norm: NormRecord) -> float:
    return 1.0 if norm.gain is None else norm.gain


def _below_normal(profile: Profile) -> list[Hit]:
    tiny: dict[int, tuple[SiteRecord, str, float, str]] = {}  # by site: its record, stream or update, the RMS and the dtype
    for site in profile.sites:
        for operand, rms, dtype in (
            ("stream", site.stream_rms, site.stream_dtype),
            ("update", site.update_rms, site.update_dtype),
        ):
            if rms is not None and 0 < rms < SMALLEST_NORMAL.get(dtype or "", 0.0):
                tiny.setdefault(site.site, (site, operand, rms, dtype or ""))
    if not tiny:
        return []
    site, operand, rms, dtype = min(tiny.values(), key=lambda entry: entry[2])
    more = f" The same holds at {count(len(tiny) - 1, 'more site')}." if len(tiny) > 1 else ""
    return [
        Hit(
            sites=tuple(tiny),
            place=place_of(site),
            metric=f"{operand}_rms",
            value=rms,
            expected=f"at least {number(SMALLEST_NORMAL[dtype])}",
            message=f"The {operand} at {site_label(site)} has RMS {number(rms)}, below the smallest normal {dtype} number, "
            f"{number(SMALLEST_NORMAL[dtype])}. The smaller an element is, the fewer bits it keeps, down to none.{more}",
            severity="note",
            remedy="Use bf16 or fp32 for values this small, or scale them up (a residual scale can be kept in fp32).",
        )
    ]
