"""Feed-forward network, gated or plain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.decoder import FFNConfig


class FeedForward(nn.Module):
    """Feed-forward network: down(act(up x)), or gated down(act(gate x) * up x) (arXiv 2002.05202, eq. 6).

    The activation is SiLU in ``swiglu``; exact GELU (arXiv 1606.08415) in ``geglu`` and ``gelu``, its tanh form in
    ``gelu-tanh``; ReLU in ``relu``.

    Parameters
    ----------
    width : int
        Width of the stream.
    config : FFNConfig
        Inner width (4 * width by default), kind, biases.
    sub_norm : callable, optional
        Function of a width that returns a norm, applied before the down projection (sub-LN, arXiv 2210.06423).
    """

    def __init__(self, width: int, config: FFNConfig, sub_norm: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__()
        inner = config.width or 4 * width
        self.kind = config.kind
        self.gate_proj = nn.Linear(width, inner, bias=config.bias) if config.kind in ("swiglu", "geglu") else None
        self.up_proj = nn.Linear(width, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, width, bias=config.bias)
        self.sub_norm = sub_norm(inner) if sub_norm is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [batch, tokens, width] to the same shape."""
        up = self.up_proj(x)  # [batch, tokens, inner]
        hidden = self._activation(up) if self.gate_proj is None else self._activation(self.gate_proj(x)) * up
        if self.sub_norm is not None:
            hidden = self.sub_norm(hidden)
        out: Tensor = self.down_proj(hidden)  # [batch, tokens, width]
        return out

    def _activation(self, x: Tensor) -> Tensor:
        match self.kind:
            case "swiglu":
                return F.silu(x)
            case "geglu" | "gelu":
                return F.gelu(x)
            case "gelu-tanh":
                return F.gelu(x, approximate="tanh")
            case "relu":
                return F.relu(x)
