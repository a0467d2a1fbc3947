"""Random fills follow their distributions, and depend on their key alone."""

from __future__ import annotations

import math

import pytest
import torch

from propcheck.deferred_init.keyed_rng import CHUNK, Workers, draw, generator_for

aten = torch.ops.aten


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as pool:
        yield pool


def filled(function, shape, *args, key, workers, dtype=torch.float32):
    memory = torch.empty(shape, dtype=dtype)
    return draw(function, (memory, *args), {}, memory, key, workers)


def normal_cdf(x):
    return 0.5 * torch.erfc(-x.double() / math.sqrt(2))


def kolmogorov_distance(sample, cdf):
    """Give the largest distance between the empirical distribution function of ``sample``, on a grid or not, and ``cdf``."""
    values, counts = sample.double().sort().values.unique_consecutive(return_counts=True)
    after = counts.cumsum(0) / sample.numel()
    expected = cdf(values)
    return max((after - expected).abs().max().item(), (after - counts / sample.numel() - expected).abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normal_numbers_are_normal_in_every_dtype(dtype, workers):
    std, count = 0.02, 3 * CHUNK + 17
    z = filled(aten.normal_.default, (count,), 0.0, std, key=(0, "w", 0), workers=workers, dtype=dtype).double() / std
    five = 5.0  # standard errors
    assert abs(z.mean()) < five / math.sqrt(count)
    assert z.std().item() == pytest.approx(1, abs=five / math.sqrt(2 * count))
    assert z.pow(4).mean().item() == pytest.approx(3, abs=five * math.sqrt(96 / count) + 1e-3)
    # P(max |z| > m) = 1 - (1 - 2 Q(m))^n: within [4.6, 6.2] but for 1 in 500.
    assert 4.6 < z.abs().max() < 6.2
    # Rounding moves a number z by u z at most (u = 2^-8 in bf16), and the distribution function by u max z phi(z) = 0.242 u.
    grid = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype] * 0.242
    # The first 10^5: 1.95 / sqrt(n) is passed by 1 sample of 1000.
    assert kolmogorov_distance(z[:100_000], normal_cdf) < 1.95 / math.sqrt(100_000) + grid


def test_bf16_normals_are_the_rounded_fp32_ones(workers):
    key = (3, "w", 1)
    exact = filled(aten.normal_.default, (70, 3), 0.0, 0.02, key=key, workers=workers)
    rounded = filled(aten.normal_.default, (70, 3), 0.0, 0.02, key=key, workers=workers, dtype=torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_uniforms_give_zero_as_often_as_torch(dtype, workers):
    # What would round to 16 becomes 0 in torch: half a step of the grid below 16, 1/512 of the range in bf16.
    count = 2 * CHUNK
    ours = filled(aten.uniform_.default, (count,), 0.0, 16.0, key=(0, "A", 0), workers=workers, dtype=dtype)
    torchs = torch.empty(count, dtype=dtype).uniform_(0.0, 16.0, generator=torch.Generator().manual_seed(0))
    expected = (torchs == 0).double().mean().item()
    assert expected > 1e-4
    assert (ours == 0).double().mean().item() == pytest.approx(expected, abs=6 * math.sqrt(expected / count))
    assert ours.float().mean().item() == pytest.approx(torchs.float().mean().item(), abs=6 * 16 / math.sqrt(6 * count))


def truncated_moments(mean, std, low, high):
    """Mean and variance of a truncated normal distribution, in closed form."""
    density = [math.exp(-(((bound - mean) / std) ** 2) / 2) / math.sqrt(2 * math.pi) for bound in (low, high)]
    z = [(bound - mean) / std for bound in (low, high)]
    mass = 0.5 * (math.erfc(z[0] / math.sqrt(2)) - math.erfc(z[1] / math.sqrt(2)))
    shift = (density[0] - density[1]) / mass
    variance = 1 + (z[0] * density[0] - z[1] * density[1]) / mass - shift**2
    return mean + std * shift, std**2 * variance


@pytest.mark.parametrize(
    "parameters",
    [(0.0, 0.02, -2.0, 2.0), (0.0, 1.0, -2.0, 2.0), (0.5, 1.0, 0.0, 1.0), (0.0, 1.0, 1.5, 3.0), (1.0, 2.0, -3.0, -2.0)],
    ids=["never out of bounds", "at 2 std", "narrow", "upper tail", "lower tail"],
)
def test_truncated_normals_have_the_moments_and_bounds_of_the_closed_form(parameters, workers):
    count = CHUNK + 5
    sample = filled(torch.ops.propcheck.trunc_normal_.default, (count,), *parameters, key=(0, "t", 0), workers=workers)
    mean, variance = truncated_moments(*parameters)
    assert parameters[2] <= sample.min() <= sample.max() <= parameters[3]
    assert sample.double().mean().item() == pytest.approx(mean, abs=5 * math.sqrt(variance / count))
    assert sample.double().var().item() == pytest.approx(variance, rel=0.015)


def test_truncated_normals_far_in_a_tail_are_not_all_at_the_bound(workers):
    # Beyond 9 standard deviations it is 9 + Exp(9) to first order, with a standard deviation of 1/9.
    sample = filled(torch.ops.propcheck.trunc_normal_.default, (50_000,), 0.0, 1.0, 9.0, 20.0, key=(0, "t"), workers=workers)
    mean, _ = truncated_moments(0.0, 1.0, 9.0, 20.0)
    assert sample.double().mean().item() == pytest.approx(mean, abs=5 * 0.11 / math.sqrt(50_000))


@pytest.mark.parametrize("count", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_chunks_neither_repeat_nor_correlate(count, workers):
    sample = filled(aten.normal_.default, (count,), 0.0, 1.0, key=(0, "w", 0), workers=workers)
    assert sample.isfinite().all()
    if count > 2 * CHUNK:
        first, second = sample[:CHUNK].double(), sample[CHUNK : 2 * CHUNK].double()
        assert abs((first * second).mean()) < 5 / math.sqrt(CHUNK)
        assert sample[2 * CHUNK] not in (sample[0], sample[CHUNK])
    # The whole prefix is that of a tensor that ends elsewhere: chunks do not know how many follow them.
    longer = filled(aten.normal_.default, (3 * CHUNK,), 0.0, 1.0, key=(0, "w", 0), workers=workers)
    assert torch.equal(sample[: count // CHUNK * CHUNK], longer[: count // CHUNK * CHUNK])


def test_values_do_not_depend_on_the_number_of_threads_nor_on_the_layout():
    samples = []
    for threads in (1, 2, 3):
        with Workers(threads) as pool:
            samples.append(filled(aten.normal_.default, (3, CHUNK), 0.0, 1.0, key=(0, "w", 0), workers=pool))
            transposed = torch.empty(CHUNK, 3).t()
            draw(aten.normal_.default, (transposed, 0.0, 1.0), {}, transposed, (0, "w", 0), pool)
            samples.append(transposed)
    assert all(torch.equal(samples[0], sample) for sample in samples)


def test_functional_forms_draw_what_the_in_place_forms_draw(workers):
    def functional(function, *args, **kwargs):
        memory = torch.empty(5, 7, dtype=torch.bfloat16)
        return draw(function, args, kwargs, memory, ("k",), workers)

    normal = filled(aten.normal_.default, (5, 7), 0.0, 1.0, key=("k",), workers=workers, dtype=torch.bfloat16)
    uniform = filled(aten.uniform_.default, (5, 7), key=("k",), workers=workers, dtype=torch.bfloat16)
    like = torch.zeros(5, 7, dtype=torch.bfloat16)
    assert torch.equal(functional(aten.randn.default, [5, 7], dtype=torch.bfloat16), normal)
    assert torch.equal(functional(aten.randn_like.default, like), normal)
    assert torch.equal(functional(aten.normal.float_float, 0.0, 1.0, [5, 7]), normal)
    assert torch.equal(functional(aten.rand.default, [5, 7], dtype=torch.bfloat16), uniform)
    assert torch.equal(functional(aten.rand_like.default, like), uniform)


def test_other_random_calls_leave_the_global_generator_as_it_was(workers):
    before = torch.get_rng_state()
    first = draw(aten.randperm.default, (50,), {}, torch.empty(0), ("k",), workers)
    assert torch.equal(first, draw(aten.randperm.default, (50,), {}, torch.empty(0), ("k",), workers))
    assert first.sort().values.tolist() == list(range(50))
    assert not torch.equal(first, draw(aten.randperm.default, (50,), {}, torch.empty(0), ("l",), workers))
    exponential = filled(aten.exponential_.default, (20_000,), 2.0, key=("k",), workers=workers)
    assert exponential.mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(20_000))
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_of_different_keys_differ():
    keys = [
        (seed, name, call, chunk) for seed in (0, 1) for name in ("a", "b", "a.b") for call in range(3) for chunk in range(3)
    ]
    firsts = {torch.randn(4, generator=generator_for(*key)).numpy().tobytes() for key in keys}
    assert len(firsts) == len(keys)
    assert torch.equal(torch.randn(4, generator=generator_for(0, "a")), torch.randn(4, generator=generator_for(0, "a")))
