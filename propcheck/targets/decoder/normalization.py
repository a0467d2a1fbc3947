"""RMSNorm and LayerNorm, computed in fp32 for a stream of any precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from propcheck.config.decoder import NormConfig


def upcast(x: Tensor) -> Tensor:
    """Cast ``x`` to the precision of norms and decays: fp32, or fp64 if ``x`` is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (arXiv 1910.07467, eq. 4).

    y = x / sqrt(mean(x²) + eps) * gain. The gain is w with w = 1 initially or, if zero-centred, 1 + w with w = 0.
    The result is computed in fp32 and cast to the dtype of ``x`` once, at the end.

    Parameters
    ----------
    width : int
        Size of the last dimension.
    eps : float
        Added to the mean square.
    zero_centered : bool
        Store the gain as its distance from one.
    """

    def __init__(self, width: int, eps: float, *, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain to one."""
        if self.zero_centered:
            nn.init.zeros_(self.weight)
        else:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]; the result has its shape and dtype."""
        return self.normalise(x).to(x.dtype)

    def normalise(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]; the result is in fp32."""
        x = upcast(x)  # [..., width]
        gain = 1.0 + upcast(self.weight) if self.zero_centered else upcast(self.weight)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gain


def make_norm(width: int, config: NormConfig) -> nn.Module:
    """Build the norm of ``config`` over a last dimension of ``width``."""
    if config.kind == "layernorm":
        return nn.LayerNorm(width, eps=config.eps)  # arXiv 1607.06450; torch computes the statistics in fp32
    return RMSNorm(width, config.eps, zero_centered=config.zero_centered)
