"""Sums that differ from stream + update by more than rounding explains."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import additions
from propcheck.formatting import count, number, percent
from propcheck.rules.dtypes import UNIT_ROUNDOFF
from propcheck.rules.rule import Hit
from propcheck.rules.sites import grouped, place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import SiteRecord

# A sum fused with a product (x + A B) accumulates in another order than the product alone, with which it is compared. This is
# the share of the update that fp32 accumulation can make of that.
_ACCUMULATION = 1e-5
# Digits are lost below fp32's smallest normal number.
_SMALLEST_BOUND = 2.0**-126


def wrong_sums(profile: Profile, threshold: float) -> list[Hit]:
    """Find sums whose error exceeds the rounding bound by more than ``threshold``."""
    errors = {
        site.site: pair for rows in additions(profile.sites) if (pair := _error_and_bound(rows)) is not None for site in rows
    }
    excess = {site: error / bound for site, (error, bound) in errors.items()}
    flagged = [index for index, site in enumerate(profile.sites) if excess.get(site.site, 0.0) > threshold]
    hits = []
    for group in grouped(profile, flagged):
        worst = max(group, key=lambda site: excess[site.site])
        error, bound = errors[worst.site]
        more = f" The same holds at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
        hits.append(
            Hit(
                sites=tuple(site.site for site in group),
                place=place_of(worst),
                metric="add_error",
                value=worst.add_error,
                expected=None if worst.add_error is None else worst.add_error * bound / error,
                message=f"The sum at {site_label(worst)} is not stream + update. It is off by RMS {number(error)}, "
                f"{percent(worst.add_error or 0.0)} of the update, but rounding of {worst.stream_dtype} and "
                f"{worst.update_dtype} explains at most {number(bound)}.{more}",
                remedy="Look for an operand that is changed in place before the sum is formed, for overlapping memory (expand, "
                "then add_), or for a kernel that is wrong on this device.",
            )
        )
    return hits


def _error_and_bound(rows: Sequence[SiteRecord]) -> tuple[float, float] | None:
    """Return the RMS error of one addition and the largest that rounding can make, or None if either is unknown."""
    first, updates = rows[0], [site.update_rms for site in rows]
    roundoffs = [UNIT_ROUNDOFF.get(dtype or "") for site in rows for dtype in (site.stream_dtype, site.update_dtype)]
    values = (first.add_error, first.stream_rms, first.sum_rms, *updates)
    if first.nonfinite or any(value is None or not math.isfinite(value) for value in values) or None in roundoffs:
        return None
    finite = [update for update in updates if update is not None]
    # add_error is relative to the sum of the updates, whose RMS is at least this, whatever the angles between them.
    joint = max(0.0, 2 * max(finite) - sum(finite))
    error = (first.add_error or 0.0) * joint
    # One rounding of the sum, and one of each partial sum before it or of a product with alpha: none is larger than its terms.
    terms = (first.stream_rms or 0.0) + sum(finite)
    roundings = max(1, len(finite) - 1)
    unit = max(roundoff for roundoff in roundoffs if roundoff is not None)
    bound = unit * ((first.sum_rms or 0.0) + roundings * terms) + _ACCUMULATION * sum(finite)
    return (error, bound) if bound > _SMALLEST_BOUND else None
