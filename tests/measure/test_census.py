"""The census of a parameter against numpy in fp64."""

import numpy as np
import pytest
import torch

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.measure.parameters import census, duplicate_rows


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as pool:
        yield pool


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, (1 << 20) + 1, 3_000_000])
def test_moments_of_any_size_and_dtype(size, dtype, workers):
    tensor = (normal(size) * 0.02).to(dtype)
    exact = tensor.double().numpy().copy()
    found = census(tensor, workers)
    assert found.std == pytest.approx(exact.std(), rel=1e-6)
    assert found.mean == pytest.approx(exact.mean(), rel=1e-6, abs=1e-6 * exact.std() / size**0.5)
    assert found.absmax == np.abs(exact).max()
    assert (found.zeros, found.nonfinite, found.duplicate_rows) == (np.count_nonzero(exact == 0), 0, None)
    assert np.array_equal(tensor.double().numpy(), exact)  # it is only looked at


@pytest.mark.parametrize("scale", [1e-35, 1e-20, 1e-15, 1e15, 1e19, 1e30])
def test_values_whose_squares_leave_the_range_of_fp32(scale, workers):
    tensor = normal(5000) * scale
    found = census(tensor, workers)
    assert found.std == pytest.approx(tensor.double().numpy().std(), rel=1e-6, abs=0)
    assert found.mean == pytest.approx(tensor.double().numpy().mean(), rel=1e-5, abs=0)
    assert found.nonfinite == 0


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e-5, 300.0])
def test_constants_have_no_spread(value, workers):
    found = census(torch.full((4, 1000), value), workers)
    exact = float(np.float32(value))
    assert found.std == pytest.approx(0, abs=1e-9 * abs(value))
    assert found.mean == pytest.approx(exact, rel=1e-12)
    assert (found.absmax, found.zeros, found.duplicate_rows) == (abs(exact), 4000 if value == 0 else 0, 3)


def test_a_small_spread_about_a_large_mean(workers):
    tensor = 1000 + normal(100_000) * 0.01
    assert census(tensor, workers).std == pytest.approx(tensor.double().numpy().std(), rel=1e-6)


def test_minus_zero_is_a_zero_and_the_smallest_number_is_none(workers):
    for dtype, smallest in ((torch.float32, 1e-45), (torch.bfloat16, 1e-40), (torch.float16, 6e-8), (torch.float64, 5e-324)):
        tensor = torch.tensor([0.0, -0.0, smallest, -smallest, 1.0], dtype=dtype)
        assert census(tensor, workers).zeros == 2


def test_nan_and_infinity_are_counted_and_come_through(workers):
    tensor = normal(40, 50_000)
    tensor[3, 17], tensor[39, 49_999] = float("inf"), float("-inf")
    found = census(tensor, workers)
    assert found.nonfinite == 2
    assert found.absmax == float("inf")
    assert np.isnan(found.std)
    tensor[0, 0] = float("nan")
    found = census(tensor, workers)
    assert (found.nonfinite, found.zeros) == (3, int((tensor == 0).sum()))
    assert all(map(np.isnan, (found.mean, found.std, found.absmax)))


def test_integers_booleans_and_complex_numbers(workers):
    found = census(torch.arange(-5, 6), workers)
    assert (found.mean, found.std, found.absmax, found.zeros) == (0.0, pytest.approx(10**0.5), 5.0, 1)
    found = census(torch.tensor([[True, False], [True, False]]), workers)
    assert (found.mean, found.zeros, found.nonfinite, found.duplicate_rows) == (0.5, 2, 0, 1)
    turns = torch.polar(torch.ones(8), torch.arange(8) * torch.pi / 4)  # a rotary table: cos and sin
    found = census(turns, workers)
    assert found.std == pytest.approx(0.5**0.5, rel=1e-6)
    assert found.absmax == pytest.approx(1.0)
    assert census(turns.conj(), workers).std == pytest.approx(found.std, rel=1e-12)


def test_an_empty_tensor_and_a_single_number(workers):
    found = census(torch.empty(0, 5), workers)
    assert (found.mean, found.std, found.absmax, found.zeros, found.nonfinite) == (None, None, None, 0, 0)
    found = census(torch.tensor(-2.0), workers)
    assert (found.mean, found.std, found.absmax, found.duplicate_rows) == (-2.0, 0.0, 2.0, None)


def test_tensors_that_are_not_contiguous(workers):
    tensor = normal(30, 40)
    for view in (tensor.T, tensor[:, ::3], tensor[:1].expand(7, 40)):
        assert census(view, workers).std == pytest.approx(view.double().numpy().std(), rel=1e-6)
        assert duplicate_rows(view) == len(view) - len(np.unique(view.numpy(), axis=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 255, 256, 257, 5000])
def test_rows_that_repeat(width, dtype):
    base = (normal(1, width) * 1000).to(dtype)
    rows = base.repeat(9, 1)
    for row, column in ((1, 0), (2, width // 2), (3, width - 1), (4, min(16, width - 1)), (5, min(256, width - 1))):
        rows[row, column] += 1000
    assert duplicate_rows(rows) == 9 - len(np.unique(rows.double().numpy(), axis=0)) > 0


def test_rows_are_compared_bit_by_bit():
    assert duplicate_rows(torch.tensor([[0.0, 1.0], [-0.0, 1.0]])) == 0
    assert duplicate_rows(torch.full((3, 2), float("nan"))) == 2
    assert duplicate_rows(torch.zeros(4, 0)) is None
    assert duplicate_rows(torch.zeros(4)) is None
    assert duplicate_rows(torch.zeros(4, 2, 3)) == 3
