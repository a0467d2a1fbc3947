"""The scale at which an init scheme draws each kind of weight: the only definition of the formulas.

The reference decoder draws by them, and a probe's ``[expect]`` section holds a model's weights against them. Nothing here
imports torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from propcheck.config.decoder import InitScheme

# What a weight is for. output: a residual projection, which writes the update; up: what a gated feed-forward network
# multiplies with its gate; inner: every other matrix of a block.
WeightKind = Literal["embedding", "head", "output", "up", "inner"]

# Schemes that say nothing of a matrix's fans.
WITHOUT_FANS: frozenset[InitScheme] = frozenset({"normal", "gpt2", "megatron", "small", "olmo-llama"})


def scheme_std(
    scheme: InitScheme, kind: WeightKind, fan_in: int, fan_out: int, *, width: int, layers: int, std: float
) -> float:
    """Give the standard deviation with which a scheme draws a weight, before any cut of the tails.

    normal: std · gpt2, megatron: std, outputs std / sqrt(2N) (GPT-2; arXiv 1909.08053) · xavier: sqrt(2 / (fan_in + fan_out))
    (Glorot and Bengio 2010) · he: sqrt(2 / fan_in) (arXiv 1502.01852) · fan-in: 1 / sqrt(fan_in) (LeCun 1998) ·
    small: sqrt(2 / (5 width)) (arXiv 1910.05895), outputs / sqrt(2N) · olmo-llama: std, outputs and up / sqrt(2N), head
    1 / sqrt(width), embeddings 1 (``InitMethod.llama`` of allenai/OLMo-core). N is the number of layers.

    Parameters
    ----------
    scheme, kind
        Of the init and of the weight.
    fan_in, fan_out
        Of the weight; an embedding [rows, width] has fan_in = width and fan_out = rows, like the head it may be tied to.
    width, layers
        Of the model: elements of its stream, and blocks of two sublayers each.
    std
        The base of normal, gpt2, megatron and olmo-llama.
    """
    by_depth = 1.0 / math.sqrt(2 * layers)
    match scheme:
        case "normal":
            return std
        case "gpt2" | "megatron":
            return std * by_depth if kind == "output" else std
        case "xavier":
            return math.sqrt(2.0 / (fan_in + fan_out))
        case "he":
            return math.sqrt(2.0 / fan_in)
        case "fan-in":
            return math.sqrt(1.0 / fan_in)
        case "small":
            return math.sqrt(2.0 / (5.0 * width)) * (by_depth if kind == "output" else 1.0)
        case "olmo-llama":
            if kind == "embedding":
                return 1.0
            if kind == "head":
                return 1.0 / math.sqrt(width)
            return std * by_depth if kind in ("output", "up") else std
