"""Formulas of the init schemes: the standard deviation of each kind of weight.

The reference decoder draws its weights with them; rule PC104 checks the weights of a model against those of the probe's
``[expect]`` section. This module does not import torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from propcheck.config.decoder import InitScheme

# The role of a weight. output: a residual projection, whose output is the update; up: the up projection of a gated
# feed-forward network; inner: every other matrix of a block.
WeightKind = Literal["embedding", "head", "output", "up", "inner"]

# Schemes whose formulas do not contain fan_in or fan_out.
WITHOUT_FANS: frozenset[InitScheme] = frozenset({"normal", "gpt2", "megatron", "small", "olmo-llama"})


def scheme_std(  # noqa: PLR0913 - the symbols of the formulas
    scheme: InitScheme, kind: WeightKind, fan_in: int, fan_out: int, *, width: int, layers: int, std: float
) -> float:
    """Return the standard deviation with which a scheme draws a weight, before any truncation.

    With N layers:

    - ``normal``: std.
    - ``gpt2``, ``megatron``: std; outputs std / sqrt(2N) (GPT-2; arXiv 1909.08053).
    - ``xavier``: sqrt(2 / (fan_in + fan_out)) (Glorot and Bengio 2010).
    - ``he``: sqrt(2 / fan_in) (arXiv 1502.01852).
    - ``fan-in``: 1 / sqrt(fan_in) (LeCun 1998).
    - ``small``: sqrt(2 / (5 width)), outputs / sqrt(2N) (arXiv 1910.05895).
    - ``olmo-llama``: std; outputs and up / sqrt(2N); head 1 / sqrt(width); embeddings 1 (``InitMethod.llama`` of
      allenai/OLMo-core).

    Parameters
    ----------
    scheme, kind
        Init scheme and role of the weight.
    fan_in, fan_out
        Of the weight; an embedding [rows, width] has fan_in = width and fan_out = rows, like the head it may be tied to.
    width, layers
        Width of the model's stream and its number of blocks, each of two sublayers.
    std
        Base of ``normal``, ``gpt2``, ``megatron`` and ``olmo-llama``.
    """
    depth_factor = 1.0 / math.sqrt(2 * layers)
    match scheme:
        case "xavier":
            std = math.sqrt(2.0 / (fan_in + fan_out))
        case "he":
            std = math.sqrt(2.0 / fan_in)
        case "fan-in":
            std = math.sqrt(1.0 / fan_in)
        case "small":
            std = math.sqrt(2.0 / (5.0 * width))
        case "olmo-llama" if kind == "embedding":
            std = 1.0
        case "olmo-llama" if kind == "head":
            std = 1.0 / math.sqrt(width)
    scaled = {"gpt2": ("output",), "megatron": ("output",), "small": ("output",), "olmo-llama": ("output", "up")}
    return std * depth_factor if kind in scaled.get(scheme, ()) else std
