"""Sites in findings: their labels, their siblings in other blocks, and groups of neighbouring sites."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import SiteRecord


def place_of(site: SiteRecord) -> Place:
    """Return a site as the place of a finding."""
    return Place(site=site.site, block=site.block, sublayer=site.sublayer, module=site.module)


def site_label(site: SiteRecord) -> str:
    """Write ``site 7 (mlp of block 3)``."""
    where = site.sublayer if site.block is None else f"{site.sublayer} of block {site.block}"
    return f"site {site.site} ({where})"


def siblings(profile: Profile, index: int, *, skip_units: int = 0) -> tuple[list[int], list[int]]:
    """List the sites of the same sublayer kind and role before and after a site, nearest first.

    The role is the site's position in its block, so a decoder's self-attention is not compared with its cross-attention.

    Parameters
    ----------
    profile
        The sites.
    index
        The site, as an index into ``profile.sites``. The result holds such indices too.
    skip_units
        Leave out the sites of this many first units (blocks).
    """
    roles = [position for unit in profile.units for position in range(len(unit))]
    skipped = sum(len(unit) for unit in profile.units[:skip_units])
    same_role = [
        i
        for i, site in enumerate(profile.sites)
        if i != index and i >= skipped and site.sublayer == profile.sites[index].sublayer and roles[i] == roles[index]
    ]
    return [i for i in same_role if i < index][::-1], [i for i in same_role if i > index]


def grouped(profile: Profile, flagged: Sequence[int]) -> list[list[SiteRecord]]:
    """Group flagged sites that are adjacent, or consecutive among their siblings: they share a cause.

    ``flagged`` holds indices into ``profile.sites``.
    """
    groups: list[set[int]] = []
    for index in sorted(flagged):
        before, _ = siblings(profile, index)
        linked = {index - 1, *before[:1]}
        touching = [group for group in groups if group & linked]
        groups = [group for group in groups if not group & linked] + [{index}.union(*touching)]
    return [[profile.sites[i] for i in sorted(group)] for group in groups]
