"""Small models of x-transformers 2.31, one for each option that changes how a stream is read or written, and their sites.

The counts are read in its code: ``AttentionLayers.forward`` runs attention (a), cross-attention (c) and feed-forward (f) in
turn, and ``residual_fn`` adds what each computed to the stream, once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import x_transformers as xt
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, WIDTH, LAYERS = 128, 2, 12, 32, 3
HEADS: dict[str, Any] = {"heads": 4, "attn_dim_head": 8, "verbose": False}


@dataclass(frozen=True)
class Made:
    """A model, what it is called with, its loss where it returns none for token ids, and the number of its sites."""

    build: Callable[[], nn.Module]
    sites: int
    batch: Callable[[], Any] = field(default=lambda: (ids(),))
    loss: Callable[[Any, Any], Tensor] | None = None


def ids(seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def decoder(
    sites: int, *, wrapper: dict[str, Any] | None = None, kind: Any = xt.Decoder, depth: int = LAYERS, **options: Any
) -> Made:
    """A language model; ``options`` are those of its layers."""

    def build() -> nn.Module:
        layers = kind(dim=WIDTH, depth=depth, **HEADS, **options)
        return xt.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=layers, **(wrapper or {}))

    return Made(build, sites)


def conditioned(sites: int, **options: Any) -> Made:
    """Norms, or the scale of the updates, computed from a vector."""
    made = decoder(sites, dim_condition=16, **options)
    return Made(made.build, sites, batch=lambda: {"x": ids(), "condition": noise(BATCH, 16)})


def encoder_decoder(sites: int, **options: Any) -> Made:
    def build() -> nn.Module:
        sizes = {"num_tokens": VOCABULARY, "max_seq_len": LENGTH, "depth": LAYERS, **HEADS, **options}
        return xt.XTransformer(dim=WIDTH, **{f"{part}_{key}": value for part in ("enc", "dec") for key, value in sizes.items()})

    return Made(build, sites, batch=lambda: (ids(), ids(1)))


def vision(sites: int, *, wrapper: dict[str, Any] | None = None, **options: Any) -> Made:
    def build() -> nn.Module:
        layers = xt.Encoder(dim=WIDTH, depth=LAYERS, **HEADS, **options)
        return xt.ViTransformerWrapper(image_size=16, patch_size=4, num_classes=4, attn_layers=layers, **(wrapper or {}))

    return Made(
        build, sites, lambda: (noise(BATCH, 3, 16, 16),), lambda output, _: F.cross_entropy(output, torch.arange(BATCH))
    )


def continuous(sites: int) -> Made:
    """Vectors in, vectors out: the stream starts at a projection of the input."""

    def build() -> nn.Module:
        layers = xt.Decoder(dim=WIDTH, depth=LAYERS, **HEADS)
        return xt.ContinuousTransformerWrapper(dim_in=8, dim_out=8, max_seq_len=LENGTH, attn_layers=layers)

    return Made(build, sites, lambda: (noise(BATCH, LENGTH, 8),), lambda output, batch: F.mse_loss(output, batch[0]))


X_TRANSFORMERS: dict[str, Made] = {
    # 3 layers of attention and feed-forward, two sites each
    "pre-norm": decoder(6),
    "post-norm": decoder(6, pre_norm=False),
    "sandwich norm": decoder(6, sandwich_norm=True),
    "pre- and post-norm": decoder(6, pre_and_post_norm=True),
    "rmsnorm and swiglu": decoder(6, use_rmsnorm=True, ff_glu=True, ff_swish=True),
    "scale norm": decoder(6, use_scalenorm=True),
    "simple rmsnorm": decoder(6, use_simple_rmsnorm=True),
    "dynamic tanh": decoder(6, use_dynamic_tanh=True),
    "no bias": decoder(6, ff_no_bias=True, ff_relu_squared=True),
    "norm after the activation": decoder(6, ff_post_act_ln=True),
    "layerscale": decoder(6, use_layerscale=True, layerscale_init_value=0.1),
    "residual scaled by a vector": decoder(6, scale_residual=True),
    "residual scaled by a number": decoder(6, scale_residual_constant=0.5),
    "updates scaled by a number": decoder(6, depth_scale_residual=0.5),
    "adaptive norm": conditioned(6, use_adaptive_layernorm=True),
    "adaptive norm and layerscale": conditioned(6, use_adaptive_rmsnorm=True, use_adaptive_layerscale=True),
    # positions, and what is inside the attention
    "alibi": decoder(6, alibi_pos_bias=True),
    "rotary": decoder(6, rotary_pos_emb=True),
    "rotary xpos": decoder(6, rotary_xpos=True),
    "polar": decoder(6, polar_pos_emb=True),
    "relative positions of T5": decoder(6, rel_pos_bias=True),
    "positions by an MLP": decoder(6, dynamic_pos_bias=True),
    "data-dependent alibi": decoder(6, attn_data_dependent_alibi=True),
    "talking heads": decoder(6, attn_pre_talking_heads=True, attn_post_talking_heads=True),  # scores + conv(scores): inside
    "attention residual": decoder(6, residual_attn=True),  # scores + the last layer's scores: inside
    "value residual": decoder(6, add_value_residual=True),  # the first layer's values mixed in: inside
    "memory keys": decoder(6, attn_num_mem_kv=2),
    "memory tokens": decoder(6, wrapper={"num_memory_tokens": 2}),
    "multi-query, normed": decoder(6, attn_one_kv_head=True, attn_qk_norm=True),
    "gated values": decoder(6, attn_gate_values=True, attn_on_attn=True),
    "flash": decoder(6, attn_flash=True),
    "latent attention": decoder(
        6, attn_use_latent_q=True, attn_dim_latent_q=16, attn_use_latent_kv=True, attn_dim_latent_kv=16
    ),
    "attention and a GRU in one": decoder(  # (norm(attention) + norm(gru)) / 2 goes through the output projection: one update
        6, attn_hybrid_module=nn.GRU(WIDTH, WIDTH, batch_first=True), attn_hybrid_fold_axial_dim=1
    ),
    "shifted tokens": decoder(6, shift_tokens=1),
    # what is read, beside the stream
    "input again in each layer": decoder(6, reinject_input=True),  # x + proj(input) is read and not handed on
    "layers before, mixed": decoder(6, integrate_layers=True),
    "layers before, attended": decoder(
        6, attn_aggregated_residuals=True, attn_aggregated_residual_kwargs={"lora_rank": 8}
    ),  # x + low_rank(x) is the query of that
    "less gradient for the embedding": decoder(6, wrapper={"emb_frac_gradient": 0.5}),  # x * a + x.detach() * (1 - a)
    "narrow embedding": decoder(6, wrapper={"emb_dim": 16, "post_emb_norm": True}),
    # how it is written
    "orthogonal updates": decoder(6, orthog_residual=True),
    "updates in two parts": decoder(6, mv_split_residual=True),  # of one branch: centred, and the mean
    "GRU for an addition": decoder(0, gate_residual=True),  # nothing is added
    "hyper-connections": decoder(6, num_residual_streams=4),
    "hyper-connections, three views": decoder(6, num_residual_streams=4, qkv_receive_diff_residuals=True),
    "gated streams": decoder(6, gated_multi_residual=True, num_residual_streams=4, residual_fn_kwargs={"read_gate_rank": 8}),
    # which sublayers, and how often
    "macaron": decoder(9, macaron=True),  # f a f
    "attention alone": decoder(3, only_attn=True),
    "sandwich of layers": decoder(6, sandwich_coef=1),  # a, a f a f, f
    "tied layers": decoder(6, weight_tie_layers=True),
    "layers in another order": decoder(8, depth=2, layers_execute_order=(0, 1, 2, 3, 2, 3, 0, 1)),
    "looped": decoder(12, pre_and_post_norm=True, wrapper={"looped": True, "max_looped_steps": 2}),
    "U-net": decoder(8, depth=4, unet_skips=True),  # skips are concatenated and projected, a new stream
    "encoder": decoder(6, kind=xt.Encoder),
    "class token": Made(
        decoder(6, kind=xt.Encoder, wrapper={"use_cls_token": True}).build,
        6,
        loss=lambda output, _: F.cross_entropy(output, torch.arange(BATCH)),
    ),
    "encoder and decoder": encoder_decoder(15),  # 3 * 2 and 3 * 3
    "encoder and decoder, post-norm": encoder_decoder(15, pre_norm=False),
    "images": vision(6),
    "images and registers": vision(6, wrapper={"num_register_tokens": 2, "post_emb_norm": True}, ff_glu=True),
    "vectors": continuous(6),
}

CANNOT_BF16 = {"positions by an MLP": "its MLP is given float32 distances"}
