"""One step along the depth against the same step of its neighbours: what PC205 and PC306 call out of line."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.profile import log_ratio, median
from propcheck.rules.sites import siblings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import SiteRecord

# How many siblings on each side a site is compared with: the median of three stands one bad neighbour.
NEIGHBOURS = 3

# Indices of the nearest siblings before and after a site.
Sides = tuple[list[int], list[int]]


def sides(curve: Profile, index: int, *, skip_units: int = 0) -> Sides:
    """List the siblings of a site that it is compared with; see :func:`siblings`."""
    before, after = siblings(curve, index, skip_units=skip_units)
    return before[:NEIGHBOURS], after[:NEIGHBOURS]


def link(sites: Sequence[SiteRecord], index: int) -> float | None:
    """Log of the stream at a site over the sum before it: 0 unless something acts on the stream between additions."""
    if index == 0:
        return None
    here, previous = sites[index], sites[index - 1]
    if here.stream_rms == previous.stream_rms and here.sum_rms == previous.sum_rms:
        return None  # a parallel block: both updates are added to one stream, there is nothing between them
    return log_ratio(here.stream_rms, previous.sum_rms)


def stands_out(index: int, steps: Mapping[int, float | None], around: Sides, limit: float) -> tuple[float, float] | None:
    """Give a site's log step and its siblings' if it is off on every side that has siblings, the same way each time.

    Off on one side only is where a new regime begins (the other blocks go on like it), not a jump.
    """
    own = steps[index]
    known = [[step for i in side if (step := steps[i]) is not None] for side in around]
    if own is None or sum(len(side) for side in known) < 2:
        return None
    if around[1] and not known[0]:
        return None  # only later siblings: the stream has just begun, and its first steps are the steepest
    # The median of two lies between them, so that one odd neighbour would drag it; of two, the nearer one counts.
    deviations = [
        min((own - side_median for side_median in {statistics.median_low(side), statistics.median_high(side)}), key=abs)
        for side in known
        if side
    ]
    if all(d > limit for d in deviations) or all(d < -limit for d in deviations):
        expected = median([*known[0], *known[1]])
        return None if expected is None else (own, expected)
    return None
