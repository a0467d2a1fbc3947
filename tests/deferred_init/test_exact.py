"""Half-precision buffers against the same calls in fp64: the excess over one rounding, of tables built both ways."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from propcheck.deferred_init import fp64_reference as exact
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record

POSITIONS, HEAD = 2048, 128


class Holder(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("table", make())


def error(make, name="table"):
    recording = record(lambda: Holder(make))
    entry = next(one for one in recording.entries if one.name == name)
    with Workers(1) as workers:
        return Materializer(recording, workers).fp64_error(entry, 0)


def angles(dtype):
    inverse = 1.0 / (10000 ** (torch.arange(0, HEAD, 2, dtype=dtype) / HEAD))
    return torch.outer(torch.arange(POSITIONS, dtype=dtype), inverse)  # [2048, 64]


def test_rotary_tables_computed_in_half_precision_are_off_by_the_whole_range():
    # EleutherAI/gpt-neox issue 1003. In bf16 above 256 not every position is a number of its own, and 2047 is 2048.
    assert error(lambda: angles(torch.bfloat16).cos()) == pytest.approx(2, abs=0.05)
    assert error(lambda: angles(torch.bfloat16).sin()) == pytest.approx(2, abs=0.05)


def test_so_are_those_that_the_default_dtype_made_half_precision():
    def make():
        torch.set_default_dtype(torch.bfloat16)
        try:
            positions = torch.arange(POSITIONS).to(torch.get_default_dtype())
            return (positions[:, None] / 10000 ** (torch.arange(0, HEAD, 2).to(torch.get_default_dtype()) / HEAD)).cos()
        finally:
            torch.set_default_dtype(torch.float32)

    assert error(make) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_computed_in_fp32_and_rounded_at_the_end_are_not(dtype):
    # What fp32 leaves of an angle of 2047: half of 2^-13 and more on the way, some 1e-4.
    assert error(lambda: angles(torch.float32).cos().to(dtype)) < 3e-4


def test_a_frequency_is_off_by_what_its_exponent_lost():
    # 1 / 10000^x for x up to 1, x rounded to 8 bits: up to ln(10000) / 256 = 3.6 % of each, of the largest much less.
    def make():
        return 1.0 / (10000 ** (torch.arange(0, HEAD, 2, dtype=torch.bfloat16) / HEAD))

    assert 0.001 < error(make) < 0.036
    assert error(lambda: 1.0 / (10000 ** (torch.arange(0, HEAD, 2) / HEAD))) is None  # fp32 is no half precision


def test_in_place_calls_and_copies_are_followed():
    def make():
        table = torch.empty(64, dtype=torch.bfloat16)
        table.copy_(torch.arange(64, dtype=torch.bfloat16)).add_(1000).sub_(1000)
        return table

    # Between 512 and 1024 bf16 has every fourth number, above 1024 every eighth: 1036 = 1000 + 36 becomes 1032 or 1040, off
    # by 4 of 63. All of 0 to 63 are bf16 numbers.
    assert error(make) == pytest.approx(4 / 63, rel=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((8, 8), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1),
        lambda: torch.full((8, 8), -math.inf, dtype=torch.float16).triu(1) + 1,
        lambda: torch.tensor([0.1, 0.2], dtype=torch.bfloat16),  # the literal is the number that was meant
        lambda: torch.tensor([[0.1, 0.3]]).to(torch.bfloat16).view(2),
        lambda: torch.arange(300).to(torch.bfloat16),  # rounded, once
    ],
)
def test_masks_literals_and_single_roundings_are_exact(make):
    assert error(make) == 0


def test_a_number_that_only_half_precision_makes_infinite_is_infinitely_off():
    assert error(lambda: (torch.full((4,), 300, dtype=torch.float16) ** 2) / 300) == math.inf
    assert error(lambda: torch.full((4,), 1e6).to(torch.float16)) is None  # no finite number to compare with


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(4).bfloat16(),
        lambda: torch.empty(4, dtype=torch.bfloat16),
        lambda: torch.zeros(4, dtype=torch.bfloat16),  # nothing to be off from
        lambda: torch.arange(4),
        lambda: torch.arange(4.0),
        lambda: torch.arange(4, dtype=torch.int16).view(torch.bfloat16),  # bits
        lambda: torch.empty(0, dtype=torch.bfloat16),
    ],
)
def test_what_cannot_be_compared_is_none(make):
    assert error(make) is None


def test_a_parameter_is_never_compared():
    assert error(lambda: torch.ones(1, dtype=torch.bfloat16), name="weight") is None


def test_what_is_too_large_is_not_computed(monkeypatch):
    def make():
        return torch.arange(300, dtype=torch.bfloat16).div(3).mul(3)

    assert error(make) is not None
    monkeypatch.setattr(exact, "_MOST", 299)
    assert error(make) is None
