"""PC202: the stream shrinks by a factor in every block, or is exactly zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.growth import stream_growth
from propcheck.analysis.profile import compounding, stream_steps
from propcheck.formatting import count, number
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label
from propcheck.rules.trends import growth_law, judged_blocks, judged_sites, main_sublayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord

RULE = Rule(
    id="PC202",
    name="collapse",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor that the average block's decay compounds to over the depth; an error above its square, else a warning",
    sees="A stream that every block shrinks, or that is exactly zero somewhere.",
    why="0.9^64 = 0.0012: what the input wrote into the stream is gone before the head reads it.",
    formula="r as in PC201, but without the smallest tenth of the factors. Broken if r^blocks < 1 / threshold, or if any "
    "sum_rms is exactly 0. A flat stream, as post-norm has, gives 1.",
    basis="Adding an update never shrinks the stream unless the update cancels it, so anything clearly below 1 is foreign to "
    "residual architectures; 10 mirrors PC201. No published cut-off was found; the number is this tool's own.",
    source="Hanin and Rolnick 2018, arXiv 1803.01719 (vanishing activation length keeps networks from starting to train).",
    remedy="Check the residual path for a factor below 1 (x * a + F), and for updates that cancel the stream (cosine near -1). "
    "Exact zeros come from an underflow, or from a norm that overflowed just before.",
    example=Example(
        broken="x = 0.9 * x + self.mlp(self.norm(x))  # 0.9^64 = 0.0012",
        repaired="x = x + self.mlp(self.norm(x))",
    ),
)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge exact zeros, else the average decay of the stream per block."""
    # A stream may begin with zeros (learned queries that are zero at the first additions). After that no sum may be zero.
    begun = next((i for i, site in enumerate(profile.sites) if site.stream_rms != 0 or site.sum_rms != 0), 0)
    zero = [site for site in profile.sites[begun:] if site.sum_rms == 0]
    if zero:
        return [_zero_hit(zero)]
    steps, units, noun = stream_steps(profile), len(profile.units), profile.noun
    trend = compounding(steps, units, rising=False)
    if trend is None or not trend.compounded < 1 / threshold:
        return []
    steepest = profile.units[min(trend.kept, key=lambda j: steps[j])][-1]
    return [
        Hit(
            sites=judged_sites(profile, trend),
            place=place_of(steepest),
            metric=f"sum_rms factor a {noun}",
            value=trend.factor,
            expected=1.0,
            message=f"The stream shrinks x{number(trend.factor)} per {noun} over {judged_blocks(profile, trend)}, which "
            f"compounds to x{number(trend.compounded)} over {count(units, noun)}. Additions do not shrink a stream, so x1 or "
            f"more is expected.{growth_law(stream_growth(profile), 'goes', noun)}{main_sublayer(profile, trend)}",
            severity="error" if trend.compounded < 1 / threshold**2 else "warning",
        )
    ]


def _zero_hit(zero: Sequence[SiteRecord]) -> Hit:
    more = f", and so are {count(len(zero) - 1, 'more sum')}" if len(zero) > 1 else ""
    return Hit(
        sites=tuple(site.site for site in zero),
        place=place_of(zero[0]),
        metric="sum_rms",
        value=0.0,
        expected="above 0",
        message=f"The stream is exactly zero after {site_label(zero[0])}{more}. Nothing of the input is left there.",
        severity="error",
    )
