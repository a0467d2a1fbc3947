"""PC203: a branch adds nothing, and its parameters get no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.profile import median
from propcheck.formatting import count, number
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import grouped, place_of, siblings, site_label
from propcheck.rules.zero_init import trained_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

RULE = Rule(
    id="PC203",
    name="dead-branch",
    severity="error",
    threshold=1e-3,
    unit="fraction of the siblings' median below which an update and the gradient of its parameters are negligible",
    sees="A branch that adds nothing and whose parameters get no gradient, although the loss gradient reaches its output.",
    why="The branch costs time and memory, and a training step does not revive it. A branch that starts at zero but whose "
    "parameters have a gradient (zero-initialised output projection, ReZero, LayerScale, LoRA) is healthy and is not flagged.",
    formula="Error: update_rms = 0 and param_grad_norm = 0 while grad_update_norm > 0. Not if a trained zero is shared with "
    "other branches or lies outside the blocks (one gate for all of them), since it may block the gradient only until the "
    "first step. Warning: update_rms and param_grad_norm are both below threshold x the median of the sites of the same kind.",
    basis="Exact zeros need no threshold. Otherwise a thousandth is far outside the spread of similar branches at "
    "initialisation; the number is this tool's own.",
    source="De and Smith 2020, arXiv 2002.10444, and Bachlechner 2020, arXiv 2003.04887 (branches that start at zero train, "
    "because their own scale has a gradient).",
    remedy="Start only one factor of the branch at zero, not two in a row. Check the branch for a detach, a no_grad or a mask.",
    example=Example(
        broken="nn.init.zeros_(self.up.weight)\nnn.init.zeros_(self.down.weight)  # two zeros: neither ever gets a gradient",
        repaired="nn.init.normal_(self.up.weight, std=0.02)\n"
        "nn.init.zeros_(self.down.weight)  # has a gradient, so the first step changes it",
    ),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Judge each branch, exact zeros by themselves and small updates against their siblings."""
    flagged = [i for i in range(len(profile.sites)) if _is_dead(profile, run, i, threshold)]
    return [_hit(profile, group) for group in grouped(profile, flagged)]


def _is_dead(profile: Profile, run: Run, index: int, threshold: float) -> bool:
    site = profile.sites[index]
    arriving = site.grad_update_norm if site.grad_update_norm is not None else site.grad_sum_norm
    if site.update_rms is None or site.param_grad_norm is None or arriving is None or not arriving > 0:
        return False
    if site.update_rms == 0:
        # A random mask differs at the next step, and a trained zero is no longer zero then.
        return site.param_grad_norm == 0 and not site.masked and not trained_zeros(run, site)
    before, after = siblings(profile, index)
    update = median([profile.sites[i].update_rms for i in (*before, *after)])
    gradient = median([profile.sites[i].param_grad_norm for i in (*before, *after)])
    if update is None or gradient is None:
        return False
    return site.update_rms < threshold * update and site.param_grad_norm < threshold * gradient


def _hit(profile: Profile, group: Sequence[SiteRecord]) -> Hit:
    first = group[0]
    before, after = siblings(profile, profile.sites.index(first))
    usual = median([profile.sites[i].update_rms for i in (*before, *after)])
    exact = first.update_rms == 0
    update = "exactly zero" if exact else f"RMS {number(first.update_rms)}, where branches of its kind add {number(usual)}"
    gradient = "no gradient" if first.param_grad_norm == 0 else f"a gradient of only {number(first.param_grad_norm)}"
    effect = " The first training step does not revive the branch." if exact else ""
    more = f" The same holds at {count(len(group) - 1, 'more site')}." if len(group) > 1 else ""
    return Hit(
        sites=tuple(site.site for site in group),
        place=place_of(first),
        metric="update_rms",
        value=first.update_rms,
        expected="above 0" if exact and not usual else usual,
        message=f"The branch at {site_label(first)} adds {update}. Its parameters get {gradient}, although the loss gradient "
        f"reaches its output.{effect}{more}",
        severity="error" if exact else "warning",
    )
