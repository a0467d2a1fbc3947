"""The closed forms against quadrature in fp64 and against plain draws."""

import math

import closed_forms
import pytest
import torch
import torch.nn.functional as F
from closed_forms import Moments

STDS = [0.1, 0.3, 1.0, 2.0, 3.2, 10.0]


def expectation(function, std):
    """E[function(z)], z ~ N(0, std²), by the trapezoid rule; fp64."""
    z = torch.linspace(-14 * std, 14 * std, 800_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / (2 * std**2))
    return (function(z) * density).sum().item() / density.sum().item()


def slope(function):
    def derivative(z):
        z = z.clone().requires_grad_()
        return torch.autograd.grad(function(z).sum(), z)[0]

    return derivative


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize(
    ("moments", "gradient", "function"),
    [
        (closed_forms.relu, lambda variance, std: closed_forms.relu_gradient(variance), F.relu),
        (closed_forms.gelu, closed_forms.gelu_gradient, F.gelu),
    ],
    ids=["relu", "gelu"],
)
def test_an_activation_has_the_moments_of_the_quadrature(moments, gradient, function, std):
    mean = expectation(function, std)
    square = expectation(lambda z: function(z) ** 2, std)
    found = moments(std)
    assert found.mean == pytest.approx(mean, rel=1e-6)
    assert found.variance == pytest.approx(square - mean**2, rel=1e-6)
    assert found.mean_square == pytest.approx(square, rel=1e-6)
    assert gradient(3.0, std) == pytest.approx(3.0 * expectation(lambda z: slope(function)(z) ** 2, std), rel=1e-4)


def draw(*shape, std=1.0, mean=0.0, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std + mean


def variance(x):
    return x.var(correction=0).item()


def test_relu_of_a_unit_normal():
    """1/sqrt(2π) = 0.39894 and (π - 1)/(2π) = 0.34085; the mean square is one half."""
    found = closed_forms.relu(1.0)
    assert (found.mean, found.variance) == pytest.approx((0.39894, 0.34085), abs=5e-6)
    assert found.mean_square == pytest.approx(0.5)


def test_a_linear_layer_with_inputs_off_zero():
    x, weight = draw(2000, 300, std=0.7, mean=1.3), draw(500, 300, std=0.05, seed=1)
    found = closed_forms.linear(Moments(1.3, 0.49), 300, 0.05)
    assert found.mean == 0.0
    assert (x @ weight.T).square().mean().item() == pytest.approx(found.variance, rel=0.05)
    assert variance(draw(2000, 500, std=2.0, seed=2) @ weight) == pytest.approx(
        closed_forms.linear_gradient(4.0, 500, 0.05), rel=0.02
    )


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (F.layer_norm, closed_forms.layer_norm_gradient(4.0, 0.25)),  # 16: the mean of 1.5 is taken away
        (F.rms_norm, closed_forms.rms_norm_gradient(4.0, 0.25 + 2.25)),  # 1.6
    ],
    ids=["layernorm", "rmsnorm"],
)
def test_the_gradient_before_a_norm(norm, expected):
    x = draw(200, 1000, std=0.5, mean=1.5).requires_grad_()
    (found,) = torch.autograd.grad(norm(x, (1000,)), x, draw(200, 1000, std=2.0, seed=1))
    assert variance(found) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("std", "correlation"), [(0.1, 0.0), (0.5, 0.6), (1.0, 0.0)])
def test_a_softmax_over_many_logits(std, correlation):
    logits = std * (correlation**0.5 * draw(200, 1) + (1 - correlation) ** 0.5 * draw(200, 20_000, seed=1))
    weights = torch.softmax(logits, -1)
    found = closed_forms.softmax(std, 20_000, correlation)
    assert weights.mean().item() == pytest.approx(found.mean)
    assert variance(weights) == pytest.approx(found.variance, rel=0.02)


def test_a_relu_network_is_its_parts_together():
    """d_ff = d and weights N(0, 1/d) halve the mean square (arXiv 2002.04745, lemma 2), and the gradient's."""
    found = closed_forms.relu_ffn(Moments(0.0, 1.0), 512, 512, (512**-0.5, 512**-0.5))
    assert found.variance == pytest.approx(0.5)
    assert closed_forms.relu_ffn_gradient(1.0, 512, 512, (512**-0.5, 512**-0.5)) == pytest.approx(0.5)


def test_a_relu_network_of_unequal_widths():
    inner, outer = draw(900, 300, std=0.1, seed=1), draw(200, 900, std=0.03, seed=2)
    x = draw(2000, 300, std=1.5).requires_grad_()
    y = F.relu(x @ inner.T) @ outer.T
    gradient = draw(2000, 200, std=3.0, seed=3)
    (before,) = torch.autograd.grad(y, x, gradient)
    assert y.square().mean().item() == pytest.approx(
        closed_forms.relu_ffn(Moments(0.0, 2.25), 300, 900, (0.1, 0.03)).variance, rel=0.05
    )
    assert variance(before) == pytest.approx(closed_forms.relu_ffn_gradient(9.0, 900, 200, (0.1, 0.03)), rel=0.05)


def test_the_gradient_of_gelu_far_out_is_that_of_relu():
    assert closed_forms.gelu_gradient(1.0, 1000.0) == pytest.approx(0.5, rel=1e-3)
    assert closed_forms.gelu(1000.0).variance == pytest.approx(closed_forms.relu(1000.0).variance, rel=1e-3)
    assert math.isclose(closed_forms.gelu_gradient(1.0, 1e-6), 0.25, rel_tol=1e-5)  # Φ(0)²
