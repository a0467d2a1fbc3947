"""b/f of each kind of feed-forward network, by quadrature and as a scan measures it."""

import gains
import pytest
from published import on_page


@pytest.mark.parametrize("name", gains.RANGES)
def test_backward_gain_over_forward_gain_is_in_its_range(name):
    low, high = gains.RANGES[name]
    for std in gains.STDS:  # the ranges are given to two decimals
        assert low - 0.005 < gains.by_quadrature(name, std) < high + 0.005, std
    assert on_page(gains.quadrature_row(name))


@pytest.mark.parametrize("name", gains.RANGES)
def test_a_scan_measures_the_same(name):
    """At width 256; the forms are those of infinite width."""
    assert gains.scanned(name) == pytest.approx(gains.by_quadrature(name, 1.0), rel=0.05)
    assert on_page(gains.scan_row(name))
