"""Closed forms for the moments of a signal through one operation, forward and backward.

From Kedia et al. 2024, arXiv 2403.09635, and the code of its simulations (akhilkedia/TranformersGetStable on GitHub).
Each takes Gaussian inputs of mean 0 (a linear layer: any mean) and is exact in the limit of wide layers. Moments are those over
all elements; a gradient is taken to be independent of the input and of mean 0. Pure arithmetic on floats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and variance of the elements of a tensor."""

    mean: float
    variance: float

    @property
    def mean_square(self) -> float:
        """The square of the RMS."""
        return self.variance + self.mean * self.mean


def linear(x: Moments, fan_in: int, weight_std: float) -> Moments:
    """Give the moments of W x with independent weights of mean 0: d_in (σ² + μ²) σ_w².

    Parameters
    ----------
    x
        Of the input; its mean may differ from 0.
    fan_in
        d_in, inputs of a unit.
    weight_std
        σ_w, standard deviation of the weights.
    """
    return Moments(0.0, fan_in * x.mean_square * weight_std**2)


def linear_gradient(gradient_variance: float, fan_out: int, weight_std: float) -> float:
    """Give the variance of the gradient before W from that after it: d_out σ_g² σ_w²."""
    return fan_out * gradient_variance * weight_std**2


def relu(std: float) -> Moments:
    """Give the moments of max(x, 0) for x ~ N(0, std²): σ/√(2π) and σ²(π − 1)/(2π)."""
    return Moments(std / math.sqrt(2 * math.pi), std**2 * (math.pi - 1) / (2 * math.pi))


def relu_gradient(gradient_variance: float) -> float:
    """Give the variance of the gradient before ReLU: half of that after it."""
    return gradient_variance / 2


def gelu(std: float) -> Moments:
    """Give the moments of x Φ(x) for x ~ N(0, std²).

    With a = σ²/(1 + σ²): mean σ √a / √(2π), variance σ²/(2π) (π − a − arccos a + 2a √((1 − a)/(1 + a))).
    """
    a = std**2 / (1 + std**2)
    mean = std * math.sqrt(a / (2 * math.pi))
    inner = math.pi - a - math.acos(a) + 2 * a * math.sqrt((1 - a) / (1 + a))
    return Moments(mean, std**2 / (2 * math.pi) * inner)


def gelu_gradient(gradient_variance: float, std: float) -> float:
    """Give the variance of the gradient before GELU from that after it, for x ~ N(0, std²).

    With a = σ²/(1 + σ²): σ_g² (1/2 + (a (5σ² + 3)/(1 + 2σ²)^{3/2} − arccos a)/(2π)).
    """
    a = std**2 / (1 + std**2)
    tail = a * (5 * std**2 + 3) / math.sqrt(1 + 2 * std**2) ** 3 - math.acos(a)
    return gradient_variance * (0.5 + tail / (2 * math.pi))


def layer_norm_gradient(gradient_variance: float, variance: float) -> float:
    """Give the variance of the gradient before a LayerNorm of gain 1: σ_g²/σ², σ² the variance of what it normalises.

    After it the mean is 0 and the variance 1.
    """
    return gradient_variance / variance


def rms_norm_gradient(gradient_variance: float, mean_square: float) -> float:
    """Give the variance of the gradient before an RMSNorm of gain 1: σ_g²/S, S the mean square of what it normalises."""
    return gradient_variance / mean_square


def softmax(std: float, tokens: int, correlation: float = 0.0) -> Moments:
    """Give the moments of the softmax over many ``tokens`` logits of standard deviation ``std``.

    Mean 1/T, variance (e^{(1 − r)σ²} − 1)/T², r the correlation of the logits of one row.
    """
    return Moments(1 / tokens, math.expm1((1 - correlation) * std**2) / tokens**2)


def relu_ffn(x: Moments, fan_in: int, inner: int, weight_stds: tuple[float, float]) -> Moments:
    """Give the moments of W₂ ReLU(W₁ x), W₁ ``[inner, fan_in]``, composed of the forms above.

    Parameters
    ----------
    x
        Of the input.
    fan_in, inner
        Inputs of a unit of W₁ and of W₂.
    weight_stds
        Standard deviations of W₁ and W₂.
    """
    hidden = linear(x, fan_in, weight_stds[0])
    return linear(relu(math.sqrt(hidden.variance)), inner, weight_stds[1])


def relu_ffn_gradient(gradient_variance: float, inner: int, fan_out: int, weight_stds: tuple[float, float]) -> float:
    """Give the variance of the gradient before W₂ ReLU(W₁ x) from that after it; W₂ is ``[fan_out, inner]``."""
    hidden = linear_gradient(gradient_variance, fan_out, weight_stds[1])
    return linear_gradient(relu_gradient(hidden), inner, weight_stds[0])
