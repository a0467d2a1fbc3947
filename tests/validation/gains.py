"""b/f of the activations of a feed-forward network: its backward gain over its forward gain.

With z ~ N(0, s²) before the activation φ, f is proportional to E[φ(z)²] and b, by the same factor, to s² E[φ'(z)²]; of a gated
network φ(z) u the other path adds s² E[φ(z)²] to b. In a pre-norm stack g_k² = g_{k+1}² (1 + b/S), so b/f decides how steeply
the gradient falls with depth.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from published import Row
from torch import Tensor, nn

import propcheck

STDS = (0.2, 0.5, 1.0, 1.5, 2.0)
RANGES = {"ReLU": (1.0, 1.0), "GELU": (1.02, 1.07), "SiLU": (1.01, 1.07), "SwiGLU": (2.01, 2.07)}

SOURCE = "not published: our own derivation"

ACTIVATIONS = {"ReLU": F.relu, "GELU": F.gelu, "SiLU": F.silu, "SwiGLU": F.silu}
GATED = ("SwiGLU",)


def by_quadrature(name: str, std: float) -> float:
    """b/f at pre-activations of that standard deviation, in fp64."""
    z = torch.linspace(-12 * std, 12 * std, 400_001, dtype=torch.float64, requires_grad=True)
    density = torch.exp(-(z.detach() ** 2) / (2 * std**2))
    value = ACTIVATIONS[name](z)
    (slope,) = torch.autograd.grad(value.sum(), z)
    ratio = (std**2 * (density * slope**2).sum() / (density * value.detach() ** 2).sum()).item()
    return ratio + 1 if name in GATED else ratio


class Feed(nn.Module):
    """x + W₃(φ(W₁ N x) · W₂ N x) or x + W₃ φ(W₁ N x), the pre-activations of standard deviation ``std``."""

    def __init__(self, width: int, inner: int, name: str, std: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[name]
        self.norm = nn.RMSNorm(width, eps=0.0)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False) if name in GATED else None
        self.down = nn.Linear(inner, width, bias=False)
        for linear in (self.gate, self.up, self.down):
            if linear is not None:
                nn.init.normal_(linear.weight, std=std * linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        hidden = self.activation(self.gate(read))
        return x + self.down(hidden if self.up is None else hidden * self.up(read))


class Stack(nn.Module):
    def __init__(self, width: int, inner: int, layers: int, name: str, std: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, width)
        nn.init.normal_(self.embedding.weight)
        self.layers = nn.ModuleList(Feed(width, inner, name, std) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=0.0)
        self.head = nn.Linear(width, 1000, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@cache
def scanned(name: str, std: float = 1.0) -> float:
    """b/f as a scan measures it: (g_k²/g_{k+1}² − 1) S / f of each site, the mean of 16 sites and 3 seeds."""
    run = propcheck.scan(
        Stack,
        args={"width": 256, "inner": 1024, "layers": 16, "name": name, "std": std},
        tokens=64,
        seeds=[0, 1, 2],
        set={"inputs.source": "uniform"},
    )
    s = run.sublayers
    gains = ((s.grad_stream_norm / s.grad_sum_norm) ** 2 - 1) * (s.stream_rms / s.update_rms) ** 2
    return float(gains.mean())


def _published(name: str) -> str:
    low, high = RANGES[name]
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def quadrature_row(name: str) -> Row:
    values = [by_quadrature(name, std) for std in STDS]
    setting = "pre-activation std 0.2 to 2, quadrature: min and max"
    return Row(f"b/f of {name}", setting, _published(name), SOURCE, (min(values), max(values)), "{:.3f}")


def scan_row(name: str) -> Row:
    setting = "16 blocks of width 256, std 1, 3 seeds, scanned"
    return Row(f"b/f of {name}", setting, _published(name), SOURCE, (scanned(name),), "{:.2f}")


def rows() -> list[Row]:
    return [row(name) for name in RANGES for row in (quadrature_row, scan_row)]
