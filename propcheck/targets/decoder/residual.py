"""How an update joins the stream: ten placements of the norm and four scales of the update."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.decoder import Placement, ResidualConfig

# The equation of one sublayer. `mix-ln` has no equation of its own, and that of `sub-ln` is the one of `pre`.
Equation = Literal["pre", "post", "sandwich", "reordered", "deepnorm", "lns", "keel", "none"]

# Placements whose block normalises what it reads: at the end of the stack the stream itself is still unnormalised, so
# the head needs one more norm (arXiv 2002.04745 for pre, 2502.02732 for sandwich, 2210.06423 for sub-ln, 2502.05795 for lns,
# 2412.13795 for mix-ln, whose last blocks are pre). So too `reordered` (OLMo 2, arXiv 2501.00656), whose norms sit on the
# updates. `post`, `deepnorm` and `keel` end in a norm already (arXiv 1706.03762, 2203.00555, 2601.19895); `none` has no norm on
# the stream anywhere.
FINAL_NORM: frozenset[Placement] = frozenset({"pre", "sandwich", "reordered", "sub-ln", "lns", "mix-ln"})

MIX_LN_POST_SHARE = 0.25  # of the blocks, rounded down, are post, the others pre (arXiv 2412.13795)


def deepnorm_alpha(layers: int) -> float:
    """Give the factor on the stream, (2N)^(1/4) for a decoder of N ``layers`` (DeepNet, arXiv 2203.00555)."""
    return math.sqrt(math.sqrt(2.0 * layers))


def deepnorm_beta(layers: int) -> float:
    """Give the gain of value, output and FFN weights, (8N)^(-1/4) for a decoder of N ``layers`` (arXiv 2203.00555)."""
    return 1.0 / math.sqrt(math.sqrt(8.0 * layers))


def sub_ln_gain(layers: int) -> float:
    """Give the gain of value, output and FFN weights, sqrt(ln(2N)) for a decoder of N ``layers`` (arXiv 2210.06423)."""
    return math.sqrt(math.log(2.0 * layers))


def equation(placement: Placement, layer: int, layers: int, *, mixer: bool) -> tuple[Equation, float]:
    """Give the equation of one sublayer of a decoder and its constant α.

    Parameters
    ----------
    placement : str
        Of the decoder.
    layer, layers : int
        Index of the sublayer's block, from 0, and the number of blocks.
    mixer : bool
        Whether it is the block's mixer, not its feed-forward network.
    """
    match placement:
        case "deepnorm":
            return "deepnorm", deepnorm_alpha(layers)
        case "lns":
            return "lns", 1.0 / math.sqrt(layer + 1)
        case "mix-ln":
            return "post" if layer < int(MIX_LN_POST_SHARE * layers) else "pre", 1.0
        case "keel" if layer == 0:  # arXiv 2601.19895: no α in the first block, and no outer norm at its mixer
            return "pre" if mixer else "keel", 1.0
        case "keel":
            return "keel", 2.0 * layers  # as many as there are sublayers
        case "sub-ln":
            return "pre", 1.0
        case _:
            return placement, 1.0


def add_update(
    placement: Equation,
    stream: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    *,
    norm: Callable[[Tensor], Tensor] | None,
    output_norm: Callable[[Tensor], Tensor] | None,
    update: Callable[[Tensor], Tensor],
    alpha: float,
) -> Tensor:
    """Run one sublayer F and add its update to the stream x.

    Each sum is a plain ``stream + update`` of two tensors of one shape; every factor is an operation of its own before it.

    Parameters
    ----------
    placement : str
        Which of the equations below.
    stream : Tensor
        x, [batch, tokens, width].
    sublayer : callable
        F, a mixer or a feed-forward network.
    norm : callable or None
        N; None for ``none``.
    output_norm : callable or None
        The second norm M of ``sandwich`` and ``keel``, else None.
    update : callable
        Residual scale and dropout: what F's output passes just before it is added.
    alpha : float
        α: factor on the stream in ``deepnorm`` and ``keel``, on what F reads in ``lns``; not read otherwise.

    Returns
    -------
    Tensor
        The new stream, [batch, tokens, width].
    """
    match placement:
        case "pre":  # x + F(N x), arXiv 2002.04745
            assert norm is not None
            return stream + update(sublayer(norm(stream)))
        case "post":  # N(x + F x), arXiv 1706.03762
            assert norm is not None
            return norm(stream + update(sublayer(stream)))
        case "sandwich":  # x + M(F(N x)), Peri-LN, arXiv 2502.02732
            assert norm is not None
            assert output_norm is not None
            return stream + update(output_norm(sublayer(norm(stream))))
        case "reordered":  # x + N(F x), OLMo 2, arXiv 2501.00656
            assert norm is not None
            return stream + update(norm(sublayer(stream)))
        case "deepnorm":  # N(αx + F x), DeepNet, arXiv 2203.00555
            assert norm is not None
            return norm(stream * alpha + update(sublayer(stream)))
        case "lns":  # x + F(α N x), LayerNorm scaling, arXiv 2502.05795
            assert norm is not None
            return stream + update(sublayer(norm(stream) * alpha))
        case "keel":  # M(αx + F(N x)), arXiv 2601.19895
            assert norm is not None
            assert output_norm is not None
            skip = stream if alpha == 1.0 else stream * alpha
            return output_norm(skip + update(sublayer(norm(stream))))
        case "none":  # x + F x
            return stream + update(sublayer(stream))


class Update(nn.Module):
    """Residual scale and dropout of one sublayer's update.

    ``plain`` 1 · ``rezero`` α, one learned number, 0 at the start (arXiv 2003.04887) · ``layerscale`` γ, a learned number
    for each element of the width, ``config.layerscale`` at the start (arXiv 2103.17239) · ``depth`` (2N)^-p for N layers,
    p = ``config.depth_power``: 1/2 in depth-μP (arXiv 2310.02244), 1 in CompleteP (arXiv 2505.01618).

    Parameters
    ----------
    width : int
        Width of the stream.
    layers : int
        N, blocks of the decoder.
    config : ResidualConfig
        Kind of scale and its constants.
    dropout : float
        Probability with which an element of the update is dropped in training.
    """

    def __init__(self, width: int, layers: int, config: ResidualConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.start = 0.0 if config.scale == "rezero" else config.layerscale
        self.factor = (2.0 * layers) ** -config.depth_power if config.scale == "depth" else 1.0
        self.scale: nn.Parameter | None = None
        if config.scale in ("rezero", "layerscale"):
            self.scale = nn.Parameter(torch.empty(1 if config.scale == "rezero" else width))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned scale to its first value."""
        if self.scale is not None:
            nn.init.constant_(self.scale, self.start)

    def forward(self, update: Tensor) -> Tensor:
        """Scale ``update`` [batch, tokens, width]; the result has its shape and dtype."""
        if self.scale is not None:
            update = update * self.scale.to(update.dtype)
        elif self.factor != 1.0:
            update = update * self.factor
        return F.dropout(update, self.dropout, self.training) if self.dropout else update
