"""Causal softmax attention with optional grouped queries, QK norm, partial rotary embedding and output gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from propcheck.errors import PropcheckError
from propcheck.targets.decoder.normalization import RMSNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.decoder import AttentionConfig, NormConfig


def rotary_angles(tokens: int, width: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angle t * theta^(-2i/width) for token t and pair i (RoFormer, arXiv 2104.09864).

    Each call computes them in fp32; as a buffer, a module's ``to(bfloat16)`` would round the frequencies.

    Returns
    -------
    tuple of Tensor
        cos and sin, [tokens, width / 2], fp32.
    """
    pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)  # 2i: [width / 2]
    frequencies = 1.0 / theta ** (pairs / width)  # [width / 2]
    positions = torch.arange(tokens, device=device, dtype=torch.float32)  # t: [tokens]
    angles = positions[:, None] * frequencies  # [tokens, width / 2]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * half elements of each head, in pairs (i, i + half), and keep the rest.

    ``x`` is [..., tokens, head_width], ``cos`` and ``sin`` are [tokens, half]; the result has the shape and dtype of ``x``.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Attention(nn.Module):
    """Causal attention softmax(q kᵀ / sqrt(head_width)) v (arXiv 1706.03762, eq. 1), with optional extensions.

    - Grouped queries: each key/value head serves ``heads / kv_heads`` query heads (arXiv 2305.13245).
    - QK norm: RMSNorm on each query and key head before the rotation (arXiv 2302.05442).
    - Output gate: attention * sigmoid(gate) elementwise; q_proj returns the query and the gate of each head side by side
      (arXiv 2505.06708).

    Parameters
    ----------
    width : int
        Width of the stream.
    config : AttentionConfig
        Heads and switches.
    norm : NormConfig
        ``eps`` and ``zero_centered`` of the QK norm.
    sub_norm : callable, optional
        Function of a width that returns a norm, applied to all heads together before the output projection (sub-LN, arXiv
        2210.06423).

    Raises
    ------
    PropcheckError
        If ``attention.rotary`` would rotate an odd number of elements.
    """

    def __init__(
        self, width: int, config: AttentionConfig, norm: NormConfig, sub_norm: Callable[[int], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.heads = config.heads
        self.kv_heads = config.kv_heads or config.heads
        self.head_width = config.head_width or width // config.heads
        self.gate = config.gate
        self.rotary_theta = config.rotary_theta
        self.rotary_width = int(self.head_width * config.rotary)
        if self.rotary_width % 2:
            raise PropcheckError(
                f"model.attention.rotary = {config.rotary} rotates {self.rotary_width} of {self.head_width} elements per head; "
                "the number of rotated elements must be even"
            )
        query_width = self.heads * self.head_width
        kv_width = self.kv_heads * self.head_width
        self.q_proj = nn.Linear(width, query_width * (2 if config.gate else 1), bias=config.bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.bias)
        self.o_proj = nn.Linear(query_width, width, bias=config.bias)
        self.sub_norm = sub_norm(query_width) if sub_norm is not None else None
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_width, norm.eps, zero_centered=norm.zero_centered)
            self.k_norm = RMSNorm(self.head_width, norm.eps, zero_centered=norm.zero_centered)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of ``x`` [batch, tokens, width]; the result has its shape."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, -1)  # [batch, tokens, heads, head_width], twice that with a gate
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_width)  # [batch, tokens, kv_heads, head_width]
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_width)  # [batch, tokens, kv_heads, head_width]
        gate = None
        if self.gate:
            q, gate = q.chunk(2, dim=-1)  # [batch, tokens, heads, head_width] each
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)

        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads or kv_heads, tokens, head_width]
        if self.rotary_width:
            cos, sin = rotary_angles(tokens, self.rotary_width, self.rotary_theta, x.device)  # [tokens, rotary_width / 2]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)

        y = y.transpose(1, 2)  # [batch, tokens, heads, head_width]
        if gate is not None:
            y = y * torch.sigmoid(gate)
        y = y.reshape(batch, tokens, -1)  # [batch, tokens, heads * head_width]
        if self.sub_norm is not None:
            y = self.sub_norm(y)
        out: Tensor = self.o_proj(y)  # [batch, tokens, width]
        return out
