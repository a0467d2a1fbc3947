"""What rounding takes away: PC207."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count, number, percent, places
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

# Above this fraction more of the update is thrown away than kept, which needs no further evidence to be called waste.
WASTE = 0.5


def _swallowed(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    kinds: dict[str, list[int]] = {}
    for index, record in enumerate(curve.sites):
        if record.swallowed is not None and record.swallowed > limit:
            kinds.setdefault(record.sublayer, []).append(index)
    hits = []
    for kind, indices in kinds.items():
        group = [curve.sites[i] for i in indices]
        worst = max(group, key=lambda record: record.swallowed or 0.0)
        share = worst.swallowed or 0.0
        blocks = [record.block for record in group if record.block is not None]
        where = places("block", blocks) if len(blocks) == len(group) else places("site", [record.site for record in group])
        ratio = f", where update/stream is {number(worst.update_ratio)}" if worst.update_ratio is not None else ""
        same = sum(record.sublayer == kind for record in curve.sites)
        spread = (
            f" {len(group)} of {count(same, f'{kind} site')} lose more than {percent(limit)} ({where})."
            if len(group) > 1
            else ""
        )
        hits.append(
            Hit(
                sites=tuple(record.site for record in group),
                place=place_of(worst),
                metric="swallowed",
                value=share,
                expected=f"at most {number(limit)}",
                message=f"Rounding{_dtypes(worst)} swallows {percent(share)} of the update's elements at "
                f"{site_label(worst)}{ratio}: the addition leaves them as they were.{spread}",
                severity="warning" if share > WASTE else None,
            )
        )
    return hits


def _dtypes(record: SiteRecord) -> str:
    """Name the dtype that rounds; of two operands that differ, both: a sum in place has the stream's, another the wider one."""
    stream, update = record.stream_dtype, record.update_dtype
    if stream is None or update is None:
        return ""
    return f" of the {stream} stream" if stream == update else f" in the sum of a {stream} stream and a {update} update"


SWALLOWED_UPDATE = Rule(
    id="PC207",
    name="swallowed-update",
    severity="note",
    threshold=0.2,
    unit="fraction of the update's non-zero elements that the addition does not change; a warning above one half",
    sees="Updates so small beside the stream that the addition rounds them away.",
    why="bf16 keeps 8 bits: an element of the update below about 1/256 of the stream's is lost, in every forward pass. What "
    "the branch computed for it was waste, and its gradient speaks of a change that did not take place.",
    formula="swallowed > threshold, where swallowed counts the elements with F != 0 and fl(x + F) == x: an update that is "
    "zero at the start loses nothing. One finding a kind of sublayer, with its worst site and range.",
    basis="Measured for a bf16 addition of normal numbers: update/stream 0.1 loses 1.8 % of the elements, 0.02 9 %, 0.01 17 "
    "%, 0.0065 26 %, 0.0039 39 %, 0.001 78 %; the rounding error relative to the update is about the same number. At 0.2 a "
    "fifth of the update's norm is rounding error. No published cut-off ties this to failed training, and trained models "
    "live with it: so a note, and a warning only where more is lost than kept.",
    source="Measured by this project (the table above); bf16 has 8 significant bits, round to nearest.",
    remedy="Keep the stream in fp32 (the branches may stay in bf16), or make the updates larger beside the stream: smaller "
    "late stream by depth scaling, larger output projections.",
    check=_swallowed,
)

RULES = (SWALLOWED_UPDATE,)
