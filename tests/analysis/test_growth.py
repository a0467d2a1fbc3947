"""Which law a curve is said to follow, on curves whose law is written out."""

import dataclasses
import math
import random

import pytest
from synthetic import additive, factors, post_norm, qwen, run_of, with_gradient

from propcheck.analysis.growth import describe, gradient_growth, growths, stream_growth, with_growth
from propcheck.analysis.profile import profile
from propcheck.records.store import read_run, write_run


def both(records):
    curve = profile(run_of(records))
    return stream_growth(curve), gradient_growth(curve)


def shaped(blocks, stream=lambda depth: 1.0, gradient=lambda depth: 1.0):
    """A stream of ``stream(blocks before the place)``, and the same of the gradient."""
    return [
        with_gradient(dataclasses.replace(r, sum_rms=stream(r.site // 2 + 1)), gradient(r.site // 2), gradient(r.site // 2 + 1))
        for r in additive(blocks)
    ]


@pytest.mark.parametrize("blocks", [8, 32, 128])
@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_a_power_of_the_depth_is_told_with_its_exponent(blocks, exponent):
    stream, gradient = both(
        shaped(blocks, lambda depth: 3 * depth**exponent, lambda depth: 0.01 * max(depth, 0.3) ** -exponent)
    )
    assert (stream.law, gradient.law) == ("power", "power")
    assert (stream.offset, gradient.offset) == (0, 0)
    assert stream.exponent == pytest.approx(exponent)
    assert gradient.exponent == pytest.approx(-exponent)


@pytest.mark.parametrize("blocks", [8, 32, 128])
@pytest.mark.parametrize("rate", [1.1, 0.9])
def test_a_factor_a_block_is_an_exponential(blocks, rate):
    stream, gradient = both(factors(blocks, forward=rate, backward=rate))
    assert (stream.law, gradient.law) == ("exponential", "exponential")
    assert stream.rate == pytest.approx(rate)
    assert gradient.rate == pytest.approx(rate)
    assert stream.total == pytest.approx(rate ** (blocks - 1))
    assert gradient.total == pytest.approx(rate ** (blocks - 2))


def test_the_same_end_value_has_another_law():
    # 64^(1/2) = 8 = e^(ln 8).
    rooted, _ = both(shaped(64, lambda depth: depth**0.5))
    multiplied, _ = both(shaped(64, lambda depth: 8 ** ((depth - 1) / 63)))
    assert rooted.total == pytest.approx(8)
    assert multiplied.total == pytest.approx(8)
    assert (rooted.law, multiplied.law) == ("power", "exponential")


def test_additions_to_a_large_embedding_are_no_exponential():
    # S = 25 + 1.09 depth: the embedding outweighs the updates of 23 blocks; an exponential is nearer than depth^p.
    stream, gradient = both(additive(64, embedding=5.0))
    assert (stream.law, gradient.law) == ("power", "power")
    assert stream.offset == pytest.approx(25 / 1.09, rel=0.01)
    assert stream.exponent == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("blocks", [12, 64])
@pytest.mark.parametrize("offset", [2, 4, 20])
def test_an_offset_is_told_as_it_is(blocks, offset):
    stream, gradient = both(shaped(blocks, lambda depth: (depth + offset) ** 0.5, lambda depth: 1 / (depth + offset)))
    assert describe(stream, "block").startswith(f"as (depth + {offset})^0.50, a power law, over")
    assert describe(gradient, "block").startswith(f"as (depth + {offset})^-1.00, a power law, over")


@pytest.mark.parametrize("seed", range(4))
def test_an_offset_that_noise_hides_is_not_told(seed):
    # d ln v / d ln depth of (depth + 20)^0.5 is 0.5 depth / (depth + 20): 0.23 at block 17, 0.38 at block 64.
    draw = random.Random(seed)
    stream, _ = both(shaped(64, lambda depth: (depth + 20) ** 0.5 * draw.lognormvariate(0, 0.003)))
    assert (stream.law, stream.offset) == ("power", None)
    assert 0.23 < stream.exponent < 0.38
    assert describe(stream, "block") == f"as depth^{stream.exponent:.2f} on average, a power law, over blocks 16 to 63"


def test_a_stream_that_hardly_changes_is_flat():
    stream, gradient = both(post_norm(32))
    assert (stream.law, gradient.law) == ("flat", "flat")
    assert stream.growth_exponent == pytest.approx(0, abs=1e-12)


def test_a_jump_follows_no_law():
    stream, _ = both(shaped(32, lambda depth: 1.0 if depth < 20 else 30.0))
    assert stream.law == "neither"


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_two_percent_hides_neither_law(seed):
    draw = random.Random(seed)
    rooted, _ = both(shaped(32, lambda depth: depth**0.5 * draw.lognormvariate(0, 0.02)))
    multiplied, _ = both(shaped(32, lambda depth: 1.1**depth * draw.lognormvariate(0, 0.02)))
    assert (rooted.law, multiplied.law) == ("power", "exponential")


def test_what_noise_hides_is_told_as_either():
    # Over blocks 2 to 7, 1.05^depth and the nearest power law differ by less than one percent up and down.
    stream, _ = both(shaped(8, lambda depth: 1.05**depth * (1.01 if depth % 2 else 0.99)))
    assert stream.law == "either"
    assert describe(stream, "block") == "as a power law or an exponential (too few blocks to tell), over blocks 2 to 7"
    assert stream.rate == pytest.approx(1.05, abs=0.01)


def test_few_blocks_have_a_factor_and_no_law():
    stream, gradient = both(additive(4))
    assert stream.law is None
    assert stream.total == pytest.approx(additive(4)[7].sum_rms / additive(4)[1].sum_rms)
    assert (gradient.first, gradient.last, gradient.law) == (3, 1, None)
    assert both(additive(1)) == (None, None)


def test_growth_exponents_leave_the_embedding_out():
    # OLMo 2 (arXiv 2501.00656): ln(last / first) over the number of blocks, from outputs of blocks.
    records = qwen()
    stream, gradient = both(records)
    assert stream.growth_exponent == pytest.approx(math.log(records[127].sum_rms / records[1].sum_rms) / 64)
    back = math.log(records[2].grad_stream_norm / records[126].grad_stream_norm) / 64
    assert gradient.growth_exponent == pytest.approx(back)


def test_the_stock_qwen_is_sqrt_forward_and_one_over_depth_backward():
    stream, gradient = both(qwen())
    assert (stream.law, gradient.law) == ("power", "power")
    assert stream.exponent == pytest.approx(0.5, abs=0.01)
    assert gradient.exponent == pytest.approx(-1, abs=0.03)
    assert describe(stream, "block") == "as depth^0.50, a power law, over blocks 16 to 63"


def test_a_step_beyond_all_floats_is_infinite_and_no_error():
    stream, _ = both(shaped(2, lambda depth: 1e-200 if depth == 1 else 1e200))
    assert (stream.factor, stream.total) == (math.inf, math.inf)


def test_values_that_have_no_logarithm_are_left_out():
    records = shaped(32, lambda depth: depth**0.5 if depth % 5 else math.nan)
    stream, _ = both(records)
    assert stream.law == "power"
    assert stream.exponent == pytest.approx(0.5)


def test_the_growth_of_a_run_is_computed_once_and_stored(tmp_path):
    run = with_growth(run_of(additive(8)))
    assert run.growth == growths(run_of(additive(8)))
    assert with_growth(run) is run
    write_run(run, tmp_path)
    assert read_run(tmp_path).growth == run.growth
    assert [growth.site for growth in run.growth] == [0]
