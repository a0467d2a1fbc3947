"""How every parameter of the reference decoder gets its first value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from propcheck.decoder.deltanet import GatedDeltaNet
from propcheck.decoder.norms import RMSNorm
from propcheck.decoder.residual import Update, deepnorm_beta

if TYPE_CHECKING:
    from propcheck.decoder.config import DecoderConfig

# The last module name of the weights with a role of their own.
EMBEDDINGS = frozenset({"embedding", "position_embedding"})
RESIDUAL_PROJECTIONS = frozenset({"o_proj", "out_proj", "down_proj"})  # they write the update
# DeepNorm's β goes to value, output and FFN weights (arXiv 2203.00555, fig. 2). The paper knows no DeltaNet: there the
# output projection gets it; the value rows of in_proj_qkv do not, for the head norm behind them would undo it.
DEEPNORM_GAINS = RESIDUAL_PROJECTIONS | {"v_proj", "gate_proj", "up_proj"}


def weight_std(name: str, fan_in: int, fan_out: int, config: DecoderConfig) -> float:
    """Give the standard deviation that the weight of a linear, embedding or convolution module is drawn with.

    normal: std · gpt2: std, residual projections std / sqrt(2N) (GPT-2; as megatron) · xavier: sqrt(2 / (fan_in + fan_out))
    (Glorot & Bengio 2010) · he: sqrt(2 / fan_in) (arXiv 1502.01852) · fan-in: 1 / sqrt(fan_in) (LeCun 1998) ·
    small: sqrt(2 / (5 width)) (arXiv 1910.05895), residual projections / sqrt(2N). N is the number of layers.

    Parameters
    ----------
    name : str
        The module's own name: ``q_proj``, ``down_proj``, ``embedding``, ``conv1d``, ``head`` ...
    fan_in, fan_out : int
        Of a linear layer; an embedding [rows, width] has fan_in = width and fan_out = rows, like the head it may be tied
        to; each channel of a depthwise convolution has the number of taps for both.
    config : DecoderConfig
        Scheme, overrides, depth and width.

    Returns
    -------
    float
        Standard deviation of the zero-mean normal draw.
    """
    init, layers = config.init, config.model.layers
    if name in EMBEDDINGS and init.embedding_std is not None:
        return init.embedding_std
    if name == "conv1d" and init.convolution_std is not None:
        return init.convolution_std

    by_depth = 1.0 / math.sqrt(2 * layers) if name in RESIDUAL_PROJECTIONS else 1.0
    match init.scheme:
        case "normal":
            std = init.std
        case "gpt2":
            std = init.std * by_depth
        case "xavier":
            std = math.sqrt(2.0 / (fan_in + fan_out))
        case "he":
            std = math.sqrt(2.0 / fan_in)
        case "fan-in":
            std = math.sqrt(1.0 / fan_in)
        case "small":
            std = math.sqrt(2.0 / (5.0 * config.model.width)) * by_depth
    if config.residual.placement == "deepnorm" and name in DEEPNORM_GAINS:
        std *= deepnorm_beta(layers)
    return std


def initialise(model: nn.Module, config: DecoderConfig) -> None:
    """Give every parameter of ``model``, a decoder made from ``config``, its first value, in place.

    Weights are drawn from N(0, ``weight_std``), biases are zero, gains one. One plain in-place call a parameter and no
    branch on a value: the construction can be recorded under torch's ``FakeTensorMode`` and replayed.
    """
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name == "head" and config.model.tied_head:
            continue  # its weight is the embedding's, drawn already
        match module:
            case nn.Linear():
                nn.init.normal_(module.weight, std=weight_std(name, module.in_features, module.out_features, config))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.Embedding():
                nn.init.normal_(module.weight, std=weight_std(name, module.embedding_dim, module.num_embeddings, config))
            case nn.Conv1d():
                taps = module.kernel_size[0]
                nn.init.normal_(module.weight, std=weight_std(name, taps, taps, config))
            case RMSNorm() | nn.LayerNorm() | GatedDeltaNet() | Update():
                module.reset_parameters()


def hold_in_fp32(model: nn.Module, names: tuple[str, ...]) -> None:
    """Replace each parameter whose last name part is in ``names`` by an empty one of the same shape in fp32."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in names:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)))
