"""PC201: the stream grows by a factor in every block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.growth import stream_growth
from propcheck.analysis.profile import compounding, stream_steps
from propcheck.formatting import count, number
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.site_groups import place_of
from propcheck.rules.trends import growth_law, judged_blocks, judged_sites, main_sublayer

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

# Square-root growth over the judged three quarters, as a factor over the whole depth.
_ADDITIVE = 4 ** (2 / 3)

RULE = Rule(
    id="PC201",
    name="explosion",
    severity="error",
    threshold=10.0,
    least=1.0,
    unit="factor that the average block's growth compounds to over the depth; an error above its square, else a warning",
    sees="A stream that every block multiplies instead of adding to it.",
    why="A factor per block is raised to the power of the depth: 1.1^64 = 446. The last sublayers then work at another scale "
    "than the first, half precision overflows, and networks whose activations grow exponentially with depth fail to start "
    "training.",
    formula="r = geometric mean of sum_rms(block) / sum_rms(block before), over the blocks after the first quarter of the "
    "depth, without the largest tenth of the factors (a single jump is PC205). The rule is broken if r^blocks > threshold. A "
    "power law depth^p gives 4^(4p/3) at any depth. So growth like sqrt(depth) gives 2.52 and is never flagged, whatever its "
    "end value. The message says whether depth^p or a factor per block fits better (least squares of the logarithm, over the "
    "same blocks).",
    basis="Updates of equal size grow the stream at most linearly from the first block on, which gives 6.35. Trained GPT-2 XL "
    "grows x1.045 per layer, 1.045^48 = 8.3, and is healthy. The threshold 10 is above both, and 1.1^64 = 446 is far above it. "
    "No published cut-off was found; the number is this tool's own.",
    source="Hanin and Rolnick 2018, arXiv 1803.01719 (activation length that grows with depth, residual networks included); "
    "Xiong 2020, arXiv 2002.04745, Lemma 2 (additive pre-norm growth); Heimersheim and Turner 2023 (trained GPT-2 XL).",
    remedy="Let the branch read the stream through a norm, or scale the branch by 1/sqrt(2 x blocks). Check the residual path "
    "for x = x + x or a gain above 1.",
    example=Example(
        broken="x = x + self.mlp(x)  # no norm: the update grows with the stream",
        repaired="x = x + self.mlp(self.norm(x))",
    ),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Judge the average growth of the stream per block."""
    steps, units, noun = stream_steps(profile), len(profile.units), profile.noun
    trend = compounding(steps, units, rising=True)
    if trend is None or not trend.compounded > threshold:
        return []
    steepest = profile.units[max(trend.kept, key=lambda j: steps[j])][-1]
    healthy = _ADDITIVE ** (1 / units)
    # A doubled stream grows between the sites, so no kind of sublayer has a share in it.
    origin = "" if run.doublings else main_sublayer(profile, trend)
    return [
        Hit(
            sites=judged_sites(profile, trend),
            place=place_of(steepest),
            metric=f"sum_rms factor a {noun}",
            value=trend.factor,
            expected=healthy,
            message=f"The stream grows x{number(trend.factor)} per {noun} over {judged_blocks(profile, trend)}, which "
            f"compounds to x{number(trend.compounded)} over {count(units, noun)}. With updates of equal size it would grow "
            f"about x{number(healthy)} per {noun}, x{number(_ADDITIVE)} in "
            f"all.{growth_law(stream_growth(profile), 'grows', noun)}{origin}",
            severity="error" if trend.compounded > threshold**2 else "warning",
        )
    ]
