"""PC211: a stream that is promoted without a cast, and tables and angles computed in half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import count, number
from propcheck.records import Place
from propcheck.rules.dtypes import BYTES, sum_dtype
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

_HALF = frozenset({"float16", "bfloat16"})

RULE = Rule(
    scope="run",
    id="PC211",
    name="dtype-drift",
    severity="warning",
    threshold=0.1,
    unit="error of a half-precision table, relative to its largest number, and of an angle, in radians; a promoted stream has "
    "no threshold",
    sees="Numbers in another dtype than intended: a stream that becomes wider without a cast, tables computed in half "
    "precision, and sines and cosines of angles that half precision made too coarse.",
    why="If a single fp32 factor promotes the stream, it costs twice the memory and bandwidth from there on, everything that "
    "reads it runs in another precision than planned, and effects of bf16 stay hidden. Half precision has 8 or 11 bits: above "
    "256 (bf16) or 2048 (fp16) not every position is a number of its own, and a rotation by a position that is off by radians "
    "is random.",
    formula="One finding for each of three faults. (1) promoted is not null at a site: a function on the stream that is no "
    "cast made it wider since the last sum. Or the addition does: the stream has the dtype of most parameters, and the "
    "update a wider one. A stream that is wide from its beginning, by a cast, or under autocast is not flagged.\n\n"
    "(2) fp64_error > threshold: a bf16 or fp16 buffer differs from its recorded calls run in fp64 by more than one "
    "rounding to its own dtype explains, in units of its largest number.\n\n"
    "(3) The rounding error in the angles of a sine or cosine may exceed threshold radians.",
    basis="An angle that is off by e moves sine and cosine by up to e, and they are at most 1, so one number serves for both: "
    "0.1 is a tenth of a radian, 6 degrees, or a tenth of the largest cosine, 26 times the rounding of bf16 (1/256). It is "
    "this tool's own. Computed in bf16, tables of 2048 positions are off by 2, the whole range. Frequencies alone are off by "
    "up to 0.04 of themselves and 0.003 of the largest, which only shows in their angles.",
    source="EleutherAI/gpt-neox issue 1003 (rotary tables in half precision); autoresearch-mlx issue 3 (an fp32 scalar "
    "promotes a bf16 stream from block 0 on).",
    remedy="Make every change of dtype an explicit cast. Compute tables and angles in fp32.",
    example=Example(
        broken="x = x * self.scale  # x is bf16, self.scale an fp32 vector: the stream is fp32 from here on",
        repaired="x = x * self.scale.to(x.dtype)",
    ),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Look for a promoted stream, coarse tables and coarse angles."""
    return [*_promoted_stream(profile, run), *_coarse_tables(run, threshold), *_coarse_angles(run, threshold)]


@dataclass(frozen=True, slots=True)
class _Promotion:
    """A site where the stream becomes wider, its dtypes before and after, and the reason."""

    site: SiteRecord
    before: str
    after: str
    reason: str


def _promoted_stream(profile: Profile, run: Run) -> list[Hit]:
    """Find where the stream becomes wider without a cast, before an addition or by it."""
    promotions = _promotions(profile, run)
    if not promotions:
        return []
    first = promotions[0]
    later = [site for site in profile.sites if site.site > first.site.site]
    still_wide = [site.site for site in later if site.stream_dtype == first.after]
    again = f" It happens again at {count(len(promotions) - 1, 'later site')}." if len(promotions) > 1 else ""
    return [
        Hit(
            sites=tuple(sorted({*(promotion.site.site for promotion in promotions), *still_wide})),
            place=place_of(first.site),
            metric="stream_dtype",
            value=first.after,
            expected=first.before,
            message=f"The stream changes from {first.before} to {first.after} at {site_label(first.site)}: {first.reason}. Of "
            f"the {count(len(later), 'site')} after it, {len(still_wide)} {'reads' if len(still_wide) == 1 else 'read'} it in "
            f"{first.after}, which costs memory and time.{again}",
            remedy="Cast the factor or the update to the stream's dtype. If the wider stream is intended, cast the stream "
            "where it begins, so that the code says so.",
        )
    ]


def _promotions(profile: Profile, run: Run) -> list[_Promotion]:
    intended = _parameter_dtype(run)
    if intended is None:
        return []
    sums = {site.site: sum_dtype(site) for site in profile.sites}
    promotions = []
    for site in profile.sites:
        before = intended if site.continues is None else sums.get(site.continues) or intended
        stream, after = site.stream_dtype or "", sums[site.site] or ""
        # Under autocast the parameters are wide, and the stream may be too.
        if site.promoted is not None and _is_wider(stream, intended):
            promotions.append(_Promotion(site, before, stream, f"no cast widened it, {site.promoted} did"))
        elif stream == intended and _is_wider(after, intended):
            promotions.append(_Promotion(site, stream, after, f"the update added there is {site.update_dtype}"))
    return promotions


def _is_wider(dtype: str, than: str) -> bool:
    return BYTES.get(dtype, 0) > BYTES[than]


def _parameter_dtype(run: Run) -> str | None:
    """Return the dtype of most of the model's parameters."""
    amounts: dict[str, int] = {}
    for parameter in run.parameters:
        if parameter.kind == "parameter" and parameter.dtype in BYTES:
            amounts[parameter.dtype] = amounts.get(parameter.dtype, 0) + parameter.numel
    return max(amounts, key=lambda dtype: amounts[dtype]) if amounts else None


def _coarse_tables(run: Run, threshold: float) -> list[Hit]:
    coarse = [p for p in run.parameters if p.kind == "buffer" and p.dtype in _HALF and (p.fp64_error or 0.0) > threshold]
    if not coarse:
        return []
    worst = max(coarse, key=lambda p: p.fp64_error or 0.0)
    error = worst.fp64_error or 0.0
    (first, *others) = folded(sorted(coarse, key=lambda p: -(p.fp64_error or 0.0)))
    more = f" So {verb(others[0], 'is', 'are')} {count(sum(map(len, others)), 'more buffer')}." if others else ""
    return [
        Hit(
            sites=(),
            place=place(worst),
            metric="fp64_error",
            value=error,
            expected=f"at most {number(threshold)}",
            message=f"{subject(first)} {verb(first, 'was', 'were')} computed in half precision ({worst.init_calls}). Compared "
            f"with the same calls in fp64 {verb(first, 'it is', 'they are')} off by up to {number(error)} of the largest "
            f"number, more than one rounding to {worst.dtype} explains.{more}",
            remedy="Compute the table in fp32 (positions, frequencies, sine and cosine) and round only the result. Keep "
            "`model.to(dtype)` and the default dtype off the values it is computed from.",
        )
    ]


def _coarse_angles(run: Run, threshold: float) -> list[Hit]:
    coarse = [angle for angle in run.angles if angle.error > threshold]
    if not coarse:
        return []
    worst = max(coarse, key=lambda angle: angle.error)
    source = worst.parameter or "a tensor computed in the forward pass"
    where = f" in {worst.module}" if worst.module else ""
    more = f" The same holds at {count(len(coarse) - 1, 'more place')}." if len(coarse) > 1 else ""
    return [
        Hit(
            sites=(),
            place=Place(block=worst.block, module=worst.module, parameter=worst.parameter),
            metric="angle error",
            value=worst.error,
            expected=f"at most {number(threshold)} radians",
            message=f"Sines or cosines{where} are taken of angles up to {number(worst.largest)} radians that are only accurate "
            f"to {number(worst.error)}: {source} is {worst.dtype}. Positions are rotated by wrong angles.{more}",
            remedy="Compute positions times frequencies in fp32, the frequencies included, and round only the sine and cosine.",
        )
    ]
