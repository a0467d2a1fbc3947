"""PC210: all tokens become the same vector with depth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import median
from propcheck.formatting import number, percent
from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

# The share of the depth, at its end, that is judged.
_LAST_SHARE = 0.25
# 1 - cosine must have fallen by this factor: inputs that are alike from the start are not the model's fault.
_FALL = 10.0

RULE = Rule(
    id="PC210",
    name="token-collapse",
    severity="warning",
    threshold=0.99,
    unit="mean cosine between the token vectors of the stream, in the last quarter of the depth",
    sees="A stream in which all tokens become the same vector with depth (rank collapse).",
    why="Attention averages tokens. If nothing keeps them apart, every block makes them more alike. Once they are equal, "
    "attention has nothing to choose from, the gradients of queries and keys vanish, and the head gets one vector for all "
    "positions.",
    formula="token_correlation of the sum is the mean cosine over all pairs of tokens. Broken if its median over the sites of "
    "the last quarter of the blocks is > threshold, while the first site's is below it and 1 - cosine has fallen by more than "
    f"{_FALL:g} in between. So inputs that are alike from the start are not flagged. Each stream is judged by itself.",
    basis="At 0.99, 1 % of the mean square tells tokens apart, as in PC204. The number is this tool's own; no published "
    "cut-off was found. Measured on reference decoders of width 128: pre-norm of 48 to 192 blocks ends at 0.07 to 0.96 (ReLU "
    "is the highest), sandwich and reordered of 64 at 0.3 to 0.6, DeepNorm at 0.02, post-norm of 12 to 48 blocks with GELU at "
    "0.03 to 0.98; post-norm of 64 with unscaled branches at 0.98 to 1, with branches / sqrt(2 x blocks) at 0.04.",
    source="Dong 2021, arXiv 2103.03404 (without residuals attention collapses to rank 1, doubly exponentially with depth); "
    "Noci 2022, arXiv 2206.03126 (aligned tokens make the gradients of queries and keys vanish at initialisation; post-norm "
    "aligns them more with depth, unless the residual branches are scaled).",
    remedy="Scale the branches down with depth (1/sqrt(2 x blocks), or DeepNorm's constants if the norm follows the addition), "
    "or put the norm on the branch.",
    example=Example(
        broken="x = self.norm(x + self.attention(x))  # post-norm, 64 blocks",
        repaired="x = self.norm(x + self.attention(x) / math.sqrt(2 * blocks))",
    ),
    caused_by=(("PC209", "any"),),
)


@RULE.checked_by
def check(profile: Profile, _run: Run, threshold: float) -> list[Hit]:
    """Judge the mean cosine between tokens in the last quarter of the depth."""
    observed = [(site, value) for site in profile.sites if (value := _finite(site.token_correlation)) is not None]
    late_units = profile.units[math.floor(len(profile.units) * (1 - _LAST_SHARE)) :]
    end = median([_finite(site.token_correlation) for unit in late_units for site in unit])
    if not observed or end is None:
        return []
    first_site, first = observed[0]
    if not first < threshold < end or not 1 - first > _FALL * (1 - end):
        return []
    last_below = max(index for index, (_, value) in enumerate(observed) if value <= threshold)
    collapsed = [site for site, _ in observed[last_below + 1 :]]
    if not collapsed:
        return []
    return [
        Hit(
            sites=tuple(site.site for site in collapsed),
            place=place_of(collapsed[0]),
            metric="token_correlation",
            value=end,
            expected=first,
            message=f"The tokens become alike. The mean cosine between their vectors rises from {number(first)} after "
            f"{site_label(first_site)} to {_near_one(end)} in the last quarter of the depth, and stays above "
            f"{number(threshold)} from {site_label(collapsed[0])} on. Only {percent(max(0.0, 1 - end))} of the mean square "
            "still tells tokens apart, so attention has little to choose from.",
        )
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _near_one(cosine: float) -> str:
    """Write a cosine by its distance from 1."""
    return f"1 - {number(1 - cosine)}" if cosine < 1 else "1"
