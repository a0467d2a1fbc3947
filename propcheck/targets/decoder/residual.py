"""How an update is added to the stream: ten placements of the norm, four scales of the update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.decoder import Placement, ResidualConfig

# The equation of one sublayer. Each block of `mix-ln` is `post` or `pre`; `sub-ln` has the equation of `pre`.
Equation = Literal["pre", "post", "sandwich", "reordered", "deepnorm", "lns", "keel", "none"]

# Placements that leave the stream unnormalised at the end of the stack, so that the head needs one more norm (arXiv 2002.04745
# for pre, 2502.02732 for sandwich, 2501.00656 for reordered, 2210.06423 for sub-ln, 2502.05795 for lns, 2412.13795 for mix-ln,
# whose last blocks are pre). `post`, `deepnorm` and `keel` end in a norm (arXiv 1706.03762, 2203.00555, 2601.19895); `none`
# has no norm on the stream.
FINAL_NORM: frozenset[Placement] = frozenset({"pre", "sandwich", "reordered", "sub-ln", "lns", "mix-ln"})

MIX_LN_POST_SHARE = 0.25  # the first quarter of the blocks, rounded down, is post (arXiv 2412.13795)


def deepnorm_alpha(layers: int) -> float:
    """Return the factor on the stream, (2N)^(1/4) for a decoder of N ``layers`` (DeepNet, arXiv 2203.00555)."""
    return math.sqrt(math.sqrt(2.0 * layers))


def deepnorm_beta(layers: int) -> float:
    """Return the gain of value, output and FFN weights, (8N)^(-1/4) for a decoder of N ``layers`` (arXiv 2203.00555)."""
    return 1.0 / math.sqrt(math.sqrt(8.0 * layers))


def sub_ln_gain(layers: int) -> float:
    """Return the gain of value, output and FFN weights, sqrt(ln(2N)) for a decoder of N ``layers`` (arXiv 2210.06423)."""
    return math.sqrt(math.log(2.0 * layers))


def equation(placement: Placement, layer: int, layers: int, *, mixer: bool) -> tuple[Equation, float]:
    """Return the equation of one sublayer and its constant α (1 if the equation has none).

    Parameters
    ----------
    placement : str
        Placement of the decoder.
    layer, layers : int
        Index of the sublayer's block, from 0, and the number of blocks.
    mixer : bool
        Whether the sublayer is the block's mixer or its feed-forward network.
    """
    alpha = 1.0
    match placement:
        case "sub-ln":
            return "pre", alpha
        case "mix-ln":
            return "post" if layer < int(MIX_LN_POST_SHARE * layers) else "pre", alpha
        case "keel" if layer == 0:  # arXiv 2601.19895: the first block has α = 1, and its mixer has no outer norm
            return "pre" if mixer else "keel", alpha
        case "keel":
            alpha = 2.0 * layers  # the number of sublayers
        case "deepnorm":
            alpha = deepnorm_alpha(layers)
        case "lns":
            alpha = 1.0 / math.sqrt(layer + 1)
    return placement, alpha


@dataclass(frozen=True, slots=True)
class Sublayer:
    """The parts of a sublayer's equation; each function maps [batch, tokens, width] to the same shape.

    Attributes
    ----------
    function : callable
        F, the mixer or the feed-forward network.
    norm : callable or None
        N; None for ``none``.
    output_norm : callable or None
        M, the second norm of ``sandwich`` and ``keel``; else None.
    update : callable
        Residual scale and dropout of an update, just before it is added.
    alpha : float
        α, the factor on the stream in ``deepnorm`` and ``keel``, and on the input of F in ``lns``; unused otherwise.
    """

    function: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor] | None
    output_norm: Callable[[Tensor], Tensor] | None
    update: Callable[[Tensor], Tensor]
    alpha: float


def add_update(equation: Equation, x: Tensor, sublayer: Sublayer) -> Tensor:
    """Run a sublayer on the stream ``x`` and add its update; both are [batch, tokens, width].

    Each sum is a plain ``stream + update`` of two tensors of one shape; every factor is applied before it.
    """
    F, update, alpha = sublayer.function, sublayer.update, sublayer.alpha
    N, M = sublayer.norm or _identity, sublayer.output_norm or _identity
    match equation:
        case "pre":  # x + F(N x), arXiv 2002.04745
            x = x + update(F(N(x)))
        case "post":  # N(x + F x), arXiv 1706.03762
            x = N(x + update(F(x)))
        case "sandwich":  # x + M(F(N x)), Peri-LN, arXiv 2502.02732
            x = x + update(M(F(N(x))))
        case "reordered":  # x + N(F x), OLMo 2, arXiv 2501.00656
            x = x + update(N(F(x)))
        case "deepnorm":  # N(αx + F x), DeepNet, arXiv 2203.00555
            x = N(x * alpha + update(F(x)))
        case "lns":  # x + F(α N x), LayerNorm scaling, arXiv 2502.05795
            x = x + update(F(N(x) * alpha))
        case "keel":  # M(αx + F(N x)), arXiv 2601.19895
            skip = x if alpha == 1.0 else x * alpha
            x = M(skip + update(F(N(x))))
        case "none":  # x + F x
            x = x + update(F(x))
    return x


def _identity(x: Tensor) -> Tensor:
    return x


class UpdateScale(nn.Module):
    """Residual scale and dropout of one sublayer's update.

    - ``plain``: 1.
    - ``rezero``: α, a learned scalar, initially 0 (arXiv 2003.04887).
    - ``layerscale``: γ, a learned vector [width], initially ``config.layerscale`` (arXiv 2103.17239).
    - ``depth``: (2N)^-p for N layers with p = ``config.depth_power``: 1/2 in depth-μP (arXiv 2310.02244), 1 in CompleteP
      (arXiv 2505.01618).

    Parameters
    ----------
    width : int
        Width of the stream.
    layers : int
        N, the number of blocks.
    config : ResidualConfig
        Kind and constants of the scale.
    dropout : float
        Probability of dropping an element of the update in training.
    """

    def __init__(self, width: int, layers: int, config: ResidualConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.initial_scale = 0.0 if config.scale == "rezero" else config.layerscale
        self.factor = (2.0 * layers) ** -config.depth_power if config.scale == "depth" else 1.0
        self.scale: nn.Parameter | None = None
        if config.scale in ("rezero", "layerscale"):
            self.scale = nn.Parameter(torch.empty(1 if config.scale == "rezero" else width))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned scale to its initial value."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.initial_scale)

    def forward(self, update: Tensor) -> Tensor:
        """Scale ``update`` [batch, tokens, width]; the result has its shape and dtype."""
        if self.scale is not None:
            update = update * self.scale.to(update.dtype)
        elif self.factor != 1.0:
            update = update * self.factor
        return nn.functional.dropout(update, self.dropout, self.training) if self.dropout else update
