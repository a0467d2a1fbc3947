"""Comparison of a site's step along the depth with the same step at its neighbours: PC205 and PC306."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.profile import log_ratio, median
from propcheck.rules.sites import siblings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import SiteRecord

# Siblings on each side that a site is compared with: a median of three tolerates one bad neighbour.
NEIGHBOURS = 3

# Indices of the nearest siblings before and after a site.
Neighbours = tuple[list[int], list[int]]


def neighbours(profile: Profile, index: int, *, skip_units: int = 0) -> Neighbours:
    """List the siblings that a site is compared with; see :func:`propcheck.rules.sites.siblings`."""
    before, after = siblings(profile, index, skip_units=skip_units)
    return before[:NEIGHBOURS], after[:NEIGHBOURS]


def step_into(sites: Sequence[SiteRecord], index: int) -> float | None:
    """Return ln(stream at a site / sum of the site before): 0 unless something acts on the stream between additions."""
    if index == 0:
        return None
    site, previous = sites[index], sites[index - 1]
    if site.stream_rms == previous.stream_rms and site.sum_rms == previous.sum_rms:
        return None  # a parallel block: both updates are added to one stream, and nothing lies between them
    return log_ratio(site.stream_rms, previous.sum_rms)


def outlying_step(
    index: int, steps: Mapping[int, float | None], around: Neighbours, limit: float
) -> tuple[float, float] | None:
    """Return a site's log step and that of its neighbours, if it differs from both sides in the same direction.

    A difference on one side only is where a new regime begins, since the later blocks go on like it.

    Parameters
    ----------
    index
        The site.
    steps
        Log step by site index.
    around
        The neighbours.
    limit
        Largest difference, as a logarithm, that is in line.
    """
    step = steps[index]
    sides = [[other for i in side if (other := steps[i]) is not None] for side in around]
    if step is None or sum(len(side) for side in sides) < 2:
        return None
    if around[1] and not sides[0]:
        return None  # only later siblings: the stream has just begun, and its first steps are the steepest
    # The median of two lies between them, and one odd neighbour would shift it. So of two, the nearer one counts.
    differences = [
        min((step - middle for middle in {statistics.median_low(side), statistics.median_high(side)}), key=abs)
        for side in sides
        if side
    ]
    if all(difference > limit for difference in differences) or all(difference < -limit for difference in differences):
        expected = median([*sides[0], *sides[1]])
        return None if expected is None else (step, expected)
    return None
