"""Groups of norms: the medians over seeds, and the same norm in several blocks with its subject, sites and place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import pattern
from propcheck.analysis.profile import median
from propcheck.formatting import count, places
from propcheck.records import NormRecord, Place
from propcheck.records.columns import float_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

_MEASURED = tuple(name for name in float_columns(NormRecord) if name != "eps")


def norms_of(run: Run) -> list[NormRecord]:
    """List the norms of a run in forward order, with the median of each value over the seeds."""
    by_norm: dict[object, list[NormRecord]] = {}
    for norm in run.norms:
        by_norm.setdefault((norm.norm, norm.module, norm.place, norm.kind), []).append(norm)
    return [_median(seeds) for seeds in by_norm.values()]


def _median(seeds: Sequence[NormRecord]) -> NormRecord:
    values: dict[str, float | None] = {name: median([getattr(norm, name) for norm in seeds]) for name in _MEASURED}
    return replace(seeds[0], **values)  # type: ignore[arg-type]


def kinds(norms: Sequence[NormRecord]) -> list[list[NormRecord]]:
    """Group norms that are the same in several blocks."""
    by_kind: dict[object, list[NormRecord]] = {}
    for norm in norms:
        by_kind.setdefault((pattern(norm.module or ""), pattern(norm.parameter or ""), norm.place, norm.kind), []).append(norm)
    return list(by_kind.values())


def subject(norms: Sequence[NormRecord]) -> str:
    """Write ``The norm a.b``, or for a group ``The 48 norms blocks.*.a.b (blocks 0 to 62)``."""
    if len(norms) == 1:
        return f"The norm {_name(norms[0])}"
    blocks = [norm.block for norm in norms if norm.block is not None]
    where = f" ({places('block', blocks)})" if blocks else ""
    return f"The {count(len(norms), 'norm')} {pattern(_name(norms[0]))}{where}"


def _name(norm: NormRecord) -> str:
    """Name a norm by its gain, if it has one: a module may hold several norms."""
    return norm.parameter or (f"in {norm.module}" if norm.module else "outside any module")


def sites(norms: Sequence[NormRecord]) -> tuple[int, ...]:
    """List the sites that norms belong to."""
    return tuple(sorted({norm.site for norm in norms if norm.site is not None}))


def site_of(norm: NormRecord, profile: Profile) -> SiteRecord | None:
    """Find the site whose branch a norm is in, or whose sum it reads if it is on the stream."""
    return next((site for site in profile.sites if site.site == norm.site), None)


def place(norm: NormRecord, profile: Profile) -> Place:
    """Return a norm as the place of a finding."""
    site = site_of(norm, profile)
    sublayer = site.sublayer if site is not None and norm.place != "stream" else None
    return Place(site=norm.site, block=norm.block, sublayer=sublayer, module=norm.module, parameter=norm.parameter)
