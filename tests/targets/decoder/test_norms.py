"""The norms against their formulas in float64."""

import pytest
import torch

from propcheck.config.decoder import NormConfig
from propcheck.targets.decoder.deltanet import GatedRMSNorm
from propcheck.targets.decoder.normalization import RMSNorm, make_norm

X = torch.tensor([[3.0, -4.0, 0.0, 12.0]])  # mean square 169 / 4


def test_rmsnorm_divides_by_the_root_mean_square():
    assert torch.allclose(RMSNorm(4, 0.0)(X), X / 6.5)


def test_eps_is_added_to_the_mean_square():
    assert torch.allclose(RMSNorm(4, 144.0 - 169.0 / 4.0)(X), X / 12.0)


def test_a_zero_centred_gain_is_one_plus_the_weight():
    norm = RMSNorm(4, 0.0, zero_centered=True)
    assert norm.weight.tolist() == [0.0] * 4
    with torch.no_grad():
        norm.weight.fill_(0.5)
    assert torch.allclose(norm(X), 1.5 * X / 6.5)


def test_a_plain_gain_is_the_weight():
    norm = RMSNorm(4, 0.0)
    assert norm.weight.tolist() == [1.0] * 4
    with torch.no_grad():
        norm.weight.fill_(0.5)
    assert torch.allclose(norm(X), 0.5 * X / 6.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rmsnorm_rounds_once(dtype):
    """Every step in fp32 and one cast: the result is the rounded exact value, and 200² does not overflow fp16."""
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 1000).to(dtype)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    norm = RMSNorm(64, 0.0).to(dtype)
    assert norm(x).dtype == dtype
    assert (norm(x) == exact.to(dtype)).float().mean() > 0.999


def test_layernorm_centres_and_scales():
    norm = make_norm(4, NormConfig(kind="layernorm", eps=0.0))
    x = X.double()
    expected = (x - 2.75) / ((x - 2.75).square().mean()).sqrt()
    assert torch.allclose(norm(X).double(), expected)


def test_the_gate_comes_after_the_norm():
    gate = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    silu = gate / (1 + torch.exp(-gate))
    assert torch.allclose(GatedRMSNorm(4, 0.0)(X, gate), X / 6.5 * silu)
