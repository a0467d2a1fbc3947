"""Gated DeltaNet (arXiv 2412.06464): linear attention with a decaying state and the delta rule."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from propcheck.targets.decoder.normalization import RMSNorm, upcast

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.decoder import DeltaNetConfig

L2_EPS = 1e-6  # as in flash-linear-attention and transformers; not configurable there either


def l2_normalize(x: Tensor) -> Tensor:
    """Scale the vectors in the last dimension to unit L2 norm."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *, chunk: int) -> Tensor:  # noqa: PLR0913, PLR0914 - the symbols of the equations
    """Gated delta rule, computed chunk by chunk (arXiv 2412.06464).

    Token by token, with a state S [key_width, value_width] that is zero before the first token:

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}ᵀ k_t)ᵀ,    o_t = S_tᵀ q_t / sqrt(key_width).

    Within a chunk the corrections depend on one another through A_ij = beta_i (k_i·k_j) exp(g_{j+1} + ... + g_i), j < i;
    T = (I + A)⁻¹ solves for all of them at once (the UT transform of arXiv 2406.06484).

    Parameters
    ----------
    q, k : Tensor
        [batch, tokens, key_heads, key_width], of unit L2 norm.
    v : Tensor
        [batch, tokens, value_heads, value_width]; key head h serves the value_heads / key_heads value heads that start at
        h * value_heads / key_heads.
    log_decay : Tensor
        g <= 0, [batch, tokens, value_heads].
    beta : Tensor
        Write strength in (0, 1), [batch, tokens, value_heads].
    chunk : int
        Tokens per chunk. It changes the result by rounding only.

    Returns
    -------
    Tensor
        [batch, tokens, value_heads, value_width], in the dtype of the arguments, which should be fp32 or fp64.
    """
    batch, tokens, key_heads, key_width = k.shape
    value_heads, value_width = v.shape[2:]
    groups = value_heads // key_heads
    chunk = min(chunk, tokens)
    chunks = -(-tokens // chunk)
    padding = chunks * chunk - tokens

    def chunked(x: Tensor, heads: int) -> Tensor:
        # [batch, tokens, key_heads * heads, *] -> [batch, key_heads, heads, chunks, chunk, *]. Zero padding is exact: a token
        # with beta = 0 and g = 0 leaves the state unchanged.
        x = F.pad(x, (0, 0, 0, 0, 0, padding))
        return x.view(batch, chunks, chunk, key_heads, heads, -1).permute(0, 3, 4, 1, 2, 5)

    q = chunked(q * key_width**-0.5, 1)  # [batch, key_heads, 1, chunks, chunk, key_width]
    k = chunked(k, 1)  # [batch, key_heads, 1, chunks, chunk, key_width]
    v = chunked(v, groups)  # [batch, key_heads, groups, chunks, chunk, value_width]
    beta = chunked(beta[..., None], groups)  # [batch, key_heads, groups, chunks, chunk, 1]
    g = chunked(log_decay[..., None], groups)  # [batch, key_heads, groups, chunks, chunk, 1]

    # decay_ij = exp(g_{j+1} + ... + g_i) for j <= i, else 0. Each sum is taken over its own terms (the segment sum of Mamba-2,
    # arXiv 2405.21060). As a difference G_i - G_j its gradients would cancel only up to rounding, and with strong decay that
    # rounding swamps the gradient of g. No sum is positive, so nothing overflows.
    decay = g.expand(*g.shape[:-1], chunk).tril(-1).cumsum(-2).exp().tril()  # [.., chunk, chunk]
    from_start = g.cumsum(-2).exp()  # [.., chunk, 1]
    to_end = decay[..., -1:, :].mT  # [.., chunk, 1]

    # The value heads of a group share their query-key and key-key products.
    A = beta * (k @ k.mT) * decay  # [.., chunk, chunk]; the solver reads only the part below the diagonal
    identity = torch.eye(chunk, dtype=k.dtype, device=k.device)
    T = torch.linalg.solve_triangular(A, identity, upper=False, unitriangular=True)  # [.., chunk, chunk]
    U = T @ (beta * v)  # [.., chunk, value_width]: values written if the chunk starts from S = 0
    W = T @ (beta * from_start * k)  # [.., chunk, key_width]: keys that read S at the chunk's start and take it back
    attention = (q @ k.mT) * decay  # [.., chunk, chunk]
    q_start = q * from_start  # [.., chunk, key_width]
    k_end = (k * to_end).mT  # [.., key_width, chunk]
    chunk_decay = from_start[..., -1:, :]  # [.., 1, 1]

    S = v.new_zeros(batch, key_heads, groups, key_width, value_width)
    outputs = []
    for n in range(chunks):
        written = U[:, :, :, n] - W[:, :, :, n] @ S  # [batch, key_heads, groups, chunk, value_width]
        outputs.append(q_start[:, :, :, n] @ S + attention[:, :, :, n] @ written)
        S = chunk_decay[:, :, :, n] * S + k_end[:, :, :, n] @ written
    o = torch.stack(outputs, dim=3)  # [batch, key_heads, groups, chunks, chunk, value_width]
    return o.permute(0, 3, 4, 1, 2, 5).reshape(batch, chunks * chunk, value_heads, value_width)[:, :tokens]


class GatedRMSNorm(RMSNorm):
    """Gated RMSNorm, RMSNorm(x) * SiLU(gate): the norm comes before the gate."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]  # a norm with one more input
        """Normalise and gate ``x`` [..., width]; ``gate`` and the result have its shape, the result its dtype."""
        return (self.normalise(x) * F.silu(upcast(gate))).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet mixer with the parameters of transformers' ``qwen3_5``.

    q, k, v = SiLU(conv(in_proj_qkv x)), q and k scaled to unit norm; beta = sigmoid(in_proj_b x);
    g = -exp(A_log) softplus(in_proj_a x + dt_bias), in fp32; out = out_proj(norm(delta_rule(q, k, v, g, beta), in_proj_z x)).

    Parameters
    ----------
    width : int
        Width of the stream.
    config : DeltaNetConfig
        Heads, convolution and chunk.
    eps : float
        Of the gated norm, whose gain is initially 1 and not zero-centred.
    sub_norm : callable, optional
        Function of a width that returns a norm, applied to all gated heads together before the output projection (sub-LN,
        arXiv 2210.06423).
    """

    def __init__(
        self, width: int, config: DeltaNetConfig, eps: float, sub_norm: Callable[[int], nn.Module] | None = None
    ) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.key_heads, config.value_heads
        self.key_head_width, self.value_head_width = config.key_head_width, config.value_head_width
        self.chunk = config.chunk
        key_width = config.key_heads * config.key_head_width
        value_width = config.value_heads * config.value_head_width
        self.widths = [key_width, key_width, value_width]
        channels = sum(self.widths)
        self.in_proj_qkv = nn.Linear(width, channels, bias=False)
        self.in_proj_z = nn.Linear(width, value_width, bias=False)
        self.in_proj_b = nn.Linear(width, config.value_heads, bias=False)
        self.in_proj_a = nn.Linear(width, config.value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, config.convolution, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = GatedRMSNorm(config.value_head_width, eps)
        self.out_proj = nn.Linear(value_width, width, bias=False)
        self.sub_norm = sub_norm(value_width) if sub_norm is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the decay rates A from U(0.01, 16) and set dt_bias to one; submodules are not reset."""
        self.A_log.uniform_(0.01, 16.0).log_()
        nn.init.ones_(self.dt_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of ``x`` [batch, tokens, width]; the result has its shape."""
        batch, tokens, _ = x.shape
        qkv = self._convolve(self.in_proj_qkv(x))  # [batch, tokens, channels]
        q, k, v = torch.split(qkv, self.widths, dim=-1)
        q = q.view(batch, tokens, self.key_heads, self.key_head_width)  # [batch, tokens, key_heads, key_head_width]
        k = k.view(batch, tokens, self.key_heads, self.key_head_width)  # [batch, tokens, key_heads, key_head_width]
        v = v.view(batch, tokens, self.value_heads, self.value_head_width)  # [batch, tokens, value_heads, value_head_width]
        z = self.in_proj_z(x).view(batch, tokens, self.value_heads, self.value_head_width)  # the shape of v
        a, beta = self.in_proj_a(x), torch.sigmoid(self.in_proj_b(x))  # [batch, tokens, value_heads]

        with _no_autocast(x.device.type):  # under autocast the products with the state would be in bf16
            log_decay = -upcast(self.A_log).exp() * F.softplus(upcast(a) + upcast(self.dt_bias))  # [batch, tokens, value_heads]
            o = delta_rule(
                l2_normalize(upcast(q)), l2_normalize(upcast(k)), upcast(v), log_decay, upcast(beta), chunk=self.chunk
            )
        o = o.to(v.dtype)  # like the fused kernels; [batch, tokens, value_heads, value_head_width]
        y = self.norm(o, z).reshape(batch, tokens, -1)  # [batch, tokens, value_heads * value_head_width]
        if self.sub_norm is not None:
            y = self.sub_norm(y)
        out: Tensor = self.out_proj(y)  # [batch, tokens, width]
        return out

    def _convolve(self, qkv: Tensor) -> Tensor:
        # Causal: each channel sees its own last `taps` tokens, so all padding is on the left.
        taps = self.conv1d.kernel_size[0]
        padded = F.pad(qkv.transpose(1, 2), (taps - 1, 0))  # [batch, channels, taps - 1 + tokens]
        mixed: Tensor = self.conv1d(padded)  # [batch, channels, tokens]
        return F.silu(mixed).transpose(1, 2)  # [batch, tokens, channels]


def _no_autocast(device: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
