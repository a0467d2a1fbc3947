"""Places in a model: of a site, of a parameter, in words, and in the order of the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.records import Place

if TYPE_CHECKING:
    from propcheck.records import ParameterRecord, Run, SiteRecord


def site_place(site: SiteRecord) -> Place:
    """Return the place of a site."""
    return Place(site.site, site.block, site.sublayer, site.module)


def parameter_place(parameter: ParameterRecord) -> Place:
    """Return the place of a parameter."""
    return Place(parameter.site, parameter.block, parameter.sublayer, None, parameter.name)


def describe_place(place: Place) -> str:
    """Name a place: ``site 11 (mlp of block 5, layers.5.mlp)``."""
    if place.parameter is not None:
        return place.parameter
    if place.site is None:
        return "the whole model"
    sublayer = place.sublayer or "update"
    inside = sublayer if place.block is None else f"{sublayer} of block {place.block}"
    return f"site {place.site} ({inside}{f', {place.module}' if place.module else ''})"


def parameter_positions(run: Run) -> dict[str, int]:
    """Return the position of each parameter in the forward pass, in site numbers.

    The embedding is at -1. A parameter of a block but of no branch is at the last site of its block. One outside the blocks is
    where the parameters defined before it are, or, if no branch or block follows, after all sites, as the head is.
    """
    positions: dict[str, int] = {}
    last_sites = {site.block: site.site for site in run.sites if site.block is not None}
    reached, after_all = -1, max((site.site for site in run.sites), default=-1) + 1
    trailing: list[str] = []  # parameters outside the blocks since the last one of a branch or block
    for parameter in run.parameters:
        if parameter.role == "embedding":
            positions[parameter.name] = -1
        elif parameter.site is not None:
            positions[parameter.name] = parameter.site
        elif parameter.block is not None:
            positions[parameter.name] = max(
                (site for block, site in last_sites.items() if block <= parameter.block), default=-1
            )
        else:
            positions[parameter.name] = reached
            trailing.append(parameter.name)
            continue
        reached = max(reached, positions[parameter.name])
        if parameter.role != "embedding":
            trailing.clear()
    return {**positions, **dict.fromkeys(trailing, after_all)}
