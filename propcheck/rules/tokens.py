"""Tokens that become alike on their way through the depth: PC210."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import Profile, median
from propcheck.formatting import number, percent
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.sites import place_of, site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Run, SiteRecord

# The end of the depth that is judged.
_LAST_SHARE = 0.25
# What differs between tokens must have fallen by this factor: inputs that are alike are not the model's doing.
_FALL = 10.0


def _token_collapse(curve: Profile, _run: Run, limit: float) -> Sequence[Hit]:
    known = [record for record in curve.sites if _correlation(record) is not None]
    last = [record for unit in curve.units[math.floor(len(curve.units) * (1 - _LAST_SHARE)) :] for record in unit]
    first, end = _correlation(known[0]) if known else None, median([_correlation(record) for record in last])
    if first is None or end is None or not first < limit < end or not 1 - first > _FALL * (1 - end):
        return []
    below = max(index for index, record in enumerate(known) if (_correlation(record) or 0.0) <= limit)
    collapsed = known[below + 1 :]
    if not collapsed:
        return []
    return [
        Hit(
            sites=tuple(record.site for record in collapsed),
            place=place_of(collapsed[0]),
            metric="token_correlation",
            value=end,
            expected=first,
            message=f"The tokens become alike: the mean cosine between their vectors rises from {number(first)} after "
            f"{site_label(known[0])} to {_near_one(end)} in the last quarter of the depth, and stays above {number(limit)} "
            f"from {site_label(collapsed[0])} on. Only {percent(max(0.0, 1 - end))} of the mean square there tells one "
            "token from another.",
        )
    ]


def _correlation(record: SiteRecord) -> float | None:
    value = record.token_correlation
    return value if value is not None and math.isfinite(value) else None


def _near_one(value: float) -> str:
    """Write a cosine so that its distance from 1 is seen."""
    return f"1 - {number(1 - value)}" if value < 1 else "1"


TOKEN_COLLAPSE = Rule(
    id="PC210",
    name="token-collapse",
    severity="warning",
    threshold=0.99,
    unit="mean cosine between the token vectors of the stream, in the last quarter of the depth",
    sees="A stream in which all tokens become the same vector with depth (rank collapse).",
    why="Attention averages tokens, and where nothing keeps them apart every block makes them more alike. Once they are, "
    "attention has nothing to choose between: the gradients of queries and keys vanish, and the head gets one vector for all "
    "positions.",
    formula="token_correlation of the sum, the mean cosine over all pairs of tokens: its median over the sites of the last "
    "quarter of the blocks > threshold, while the first site's is below it and 1 - cosine has fallen by more than "
    f"{_FALL:g} in between, so that inputs which are alike from the start are silent. Each stream by itself.",
    basis="At 0.99, 1 % of the mean square tells tokens apart, as in PC204; the number is this tool's own, no published "
    "cut-off was found. Measured on reference decoders of width 128: pre-norm of 48 to 192 blocks ends at 0.07 to 0.96 (ReLU "
    "is the highest), sandwich and reordered of 64 at 0.3 to 0.6, DeepNorm at 0.02, post-norm of 12 to 48 blocks with GELU at "
    "0.03 to 0.98; post-norm of 64 with unscaled branches at 0.98 to 1, with branches / sqrt(2 x blocks) at 0.04.",
    source="Dong 2021, arXiv 2103.03404 (without residuals attention collapses to rank 1, doubly exponentially with depth); "
    "Noci 2022, arXiv 2206.03126 (aligned tokens make the gradients of queries and keys vanish at initialisation; post-norm "
    "aligns them more with depth, unless the residual branches are scaled).",
    remedy="Scale the branches down with depth (1/sqrt(2 x blocks), or DeepNorm's constants where the norm follows the "
    "addition), or put the norm on the branch.",
    check=_token_collapse,
    caused_by=(("PC209", "any"),),
)

RULES = (TOKEN_COLLAPSE,)
