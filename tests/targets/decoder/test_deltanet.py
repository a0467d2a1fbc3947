"""The chunked delta rule against the recurrence that defines it, token by token in float64."""

import math

import pytest
import torch

from propcheck.config.decoder import DeltaNetConfig
from propcheck.targets.decoder.deltanet import GatedDeltaNet, delta_rule, l2_normalize


def recurrence(q, k, v, log_decay, beta):
    """S <- exp(g) S; S <- S + beta k (v - Sᵀk)ᵀ; o = Sᵀq / sqrt(key width), one head and one token after another."""
    batch, tokens, key_heads, key_width = k.shape
    value_heads, value_width = v.shape[2:]
    outputs = torch.zeros(batch, tokens, value_heads, value_width, dtype=v.dtype)
    for b in range(batch):
        for head in range(value_heads):
            key_head = head // (value_heads // key_heads)
            state = torch.zeros(key_width, value_width, dtype=v.dtype)
            for t in range(tokens):
                state = state * math.exp(log_decay[b, t, head])
                key = k[b, t, key_head]
                state = state + beta[b, t, head] * torch.outer(key, v[b, t, head] - state.T @ key)
                outputs[b, t, head] = state.T @ q[b, t, key_head] / math.sqrt(key_width)
    return outputs


def inputs(tokens, dtype=torch.float64, decay=None, key_heads=2, value_heads=4, seed=0):
    """Unit q and k, v, log-decay (uniform down to -3, or the number given) and beta."""
    random = torch.Generator().manual_seed(seed)
    q, k = l2_normalize(torch.randn(2, 2, tokens, key_heads, 5, generator=random, dtype=torch.float64))
    v = torch.randn(2, tokens, value_heads, 7, generator=random, dtype=torch.float64)
    log_decay = -3 * torch.rand(2, tokens, value_heads, generator=random, dtype=torch.float64)
    if decay is not None:
        log_decay = torch.full_like(log_decay, decay)
    beta = torch.rand(2, tokens, value_heads, generator=random, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, log_decay, beta)]


def error(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 13])
def test_equals_the_recurrence_whatever_the_chunk(tokens, chunk):
    with torch.no_grad():
        args = inputs(tokens)
        assert error(delta_rule(*args, chunk=chunk), recurrence(*args)) < 1e-13


def test_gradients_equal_those_of_a_chunk_of_one_token():
    """With one token a chunk there is no triangular system left: the scan is the recurrence."""
    args = inputs(11)
    weights = torch.randn(2, 11, 4, 7, dtype=torch.float64)
    chunked = torch.autograd.grad((delta_rule(*args, chunk=4) * weights).sum(), args)
    single = torch.autograd.grad((delta_rule(*args, chunk=1) * weights).sum(), args)
    for a, b in zip(chunked, single, strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("decay", [-2.0, -20.0, -1000.0, 0.0])
def test_strong_decay_gives_finite_and_right_numbers_over_several_chunks(decay):
    """exp(2 * 64 * 3) overflows fp32: only differences of logarithms may be exponentiated."""
    args = inputs(200, torch.float32, decay)
    out = delta_rule(*args, chunk=64)
    with torch.no_grad():
        truth = recurrence(*(x.double() for x in args))
    assert error(out.double(), truth) < 1e-5
    for gradient in torch.autograd.grad(out.square().sum(), args):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("decay", [-0.1, -5.0, -15.0])
def test_gradient_of_the_decay_survives_in_fp32(decay):
    """It is of the order of exp(g); a difference of cumulative sums would bury it in the rounding of terms of order one."""
    single, double = inputs(100, torch.float32, decay), inputs(100, torch.float64, decay)
    (ours,) = torch.autograd.grad(delta_rule(*single, chunk=64).square().sum(), single[3])
    (truth,) = torch.autograd.grad(delta_rule(*double, chunk=1).square().sum(), double[3])
    assert error(ours.double(), truth) < 1e-5


def test_the_mixer_is_causal():
    torch.manual_seed(0)
    mixer = GatedDeltaNet(16, DeltaNetConfig(key_heads=2, value_heads=4, key_head_width=4, value_head_width=6, chunk=8), 1e-6)
    x = torch.randn(1, 21, 16)
    changed = x.clone()
    changed[:, 13:] += 1.0
    before, after = mixer(x), mixer(changed)
    torch.testing.assert_close(after[:, :13], before[:, :13])
    assert (after[:, 13:] - before[:, 13:]).abs().amax(-1).min() > 1e-4


def test_the_convolution_reaches_as_far_back_as_it_has_taps():
    """Decay so strong that the state forgets at once leaves the convolution as the only way from one token to a later one."""
    torch.manual_seed(0)
    mixer = GatedDeltaNet(
        16, DeltaNetConfig(key_heads=2, value_heads=2, key_head_width=4, value_head_width=4, convolution=4), 1e-6
    )
    with torch.no_grad():
        mixer.A_log.fill_(math.log(1e4))
    x = torch.randn(1, 12, 16)
    changed = x.clone()
    changed[:, 5] += 1.0
    moved = (mixer(changed) - mixer(x)).abs().amax(-1)[0] > 1e-6
    assert moved.nonzero().flatten().tolist() == [5, 6, 7, 8]
