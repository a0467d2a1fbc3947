"""PC207: rounding discards updates that are too small for the dtype of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count, number, percent, places
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

# Above this share more of the update is lost than kept, which is waste without further evidence.
_WASTE = 0.5

RULE = Rule(
    id="PC207",
    name="swallowed-update",
    severity="note",
    threshold=0.2,
    unit="fraction of the update's non-zero elements that the addition does not change; a warning above one half",
    sees="Updates so small compared with the stream that the addition rounds them away.",
    why="bf16 keeps 8 bits. An element of the update below about 1/256 of the stream's element is lost, in every forward pass. "
    "What the branch computed for it is wasted, and its gradient describes a change that did not happen.",
    formula="swallowed > threshold. swallowed counts the elements with F != 0 and fl(x + F) == x, so an update that starts at "
    "zero loses nothing. One finding per kind of sublayer, with its worst site and range.",
    basis="Measured for a bf16 addition of normal numbers: update/stream 0.1 loses 1.8 % of the elements, 0.02 9 %, 0.01 17 %, "
    "0.0065 26 %, 0.0039 39 %, 0.001 78 %. The rounding error relative to the update is about the same number, so at 0.2 a "
    "fifth of the update's norm is rounding error. No published cut-off ties this to failed training, and trained models live "
    "with it. So it is a note, and a warning only if more is lost than kept.",
    source="Measured by this project (the table above); bf16 has 8 significant bits, round to nearest.",
    remedy="Keep the stream in fp32 (the branches may stay in bf16). Or make the updates larger compared with the stream: "
    "depth scaling keeps the late stream smaller, larger output projections raise the updates.",
    example=Example(
        broken="x = self.embedding(ids)  # bf16\nx = x + self.attention(self.norm(x))  # an update of 0.0065 x loses 26 %",
        repaired="x = self.embedding(ids).float()  # the stream stays in fp32\n"
        "x = x + self.attention(self.norm(x).to(torch.bfloat16))",
    ),
)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge the share of swallowed elements, per kind of sublayer."""
    kinds: dict[str, list[SiteRecord]] = {}
    for site in profile.sites:
        if site.swallowed is not None and site.swallowed > threshold:
            kinds.setdefault(site.sublayer, []).append(site)
    return [_hit(profile, kind, sites, threshold) for kind, sites in kinds.items()]


def _hit(profile: Profile, kind: str, sites: Sequence[SiteRecord], threshold: float) -> Hit:
    worst = max(sites, key=lambda site: site.swallowed or 0.0)
    share = worst.swallowed or 0.0
    blocks = [site.block for site in sites if site.block is not None]
    where = places("block", blocks) if len(blocks) == len(sites) else places("site", [site.site for site in sites])
    ratio = f", where update/stream is {number(worst.update_ratio)}" if worst.update_ratio is not None else ""
    total = sum(site.sublayer == kind for site in profile.sites)
    others = (
        f" {len(sites)} of {count(total, f'{kind} site')} lose more than {percent(threshold)} ({where})."
        if len(sites) > 1
        else ""
    )
    return Hit(
        sites=tuple(site.site for site in sites),
        place=place_of(worst),
        metric="swallowed",
        value=share,
        expected=f"at most {number(threshold)}",
        message=f"Rounding{_dtypes(worst)} discards {percent(share)} of the update's elements at {site_label(worst)}{ratio}. "
        f"The stream does not change there, and what the branch computed is lost.{others}",
        severity="warning" if share > _WASTE else None,
    )


def _dtypes(site: SiteRecord) -> str:
    """Name the dtype that rounds. If the operands differ, name both: an in-place sum has the stream's, another the wider."""
    stream, update = site.stream_dtype, site.update_dtype
    if stream is None or update is None:
        return ""
    return f" of the {stream} stream" if stream == update else f" in the sum of a {stream} stream and a {update} update"
