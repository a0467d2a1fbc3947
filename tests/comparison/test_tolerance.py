"""How far two values may lie apart, against integrals and hand calculation."""

from __future__ import annotations

import math

import pytest

from propcheck.comparison.chance import chance_bound, log_scatter, pooled_scatter
from propcheck.config.gate_settings import read_tolerances
from propcheck.config.tolerances import Tolerances, parse_tolerance
from propcheck.errors import PropcheckError

# ------------------------------------------------------------------ shares


@pytest.mark.parametrize(
    ("given", "share"),
    [
        ("5%", 0.05),
        (" 5 % ", 0.05),
        ("0.05", 0.05),
        (0.05, 0.05),
        ("0", 0.0),
        (0, 0.0),
        ("0%", 0.0),
        ("1e-6", 1e-6),
        ("100%", 1.0),
        ("900%", 9.0),
        (0.999, 0.999),
    ],
)
def test_a_share_is_read(given, share):
    assert parse_tolerance(given) == pytest.approx(share, rel=1e-15)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nan", "must be finite and 0 or more"),
        (math.nan, "must be finite and 0 or more"),
        ("nan%", "must be finite and 0 or more"),
        ("inf", "must be finite and 0 or more"),
        (math.inf, "must be finite and 0 or more"),
        ("inf%", "must be finite and 0 or more"),
        (-0.05, "must be finite and 0 or more"),
        ("-5%", "must be finite and 0 or more"),
        ("5", 'write "5%" or "500%"'),
        (5, 'write "5%" or "500%"'),
        ("1", 'write "1%" or "100%"'),
        ("901%", 'the largest tolerance is "900%"'),
        ("1e9%", 'the largest tolerance is "900%"'),
        ("", "must be a share"),
        ("%", "must be a share"),
        ("5%%", "must be a share"),
        ("five", "must be a share"),
        ("0,05", "must be a share"),
        (True, "must be a share"),
        (None, "must be a share"),
        ([0.05], "must be a share"),
    ],
)
def test_what_is_no_share_is_refused_in_one_sentence(given, said):
    with pytest.raises(ValueError, match=said) as refused:
        parse_tolerance(given)
    assert "\n" not in str(refused.value)


def test_the_last_glob_counts_before_the_quantity_and_the_quantity_before_the_share():
    given = read_tolerances({"tolerance": "10%"}, ["loss=1%", "layers.*=20%", "layers.0.*=30%", "grad_norm=2%"])
    assert given.of("stream_rms", ("embed",)) == pytest.approx(0.1)
    assert given.of("grad_norm", ("head.weight",)) == pytest.approx(0.02)
    assert given.of("grad_norm", ("layers.3.mlp.up.weight",)) == pytest.approx(0.2)
    assert given.of("stream_rms", ("layers.0.attn", "h.0.attn")) == pytest.approx(0.3)
    assert given.of("stream_rms", ("h.0.attn", "layers.0.attn")) == pytest.approx(0.3)  # the name of either side
    assert given.of("loss", ()) == pytest.approx(0.01)
    assert given.of("update_rms", (None,)) == pytest.approx(0.1)


@pytest.mark.parametrize("given", ["los=1%", "nonsense=5%", "loss=nan", "loss=-1%", "layers.*=1e9%", "=5%", "loss=", "5"])
def test_a_tolerance_that_means_nothing_is_refused_by_its_name(given):
    with pytest.raises(PropcheckError) as refused:
        read_tolerances({}, [given])
    assert f"--tolerance {given}" in str(refused.value)


@pytest.mark.parametrize("section", [{"tolerance": "5"}, {"floor": -1.0}, {"floor": math.nan}, {"quantities": {"los": "1%"}}])
def test_a_section_that_means_nothing_is_refused(section):
    with pytest.raises(PropcheckError, match=r"^\[gate\]: "):
        read_tolerances(section)


# ------------------------------------------------------------------ chance


def within(t, freedom):
    """Probability that |T| is below t. With x = sqrt(n) tan(a) Student's density is a power of a cosine, by Simpson's rule."""

    def integral(end, steps=20_000):
        width = end / steps
        values = [math.cos(i * width) ** (freedom - 1) for i in range(steps + 1)]
        return width / 3 * (values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2]))

    return integral(math.atan(t / math.sqrt(freedom))) / integral(math.pi / 2)


@pytest.mark.parametrize("freedom", range(1, 9))
def test_few_seeds_are_judged_at_999_in_1000_of_students_distribution(freedom):
    errors = chance_bound(1.0, freedom, (1, 1)) / math.sqrt(2)
    assert 1 - within(errors, freedom) == pytest.approx(0.001, rel=2e-3)


@pytest.mark.parametrize("freedom", [9, 10, 30, 1000])
def test_more_seeds_are_judged_at_five_standard_errors(freedom):
    """Which is beyond 999 in 1000 from there on, and one in 1.7 million for a normal distribution."""
    errors = chance_bound(1.0, freedom, (1, 1)) / math.sqrt(2)
    assert errors == pytest.approx(5.0)
    assert 1 - within(errors, freedom) < 0.001
    assert math.erfc(5 / math.sqrt(2)) == pytest.approx(1 / 1.74e6, rel=0.01)


def test_two_means_differ_by_chance_as_their_standard_errors_say():
    # Five seeds each: t(8) = 5.041, s = 0.1: 5.041 x 0.1 x sqrt(1/5 + 1/5) = 0.3188.
    assert chance_bound(0.1, 8, (5, 5)) == pytest.approx(0.3188, abs=1e-4)
    # Two and three: t(3) = 12.924: 12.924 x 0.1 x sqrt(1/2 + 1/3) = 1.1798.
    assert chance_bound(0.1, 3, (2, 3)) == pytest.approx(1.1798, abs=1e-4)
    assert chance_bound(0.0, 8, (5, 5)) == 0.0


def test_the_scatter_is_that_of_logarithms_within_each_side():
    # ln 2 apart: deviations of +-ln(2)/2, variance 2 (ln(2)/2)^2 / 1 = 0.2402. The two sides may lie apart.
    assert log_scatter([1.0, 2.0]) == pytest.approx(math.log(2) / math.sqrt(2))
    assert log_scatter([1.0, 2.0], [100.0, 200.0]) == pytest.approx(math.log(2) / math.sqrt(2))
    # Degrees of freedom 2 and 1: (2 x 0.0 + 1 x 0.2402) / 3.
    assert log_scatter([5.0, 5.0, 5.0], [1.0, 2.0]) == pytest.approx(math.sqrt(0.2402 / 3), rel=1e-3)
    assert log_scatter([7.0], [1.0, 2.0]) == pytest.approx(math.log(2) / math.sqrt(2))  # one value says nothing of its scatter


@pytest.mark.parametrize("side", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_what_has_no_logarithm_has_no_scatter(side):
    assert log_scatter(side) is None
    assert log_scatter(side, [1.0, math.e]) == pytest.approx(1 / math.sqrt(2))


def test_several_places_share_the_root_mean_square_of_their_scatters():
    assert pooled_scatter([0.3, 0.4]) == pytest.approx(math.sqrt(0.125))
    assert pooled_scatter([]) == 0.0


def test_by_default_5_percent_pass_and_a_millionth_of_a_millionth_is_zero():
    assert (Tolerances().share, Tolerances().floor) == (0.05, 1e-12)
