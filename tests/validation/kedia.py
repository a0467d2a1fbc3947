"""The simulations of Kedia et al. 2024 (arXiv 2403.09635), on a smaller scale: closed forms against random draws.

The ranges are those of the authors' code (``simulations/`` of akhilkedia/TranformersGetStable). The forms are exact in the
limit, so the errors are those of sampling, there and here: fewer tokens are drawn a run (10, there 100 and 1000), and 2 to 4
times as many runs, since tokens of one run are correlated. Its table calls "FFN" what ``linear.py`` simulates, a linear layer.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING

import closed_forms
import torch
from closed_forms import Moments
from published import Row
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = "Kedia et al. 2024, arXiv 2403.09635, error table"
TOKENS = 10
STDS = (10**-0.5, 1.0, 10**0.5)
CORRELATIONS = (0.0, 0.2, 0.4, 0.6, 0.8)

# Relative errors in %, at the 50th, 90th and 99th percentile of the settings.
PUBLISHED = {
    "linear": (0.4, 1.4, 2.8),
    "ReLU": (0.5, 1.9, 3.4),
    "GELU": (0.2, 0.6, 1.3),
    "LayerNorm gradient": (0.4, 1.5, 3.2),
}


def correlated(runs: int, width: int, std: float, correlation: float, mean: float, generator: torch.Generator) -> Tensor:
    """Gaussian [runs, TOKENS, width] whose tokens have that correlation."""
    shared = torch.randn(runs, 1, width, generator=generator) * correlation**0.5
    own = torch.randn(runs, TOKENS, width, generator=generator) * (1 - correlation) ** 0.5
    return (shared + own) * std + mean


def variance(x: Tensor) -> float:
    return x.double().var(correction=0).item()


def percent(measured: float, predicted: float) -> float:
    return 100 * abs(measured - predicted) / measured


def relu_errors(generator: torch.Generator) -> Iterator[float]:
    for std, correlation in itertools.product(STDS, CORRELATIONS):
        x = correlated(30_000, 1, std, correlation, 0.0, generator)
        yield percent(variance(torch.relu(x)), closed_forms.relu(std).variance)


def gelu_errors(generator: torch.Generator) -> Iterator[float]:
    for std, correlation in itertools.product(STDS, CORRELATIONS):
        x = correlated(200_000, 1, std, correlation, 0.0, generator)
        yield percent(variance(torch.nn.functional.gelu(x)), closed_forms.gelu(std).variance)


def layer_norm_errors(generator: torch.Generator) -> Iterator[float]:
    runs = 400
    for std, correlation, width, mean in itertools.product(STDS, CORRELATIONS, (100, 316, 1000), (-10.0, -10 / 3, 10 / 3)):
        x = correlated(runs, width, std, correlation, mean, generator).requires_grad_()
        gradient = correlated(runs, width, 1.0, correlation, 0.0, generator)
        (found,) = torch.autograd.grad(torch.nn.functional.layer_norm(x, (width,)), x, gradient)
        yield percent(variance(found), closed_forms.layer_norm_gradient(1.0, std**2))


def linear_errors(generator: torch.Generator) -> Iterator[float]:
    runs, fan_in = 300, 100
    for std, mean, correlation, fan_out in itertools.product(STDS, (0.1, 10.0), (0.0, 1 / 3, 2 / 3), (100, 316, 1000)):
        x = correlated(runs, fan_in, std, correlation, mean, generator)
        weight = torch.randn(runs, fan_in, fan_out, generator=generator) * fan_in**-0.5
        yield percent(variance(x @ weight), closed_forms.linear(Moments(mean, std**2), fan_in, fan_in**-0.5).variance)


REPEATS: dict[str, tuple[Callable[[torch.Generator], Iterator[float]], int]] = {
    "linear": (linear_errors, 1),
    "ReLU": (relu_errors, 15),
    "GELU": (gelu_errors, 7),
    "LayerNorm gradient": (layer_norm_errors, 1),
}


@cache
def errors(name: str) -> tuple[float, ...]:
    """Relative errors in %, sorted."""
    simulate, repeats = REPEATS[name]
    generator = torch.Generator().manual_seed(42)
    return tuple(sorted(error for _ in range(repeats) for error in simulate(generator)))


def percentiles(name: str) -> tuple[float, float, float]:
    found = errors(name)
    p50, p90, p99 = (found[int(len(found) * share)] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99


SETTINGS = {
    "linear": "correlation 0 to 0.67, 300 runs, 100 inputs, 100 to 1000 outputs, mean 0.1 and 10",
    "ReLU": "correlation 0 to 0.8, 30,000 runs",
    "GELU": "correlation 0 to 0.8, 200,000 runs",
    "LayerNorm gradient": "correlation 0 to 0.8, 400 runs, width 100 to 1000, mean −10 to 3.3",
}


def row(name: str) -> Row:
    return Row(
        f"{name}: relative error of the variance in %, p50 / p90 / p99",
        f"{len(errors(name))} settings, std 0.32 to 3.2, {SETTINGS[name]}",
        " / ".join(f"{number:g}" for number in PUBLISHED[name]),
        SOURCE,
        percentiles(name),
        "{:.2f}",
    )


def rows() -> list[Row]:
    return [row(name) for name in PUBLISHED]
