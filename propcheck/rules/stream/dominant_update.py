"""PC204: an update is much larger than the stream that it is added to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import median
from propcheck.formatting import count, number
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import grouped, place_of, siblings, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

RULE = Rule(
    id="PC204",
    name="dominant-update",
    severity="warning",
    threshold=10.0,
    unit="update_rms / stream_rms",
    sees="An update that dwarfs the stream it is added to.",
    why="The sum then is nearly the update alone. What earlier blocks wrote is drowned, the identity path carries almost "
    "nothing, and a small change of that branch's parameters changes the whole output.",
    formula="update_ratio > threshold. Sites that are adjacent, or consecutive among their kind, are one finding. If all of "
    "them lie in the first block and PC205 already reports that this block dwarfs the embedding, only PC205 is reported. If "
    "the stream at all of them is so small that a norm's eps outweighs it, only PC208 is.",
    basis="Updates as large as the stream are normal in the first blocks and in post-norm (a ratio of 1.4 at the first site "
    "without depth scaling, 3.4 with wide gated networks). At 10 the stream makes up 1 % of the mean square of the sum. No "
    "published cut-off was found; the number is this tool's own.",
    source="Liu 2020, arXiv 2004.08249 (heavy dependency on residual branches amplifies parameter changes and makes training "
    "unstable).",
    remedy="Scale the branch's output projection down (1/sqrt(2 x blocks)), or raise the embedding to the scale of the "
    "updates.",
    example=Example(
        broken="nn.init.normal_(self.down.weight, std=1.0)",
        repaired="nn.init.normal_(self.down.weight, std=0.02 / math.sqrt(2 * blocks))",
    ),
    caused_by=(("PC205", "same"), ("PC206", "touching"), ("PC208", "same")),
)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge the update ratio at each site."""
    flagged = [
        i for i, site in enumerate(profile.sites) if site.update_ratio is not None and threshold < site.update_ratio < math.inf
    ]
    return [_hit(profile, group, threshold) for group in grouped(profile, flagged)]


def _hit(profile: Profile, group: Sequence[SiteRecord], threshold: float) -> Hit:
    worst = max(group, key=lambda site: site.update_ratio or 0.0)
    before, after = siblings(profile, profile.sites.index(worst))
    more = (
        f" {count(len(group), 'site').capitalize()} from {site_label(group[0])} to {site_label(group[-1])} are above "
        f"x{number(threshold)}."
        if len(group) > 1
        else ""
    )
    return Hit(
        sites=tuple(site.site for site in group),
        place=place_of(worst),
        metric="update_ratio",
        value=worst.update_ratio,
        expected=median([profile.sites[i].update_ratio for i in (*before, *after)]),
        message=f"The update at {site_label(worst)} is x{number(worst.update_ratio)} the stream it is added to (RMS "
        f"{number(worst.update_rms)} on {number(worst.stream_rms)}): it drowns what earlier blocks wrote.{more}",
    )
