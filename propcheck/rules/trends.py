"""Sentences about a trend over the depth, shared by PC201, PC202, PC301 and PC302."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.growth import describe
from propcheck.analysis.profile import log_ratio
from propcheck.formatting import places

if TYPE_CHECKING:
    from propcheck.analysis.profile import Compounding, Profile
    from propcheck.records import Growth


def judged_blocks(profile: Profile, trend: Compounding) -> str:
    """Write ``blocks 17 to 63``: the blocks that a trend was judged over."""
    return places(profile.noun, [profile.label(j) for j in trend.kept])


def judged_sites(profile: Profile, trend: Compounding) -> tuple[int, ...]:
    """List the sites of the blocks that a trend was judged over."""
    return tuple(site.site for j in trend.kept for site in profile.units[j])


def growth_law(growth: Growth | None, verb: str, noun: str) -> str:
    """Say which law a trend follows, as a sentence; empty if there are too few blocks, or if the fit is flat."""
    if growth is None or growth.law in (None, "flat"):
        return ""
    return f" It {verb} {describe(growth, noun)}."


def main_sublayer(profile: Profile, trend: Compounding) -> str:
    """Name the kind of sublayer that contributes most of a trend, as a sentence; empty if none does."""
    shares: dict[str, float] = {}
    for j in trend.kept:
        previous = profile.units[j - 1][-1].sum_rms
        for site in profile.units[j]:
            step = log_ratio(site.sum_rms, previous)
            if step is None:
                return ""
            shares[site.sublayer] = shares.get(site.sublayer, 0.0) + step
            previous = site.sum_rms
    total = sum(shares.values())
    if len(shares) < 2 or total == 0:
        return ""
    kind = max(shares, key=lambda name: shares[name] / total)
    return f" Most of it comes from the {kind} additions." if shares[kind] / total > 0.7 else ""
