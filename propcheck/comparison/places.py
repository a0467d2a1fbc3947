"""Where things are in the forward pass, and where a change begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.differences import Deviations
    from propcheck.comparison.match_sites import SitePair
    from propcheck.records import ParameterRecord, Run, SiteRecord


def positions(run: Run) -> dict[str, int]:
    """Say of each parameter at which site of the forward pass it stands: before them all -1, behind them their number.

    One of a block that is in no branch stands at the end of its block. Outside of the blocks it stands where the parameters
    before it do, as a model defines them; the head, and whatever else comes after the last branch, behind all sites.
    """
    places: dict[str, int] = {}
    ends = {one.block: one.site for one in run.sites if one.block is not None}
    reached, behind = -1, max((one.site for one in run.sites), default=-1) + 1
    outside: list[str] = []  # since the last parameter of a branch or block
    for one in run.parameters:
        if one.role == "embedding":
            places[one.name] = -1
        elif one.site is not None:
            places[one.name] = one.site
        elif one.block is not None:
            places[one.name] = max((site for block, site in ends.items() if block <= one.block), default=-1)
        else:
            places[one.name] = reached
            outside.append(one.name)
            continue
        reached = max(reached, places[one.name])
        if one.role != "embedding":
            outside.clear()
    return {**places, **dict.fromkeys(outside, behind)}


def place_of(record: SiteRecord) -> Place:
    """Return where a site is."""
    return Place(record.site, record.block, record.sublayer, record.module)


def parameter_place(record: ParameterRecord) -> Place:
    """Return where a parameter is."""
    return Place(record.site, record.block, record.sublayer, None, record.name)


def first_change(deviations: Deviations, pairs: Sequence[SitePair], lone: Sequence[ParameterRecord] = ()) -> Place | None:
    """Say where the change begins; None where no number differs by more than its tolerance and nothing is on one side alone.

    That is the first place of the forward pass: one that differs at all, where draws and machine are the same, else one beyond
    its tolerance. Where only gradients changed it is the last place, since they come back from the loss.

    Parameters
    ----------
    deviations
        The numbers that differ.
    pairs
        The sites, some of one side alone.
    lone
        Parameters of one side alone.
    """
    sites = [pair.other or pair.base for pair in pairs if pair.base is None or pair.other is None]
    alone = [(record.site, place_of(record)) for record in sites if record is not None]
    alone += [(one.site, parameter_place(one)) for one in lone if one.site is not None]
    found = [one for one in deviations.found if one.place != Place()]  # the loss is no place
    if not alone and not deviations.found:
        return None
    forward = [(one.position, one.place) for one in found if one.forward]
    if first := (*alone, *forward, *deviations.moved):
        # Of the numbers of one site the most exact: a parameter's, if there is one.
        return min(first, key=lambda one: (one[0], one[1].parameter is None))[1]
    last = max(found, key=lambda one: (one.position, one.place.parameter is not None), default=None)
    return None if last is None else last.place
