"""Fans by torch's own count."""

import pytest
import torch

from propcheck.analysis.fan import fans


@pytest.mark.parametrize(
    ("module", "role"),
    [
        (torch.nn.Linear(5, 7), "linear"),
        (torch.nn.Embedding(11, 4), "embedding"),
        (torch.nn.Conv1d(6, 8, 3, groups=2), "convolution"),
        (torch.nn.Conv2d(3, 16, (4, 5)), "convolution"),
        (torch.nn.ConvTranspose2d(4, 6, 3), "convolution"),
    ],
)
def test_they_are_what_torch_counts(module, role):
    expected = torch.nn.init._calculate_fan_in_and_fan_out(module.weight)
    assert fans(tuple(module.weight.shape), role) == expected


@pytest.mark.parametrize(
    ("shape", "role"),
    [((7,), "linear"), ((), "scale"), ((4, 5), "bias"), ((4, 5), None), ((8, 5, 7), "linear"), ((8, 1, 1), "scale")],
)
def test_what_is_no_single_matrix_has_none(shape, role):
    assert fans(shape, role) == (None, None)
