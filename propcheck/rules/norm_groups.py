"""Normalisations that are the same in many places, as :mod:`propcheck.analysis.name_patterns` has it of parameters."""

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
    """List the normalisations of a run in forward order, of several seeds the median of each value."""
    found: dict[object, list[NormRecord]] = {}
    for norm in run.norms:
        found.setdefault((norm.norm, norm.module, norm.place, norm.kind), []).append(norm)
    return [_median(same) for same in found.values()]


def _median(same: Sequence[NormRecord]) -> NormRecord:
    values: dict[str, float | None] = {name: median([getattr(norm, name) for norm in same]) for name in _MEASURED}
    return replace(same[0], **values)  # type: ignore[arg-type]


def kinds(norms: Sequence[NormRecord]) -> list[list[NormRecord]]:
    """Put together what is the same norm in several blocks."""
    found: dict[object, list[NormRecord]] = {}
    for norm in norms:
        found.setdefault((pattern(norm.module or ""), pattern(norm.parameter or ""), norm.place, norm.kind), []).append(norm)
    return list(found.values())


def subject(norms: Sequence[NormRecord]) -> str:
    """Write ``The norm a.b``, or of one kind in several blocks ``The 48 norms blocks.*.a.b (blocks 0 to 62)``."""
    if len(norms) == 1:
        return f"The norm {_name(norms[0])}"
    blocks = [norm.block for norm in norms if norm.block is not None]
    where = f" ({places('block', blocks)})" if blocks else ""
    return f"The {count(len(norms), 'norm')} {pattern(_name(norms[0]))}{where}"


def _name(norm: NormRecord) -> str:
    """Name a norm by its gain where it has one: a module may hold several norms."""
    return norm.parameter or (f"in {norm.module}" if norm.module else "outside any module")


def sites(norms: Sequence[NormRecord]) -> tuple[int, ...]:
    """List the sites that norms belong to."""
    return tuple(sorted({norm.site for norm in norms if norm.site is not None}))


def site_of(norm: NormRecord, curve: Profile) -> SiteRecord | None:
    """Find the site in whose branch a norm is, or of one on the stream, whose sum it reads."""
    return next((record for record in curve.sites if record.site == norm.site), None)


def place(norm: NormRecord, curve: Profile) -> Place:
    """Name a norm as a place."""
    record = site_of(norm, curve)
    sublayer = record.sublayer if record is not None and norm.place != "stream" else None
    return Place(site=norm.site, block=norm.block, sublayer=sublayer, module=norm.module, parameter=norm.parameter)
