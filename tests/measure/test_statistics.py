"""Reductions against numpy in fp64, at sizes and ranges where fp32 fails, and the published cost of adding in bf16."""

import numpy as np
import pytest
import torch

from propcheck.measure.statistics import addition_statistics, frobenius, inner, moments


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(10_000_000,), (2, 1000, 5000), (1, 10_000_000), (10_000_000, 1)])
def test_ten_million_elements(shape, dtype):
    tensor = normal(*shape, scale=3.0).to(dtype) + 0.5
    exact = tensor.double().numpy()
    assert float(frobenius(tensor)) == pytest.approx(np.linalg.norm(exact.ravel()), rel=1e-12)
    found = moments(tensor)
    assert float(found.mean) == pytest.approx(exact.mean(), rel=1e-12)
    assert float(found.mean_square) == pytest.approx((exact**2).mean(), rel=1e-12)


def test_tensors_of_any_layout():
    tensor = normal(7, 300, 50)
    for view in (tensor.mT, tensor[:, ::3], tensor.permute(2, 0, 1), tensor[0, 0, 0], tensor[:0], tensor.expand(4, 7, 300, 50)):
        assert float(frobenius(view)) == pytest.approx(np.linalg.norm(view.double().numpy().ravel()), rel=1e-12)
        assert float(inner(view, 2 * view)) == pytest.approx(2 * (view.double().numpy() ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e25, 1e37])
def test_values_whose_squares_leave_the_range_of_fp32(scale):
    x, u = normal(5, 40, scale=scale), normal(5, 40, seed=1, scale=scale)
    found = addition_statistics(x, u, x + u)
    exact, of_x, of_u = (tensor.double().numpy() for tensor in (x + u, x, u))
    assert float(found.total.mean_square) == pytest.approx((exact**2).mean(), rel=1e-12, abs=0)
    cosine = (of_x * of_u).sum() / np.linalg.norm(of_x) / np.linalg.norm(of_u)
    assert float(found.cosine) == pytest.approx(cosine, rel=1e-9)
    assert float(frobenius(x)) > 0


@pytest.mark.parametrize(
    ("ratio", "unchanged", "error"),
    [
        (0.1, 0.018, 0.017),
        (0.02, 0.09, 0.083),
        (0.01, 0.17, 0.17),
        (0.0065, 0.26, 0.25),
        (0.0039, 0.39, 0.40),
        (0.001, 0.78, 0.80),
    ],
)
def test_what_an_addition_in_bf16_loses(ratio, unchanged, error):
    """A measured table: normal stream and update, by the ratio of their sizes; within 10 %."""
    stream, update = normal(256, 2048).bfloat16(), normal(256, 2048, seed=1, scale=ratio).bfloat16()
    found = addition_statistics(stream, update, stream + update)
    assert float(found.swallowed) == pytest.approx(unchanged, rel=0.1)
    assert float(found.add_error) == pytest.approx(error, rel=0.1)


def test_swallowed_counts_among_the_elements_that_were_to_move():
    stream = torch.tensor([[256.0, 256.0, 256.0, 256.0]]).bfloat16()
    update = torch.tensor([[0.5, 0.0, 4.0, 0.0]]).bfloat16()  # bf16 has steps of 2 at 256
    found = addition_statistics(stream, update, stream + update)
    assert float(found.swallowed) == 0.5
    assert float(found.add_error) == pytest.approx(0.5 / np.sqrt(0.5**2 + 4.0**2), rel=1e-12)


def test_an_addition_of_mixed_precision_is_measured_as_it_is():
    stream, update = normal(9, 64).bfloat16(), normal(9, 64, seed=1, scale=1e-3)
    total = stream + update
    assert total.dtype == torch.float32
    found = addition_statistics(stream, update, total)
    assert float(found.add_error) < 1e-4
    assert float(found.swallowed) == 0.0


def pairwise(rows):
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = [unit[i] @ unit[j] for i in range(len(unit)) for j in range(len(unit)) if i != j]
    return np.mean(cosines)


@pytest.mark.parametrize("common", [0.0, 0.3, 3.0])
def test_token_correlation_is_the_mean_over_all_pairs(common):
    rows = normal(60, 32) + common * normal(32, seed=1)
    found = addition_statistics(rows, torch.zeros(60, 32), rows).token_correlation
    assert float(found) == pytest.approx(pairwise(rows.double().numpy()), rel=1e-6)


def test_token_correlation_over_several_blocks_batches_and_zero_vectors():
    rows = normal(4, 100, 1000) * torch.logspace(-3, 3, 400).view(4, 100, 1)
    rows[1, 7] = 0
    rows[3, 99] = 0
    flat = rows.double().numpy().reshape(-1, 1000)
    found = addition_statistics(rows, torch.zeros_like(rows), rows)
    expected = pairwise(flat[np.abs(flat).max(axis=1) > 0])
    assert abs(expected) < 1e-3  # a sum in fp32 has too few digits for it
    assert float(found.token_correlation) == pytest.approx(expected, rel=1e-6)


def test_tokens_that_are_all_alike_and_tokens_that_cannot_be_compared():
    rows = normal(1, 16).expand(5, 16)
    assert float(addition_statistics(rows, rows, rows + rows).token_correlation) == pytest.approx(1.0, abs=1e-12)
    for alone in (torch.zeros(3, 4), torch.eye(1, 4), torch.eye(3, 4) * torch.tensor([[1.0], [0.0], [0.0]])):
        assert np.isnan(float(addition_statistics(alone, alone, alone + alone).token_correlation))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_counted_and_spread(value):
    stream, update = normal(300, 1000), normal(300, 1000, seed=1)
    stream[250, 3] = value
    found = addition_statistics(stream, update, stream + update)
    assert float(found.nonfinite) == 1
    assert np.isnan(float(found.token_correlation))
    assert not np.isfinite(float(found.total.mean_square))
    assert float(found.total_absmax) == abs(value) or np.isnan(value)
    assert np.isnan(float(found.total_absmax)) == np.isnan(value)
    assert np.isfinite(float(found.update.mean_square))
