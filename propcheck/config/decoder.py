"""Configuration schema of the reference decoder: the ``[model]``, ``[residual]`` and ``[init]`` sections of a probe.

The probe schema includes these sections, the decoder reads them, and the documentation is generated from the
descriptions. This module does not import torch.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mixer = Literal["attention", "deltanet"]
Placement = Literal["pre", "post", "sandwich", "reordered", "deepnorm", "sub-ln", "lns", "mix-ln", "keel", "none"]
ResidualScale = Literal["plain", "rezero", "layerscale", "depth"]
InitScheme = Literal["normal", "gpt2", "megatron", "xavier", "he", "fan-in", "small", "olmo-llama"]


class Section(BaseModel):
    """Base class of all sections: immutable; unknown keys are an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class AttentionConfig(Section):
    """Causal softmax attention."""

    heads: int = Field(8, ge=1, description="Query heads.")
    kv_heads: int | None = Field(None, ge=1, description="Key/value heads (grouped-query attention); default: `heads`.")
    head_width: int | None = Field(None, ge=1, description="Width of one head; default: `width` / `heads`.")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head, before the rotary embedding.")
    gate: bool = Field(
        False, description="Elementwise sigmoid gate on the attention output; the query projection computes the gate."
    )
    rotary: float = Field(
        1.0, ge=0.0, le=1.0, description="Fraction of each head that is rotated; 0 disables the rotary embedding."
    )
    rotary_theta: float = Field(10000.0, gt=0, description="Base of the rotary wavelengths.")
    bias: bool = Field(False, description="Biases on the query, key, value and output projections.")


class DeltaNetConfig(Section):
    """Gated DeltaNet (arXiv 2412.06464) with a chunked delta rule."""

    key_heads: int = Field(4, ge=1, description="Query/key heads.")
    value_heads: int = Field(8, ge=1, description="Value heads, a multiple of `key_heads`.")
    key_head_width: int = Field(32, ge=1, description="Width of one key head.")
    value_head_width: int = Field(32, ge=1, description="Width of one value head.")
    convolution: int = Field(4, ge=1, description="Taps of the causal depthwise convolution over q, k and v.")
    chunk: int = Field(64, ge=1, description="Tokens per chunk of the delta rule.")

    @model_validator(mode="after")
    def _heads_divide(self) -> DeltaNetConfig:
        if self.value_heads % self.key_heads:
            raise ValueError(f"value_heads = {self.value_heads} must be a multiple of key_heads = {self.key_heads}")
        return self


class FFNConfig(Section):
    """The feed-forward network."""

    width: int | None = Field(None, ge=1, description="Inner width; default: 4 x `width`.")
    kind: Literal["swiglu", "geglu", "gelu", "gelu-tanh", "relu"] = Field(
        "swiglu", description="Gated (swiglu, geglu) or plain (gelu, gelu-tanh, relu)."
    )
    bias: bool = Field(False, description="Biases on its projections.")


class NormConfig(Section):
    """The norms of the stream and the updates; QK norms use `eps` and `zero_centered` too."""

    kind: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="RMSNorm or LayerNorm.")
    eps: float = Field(1e-6, ge=0, description="Added to the mean square (RMSNorm) or variance (LayerNorm) under the root.")
    zero_centered: bool = Field(False, description="RMSNorm gain is 1 + w with w = 0 initially, instead of w = 1.")


class ModelConfig(Section):
    """The `[model]` section: shape of the decoder."""

    layers: int = Field(12, ge=1, le=10_000, description="Blocks. Each has a mixer and a feed-forward network: two sites.")
    width: int = Field(768, ge=1, description="Width of the residual stream.")
    vocabulary: int = Field(50257, ge=2, description="Rows of the token embedding.")
    mixers: tuple[Mixer, ...] = Field(
        ("attention",), min_length=1, description="Mixer of each layer; the list repeats over the layers."
    )
    attention: AttentionConfig = Field(default_factory=AttentionConfig, description="Softmax attention.")
    deltanet: DeltaNetConfig = Field(default_factory=DeltaNetConfig, description="Gated DeltaNet.")
    ffn: FFNConfig = Field(default_factory=FFNConfig, description="Feed-forward network.")
    norm: NormConfig = Field(default_factory=NormConfig, description="Normalisation.")
    positions: int = Field(0, ge=0, description="Rows of a learned position embedding; 0 means none.")
    tied_head: bool = Field(False, description="The head shares the embedding's weight.")
    dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout on the embedding and on each update.")

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        attention = self.attention
        if "attention" in self.mixers:
            if attention.head_width is None and self.width % attention.heads:
                raise ValueError(
                    f"attention.heads = {attention.heads} must divide width = {self.width}, or set attention.head_width"
                )
            if attention.heads % (attention.kv_heads or attention.heads):
                raise ValueError(f"attention.heads = {attention.heads} must be a multiple of kv_heads = {attention.kv_heads}")
        return self


class ResidualConfig(Section):
    """The `[residual]` section: how updates are added to the stream."""

    placement: Placement = Field(
        "pre",
        description="pre: x+F(Nx); post: N(x+Fx); sandwich: x+N(F(Nx)); reordered: x+N(Fx); deepnorm: N(ax+Fx) with "
        "a = (2 x layers)^(1/4) and value, output and FFN weights x (8 x layers)^(-1/4); sub-ln: pre with a norm before each "
        "output projection, those weights x sqrt(ln(2 x layers)); lns: x+F(Nx / sqrt(block)), blocks from 1; mix-ln: post in "
        "the first quarter of the blocks, then pre; keel: N(ax+F(Nx)) with a = 2 x layers, except in the first block, where "
        "a = 1 and the mixer has no outer norm; none: x+Fx.",
    )
    scale: ResidualScale = Field(
        "plain",
        description="Factor on each update. plain: 1; rezero: a learned scalar, initially 0; layerscale: a learned vector, "
        "initially `layerscale`; depth: 1 / (2 x layers)^`depth_power`.",
    )
    layerscale: float = Field(1e-5, description="Initial value of the layerscale vector.")
    depth_power: float = Field(0.5, description="Exponent of `depth`: 0.5 for depth-muP, 1 for CompleteP.")
    embedding_norm: bool = Field(False, description="Norm on the embedding's output (optional part of Peri-LN).")


class InitConfig(Section):
    """The `[init]` section: how the weights are initialised. Biases are zero, norm gains one."""

    scheme: InitScheme = Field(
        "normal",
        description="normal: N(0, std) everywhere; gpt2, megatron: the same with residual projections / sqrt(2 x layers); "
        "xavier; he; fan-in: 1/sqrt(fan_in); small: sqrt(2/(5 width)), residual projections / sqrt(2 x layers); olmo-llama: "
        "`std`, residual projections and the FFN's up projection / sqrt(2 x layers), head 1/sqrt(width), all truncated at 3 "
        "standard deviations, embeddings N(0, 1).",
    )
    std: float = Field(0.02, gt=0, description="Standard deviation for `normal`, `gpt2`, `megatron` and `olmo-llama`.")
    embedding_std: float | None = Field(
        None, gt=0, description="Standard deviation of the embeddings; default: given by the scheme."
    )
    convolution_std: float | None = Field(
        None, gt=0, description="Standard deviation of the DeltaNet convolution; default: given by the scheme."
    )


class DecoderConfig(Section):
    """All settings of the reference decoder's constructor."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    residual: ResidualConfig = Field(default_factory=ResidualConfig)
    init: InitConfig = Field(default_factory=InitConfig)
    keep_fp32: tuple[str, ...] = Field((), description="Parameters that stay fp32 in every precision, by last part of name.")
