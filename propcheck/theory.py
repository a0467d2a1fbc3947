"""What an architecture predicts for its own gradients, from its forward pass alone.

Symbols: S is the mean square of the stream, f that of an update, b the branch's backward gain, g the norm of the gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import SiteRecord

# b / f at initialisation. A gated product (SwiGLU) has two paths of equal weight: 2.01 to 2.07 computed for pre-activations of
# std 0.2 to 2; ReLU and GELU have 1.00 to 1.07. Measured site by site at the initialisation of transformers' Llama, GPT-2 and
# Qwen3.5 (width 256, 12 to 16 blocks, the first left out): gated mlp 1.6 to 2.8, around 2.1; GELU mlp 1.0 to 1.2; attention up
# to 2.5; Gated DeltaNet 2.9 to 5.6 (its update is a product of values, write strength and output gate).
GAIN_RATIO = {"mlp": 2.07, "moe": 2.07, "attention": 3.0, "linear_attention": 5.0, "ssm": 5.0, "other": 3.0}

# A norm after each addition keeps both passes flat: g_k^2 = g_{k+1}^2 (1+b)/(1+f), near 1 per sublayer when b = f.
NORM_ON_STREAM = frozenset({"post", "deepnorm"})


def expected_gradient_step(sites: Sequence[SiteRecord], depth: int) -> float:
    """Predict the log factor by which a block scales the gradient on its way back.

    Where nothing normalises the stream itself (pre, sandwich, reordered, none), g_k^2 = g_{k+1}^2 (1 + b/S), and
    b/S = (b/f) * update_ratio^2. With updates of one size S grows in proportion to the depth l, so a block's step is at most
    (b/f)/2 * ln((l+1)/l): a 1/sqrt(l) law for b/f = 1, a 1/l law for SwiGLU. That bound caps the prediction: a forward pass
    that explodes does not excuse its gradients.

    Parameters
    ----------
    sites
        The sites of the block.
    depth
        Blocks before it, at least 1.

    Returns
    -------
    float
        Natural logarithm, 0 where a norm follows each addition.

    Notes
    -----
    Derived from uncorrelated updates in the wide limit; the post-norm form follows arXiv 2002.04745.
    """
    if any(site.placement in NORM_ON_STREAM for site in sites):
        return 0.0
    gains = [GAIN_RATIO[site.sublayer] for site in sites]
    additive = max(gains) / 2 * math.log((depth + 1) / depth)
    ratios = [site.update_ratio for site in sites if site.update_ratio is not None and math.isfinite(site.update_ratio)]
    if len(ratios) < len(sites):
        return additive
    return min(additive, sum(math.log(math.hypot(1, gain**0.5 * ratio)) for gain, ratio in zip(gains, ratios, strict=True)))
