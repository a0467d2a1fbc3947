"""Find the place where two runs start to differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.comparison.places import parameter_place, site_place
from propcheck.comparison.quantities import QUANTITIES
from propcheck.records import Place

if TYPE_CHECKING:
    from propcheck.comparison.differences import NumberComparison
    from propcheck.comparison.match_runs import MatchedRuns


def find_start(matched: MatchedRuns, numbers: NumberComparison) -> Place | None:
    """Return the place to look at first; None if nothing differs, or only the loss does.

    It is the first place of the forward pass that only one run has, or where a number is outside its tolerance, or, with the
    same draws on the same machine, not equal to rounding. If only gradients differ it is the last place, since they come back
    from the loss.
    """
    sites = [pair.other or pair.base for pair in matched.sites.pairs if pair.base is None or pair.other is None]
    parameters = (*matched.parameters.missing, *matched.parameters.new)
    alone = [(site.site, site_place(site)) for site in sites if site is not None]
    alone += [(parameter.site, parameter_place(parameter)) for parameter in parameters if parameter.site is not None]
    if not alone and not numbers.differences:
        return None
    located = [difference for difference in numbers.differences if difference.place != Place()]
    forward = [(each.position, each.place) for each in located if QUANTITIES[each.quantity].direction == "forward"]
    if candidates := (*alone, *forward, *numbers.moved):
        # A parameter is a more precise place than its site.
        return min(candidates, key=lambda candidate: (candidate[0], candidate[1].parameter is None))[1]
    last = max(located, key=lambda each: (each.position, each.place.parameter is not None), default=None)
    return None if last is None else last.place
