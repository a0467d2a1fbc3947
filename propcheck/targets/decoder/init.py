"""Initialise every parameter of the reference decoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from propcheck.targets.decoder.deltanet import GatedDeltaNet
from propcheck.targets.decoder.init_schemes import scheme_std
from propcheck.targets.decoder.normalization import RMSNorm
from propcheck.targets.decoder.residual import UpdateScale, deepnorm_beta, sub_ln_gain

if TYPE_CHECKING:
    from propcheck.config.decoder import DecoderConfig
    from propcheck.targets.decoder.init_schemes import WeightKind

# Names of the modules whose weight has a role of its own.
EMBEDDINGS = frozenset({"embedding", "position_embedding"})
RESIDUAL_PROJECTIONS = frozenset({"o_proj", "out_proj", "down_proj"})  # their output is the update
# DeepNorm's β and sub-LN's γ apply to value, output and FFN weights (arXiv 2203.00555, fig. 2; 2210.06423, fig. 2). The papers
# have no DeltaNet: here its output projection gets the factor, but not the value rows of in_proj_qkv, because the norm after
# them would undo it.
DEPTH_SCALED = RESIDUAL_PROJECTIONS | {"v_proj", "gate_proj", "up_proj"}


def weight_kind(name: str) -> WeightKind:
    """Return the role of the weight of a linear, embedding or convolution module, from the module's own name."""
    if name in EMBEDDINGS:
        return "embedding"
    if name in RESIDUAL_PROJECTIONS:
        return "output"
    return "head" if name == "head" else "up" if name == "up_proj" else "inner"


def weight_std(name: str, fan_in: int, fan_out: int, config: DecoderConfig) -> float:
    """Return the standard deviation of the weight of a linear, embedding or convolution module.

    It follows the scheme (``propcheck.targets.decoder.init_schemes``), its overrides and the factor of the placement.

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
        Standard deviation of the zero-mean normal draw, before the truncation of ``olmo-llama``.
    """
    init, layers = config.init, config.model.layers
    if name in EMBEDDINGS and init.embedding_std is not None:
        return init.embedding_std
    if name == "conv1d" and init.convolution_std is not None:
        return init.convolution_std

    width = config.model.width
    std = scheme_std(init.scheme, weight_kind(name), fan_in, fan_out, width=width, layers=layers, std=init.std)
    if name in DEPTH_SCALED and config.residual.placement == "deepnorm":
        std *= deepnorm_beta(layers)
    elif name in DEPTH_SCALED and config.residual.placement == "sub-ln":
        std *= sub_ln_gain(layers)
    return std


def draw(weight: Tensor, std: float, *, truncated: bool) -> None:
    """Draw ``weight`` from N(0, std²), truncated at ±3 ``std`` if asked, in place."""
    if truncated:
        nn.init.trunc_normal_(weight, std=std, a=-3.0 * std, b=3.0 * std)
    else:
        nn.init.normal_(weight, std=std)


def initialise(model: nn.Module, config: DecoderConfig) -> None:
    """Initialise every parameter of ``model``, a decoder built from ``config``, in place.

    Weights are drawn from N(0, ``weight_std``²), biases are zero, gains one. Each parameter takes one in-place call and no
    branch depends on a value, so that the construction can be recorded under torch's ``FakeTensorMode`` and replayed.
    """
    truncated = config.init.scheme == "olmo-llama"
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if name == "head" and config.model.tied_head:
            continue  # its weight is the embedding's, which is drawn above
        match module:
            case nn.Linear():
                draw(module.weight, weight_std(name, module.in_features, module.out_features, config), truncated=truncated)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            case nn.Embedding():
                draw(module.weight, weight_std(name, module.embedding_dim, module.num_embeddings, config), truncated=False)
            case nn.Conv1d():
                taps = module.kernel_size[0]
                draw(module.weight, weight_std(name, taps, taps, config), truncated=truncated)
            case RMSNorm() | nn.LayerNorm() | GatedDeltaNet() | UpdateScale():
                module.reset_parameters()


def keep_in_fp32(model: nn.Module, names: tuple[str, ...]) -> None:
    """Replace each parameter whose last name part is in ``names`` by an empty fp32 parameter of the same shape."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name in names:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, dtype=torch.float32)))
