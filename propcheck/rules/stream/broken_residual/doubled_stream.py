"""Additions that count the stream twice: x + x, or x + (x + F)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import pattern
from propcheck.analysis.profile import NORM_ON_STREAM, log_ratio, median, safe_exp, streams
from propcheck.formatting import number, places
from propcheck.records import Place
from propcheck.rules.rule import Hit
from propcheck.rules.sites import site_label

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Doubling, Run, SiteRecord

# Ratios of RMS differ by less than this from rounding to fp32 alone.
_FP32_DIGITS = 1e-6


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """The sites around the doublings of one kind.

    ``after`` are the sites that continue a doubling; ``pairs`` are the sites before and after; ``bare`` are the pairs without
    a norm on the stream in between, which would hide the factor.
    """

    after: tuple[SiteRecord, ...]
    pairs: tuple[tuple[SiteRecord, SiteRecord], ...]

    @property
    def bare(self) -> list[tuple[SiteRecord, SiteRecord]]:
        return [(before, after) for before, after in self.pairs if before.placement not in NORM_ON_STREAM]

    @property
    def log_factor(self) -> float | None:
        """Median log factor of the stream over a doubling; ``None`` if norms hide it."""
        return median([log_ratio(after.stream_rms, before.sum_rms) for before, after in self.bare])


def doubled_streams(profile: Profile, run: Run) -> list[Hit]:
    """Find doubled streams, those of one module name in several blocks together."""
    sites = {site.site: site for site in profile.sites}
    single_stream = len(streams(run)) == 1  # otherwise the next site may belong to another stream
    kinds: dict[str, list[Doubling]] = {}
    for doubling in run.doublings:
        if not (single_stream and _is_halved(doubling, sites)):
            kinds.setdefault(pattern(doubling.module or ""), []).append(doubling)
    return [_hit(profile, doublings, _neighbours(doublings, sites)) for doublings in kinds.values()]


def _neighbours(doublings: Sequence[Doubling], sites: Mapping[int, SiteRecord]) -> _Neighbours:
    after = tuple(sites[doubling.site] for doubling in doublings if doubling.site is not None and doubling.site in sites)
    pairs = [(site.continues, site) for site in after if site.continues is not None]
    return _Neighbours(after, tuple((sites[before], site) for before, site in pairs if before in sites))


def _hit(profile: Profile, doublings: Sequence[Doubling], around: _Neighbours) -> Hit:
    first, log_factor = doublings[0], around.log_factor
    # A doubling lies between two sites. After the last addition there is none that continues it.
    numbers = {site.site for site in (*around.after, *(before for before, _ in around.pairs))}
    at_site = _addition_itself(first, around)
    intended = len(around.bare) == len(doublings) > 1 and _follows_every_update(profile, around.bare)
    amount = f" at {len(doublings)} additions" if len(doublings) > 1 else ""
    return Hit(
        sites=tuple(sorted(numbers or {site.site for site in profile.sites[-1:]})),
        severity="warning" if intended else None,
        place=Place(
            site=None if at_site is None else at_site.site,
            block=first.block,
            sublayer=None if at_site is None else at_site.sublayer,
            module=first.module,
        ),
        metric="stream_rms / sum_rms before" if log_factor is not None else "times that the stream is in the sum",
        value=2.0 if log_factor is None else safe_exp(log_factor),
        expected=1.0,
        message=f"The stream is added to itself{amount}{_where(doublings, around)}: x + x, or x + (x + F), counts it twice."
        f"{_growth(doublings, around)}"
        f"{' This follows every update of this kind, so it may be intentional.' if intended else ''}",
        remedy="Add only what the sublayer computed: x = x + F(x). If the sublayer already adds the stream itself, do not add "
        "it again around the sublayer.",
    )


def _where(doublings: Sequence[Doubling], around: _Neighbours) -> str:
    """Write `` in layers.*.mlp (blocks 0 to 3)``, or `` in layers.3.mlp (block 3), before site 7 (...)``."""
    module = doublings[0].module
    name = pattern(module or "") if len(doublings) > 1 else module
    blocks = [doubling.block for doubling in doublings if doubling.block is not None]
    where = f" in {name}" if name else ""
    where += f" ({places('block', blocks)})" if blocks else ""
    return where + (f", before {site_label(around.after[0])}" if len(doublings) == len(around.after) == 1 else "")


def _growth(doublings: Sequence[Doubling], around: _Neighbours) -> str:
    """Say how much the doubling grows the stream, as a sentence."""
    if around.pairs and not around.bare:
        return " The norm after it hides the factor."
    factor = 2.0 if around.log_factor is None else safe_exp(around.log_factor)
    many = len(doublings) > 1 and around.log_factor is not None
    each = f" each time, x{number(factor ** len(doublings))} in all" if many else ""
    return f" The stream grows x{number(factor)}{each}; a residual keeps it at x1."


def _addition_itself(doubling: Doubling, around: _Neighbours) -> SiteRecord | None:
    """Return the site of the addition that doubles, if it is one.

    x + (x + F) is at the addition of F, in the same block. x + x is at none, and a norm hides which of the two it is.
    """
    return next(
        (
            before
            for before, after in around.bare
            if after.site == doubling.site and before.block == doubling.block and not _is_twice(before, after)
        ),
        None,
    )


def _follows_every_update(profile: Profile, pairs: Sequence[tuple[SiteRecord, SiteRecord]]) -> bool:
    """Whether the stream is doubled after every update of one kind, x + (x + F): then the model is built that way."""
    if any(_is_twice(before, after) for before, after in pairs):
        return False
    kinds = {(pattern(before.module or ""), before.sublayer) for before, _ in pairs}
    same_kind = {site.site for site in profile.sites if (pattern(site.module or ""), site.sublayer) in kinds}
    return same_kind == {before.site for before, _ in pairs}


def _is_halved(doubling: Doubling, sites: Mapping[int, SiteRecord]) -> bool:
    """Whether the stream is no larger after a doubling, as in (x + x) / 2: then nothing is counted twice."""
    after = sites.get(-1 if doubling.site is None else doubling.site)
    before = None if after is None else sites.get(-1 if after.continues is None else after.continues)
    if after is None or before is None or before.placement in NORM_ON_STREAM:
        return False
    ratio = log_ratio(after.stream_rms, before.sum_rms)
    return ratio is not None and ratio < _FP32_DIGITS


def _is_twice(before: SiteRecord, after: SiteRecord) -> bool:
    """Whether a sum cannot be told from x + x, which leaves an update out: its result is 2 x to the last digit."""
    ratio = log_ratio(after.stream_rms, before.sum_rms)
    return ratio is None or math.isclose(ratio, math.log(2), rel_tol=1e-9)
