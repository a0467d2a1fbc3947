"""Lemma 2 and theorem 1 of Xiong et al. 2020 (arXiv 2002.04745), measured by a scan of the paper's setting."""

import math

import pytest
import xiong
from published import on_page


@pytest.mark.parametrize(("width", "layers"), xiong.SHAPES)
def test_post_norm_sums_have_three_halves_of_the_width(width, layers):
    sums = xiong.squared_norms(width, layers, pre=False)
    assert len(sums) == 2 * layers
    assert all(abs(value - 1.5) < 0.2 for value in sums[1::2])
    # The lemma is of the FFN's additions. Uniform attention over tokens of squared norm d adds between 0 (they are independent,
    # and many) and d (they are the same).
    assert all(1.0 - 0.2 < value < 2.0 + 0.2 for value in sums[::2])
    assert on_page(xiong.post_row(width, layers))


@pytest.mark.parametrize(("width", "layers"), xiong.SHAPES)
def test_pre_norm_streams_stay_between_the_bounds_at_every_layer(width, layers):
    streams = xiong.squared_norms(width, layers, pre=True)[1::2]
    assert len(streams) == layers
    for layer, value in enumerate(streams, start=1):
        assert 1 + layer / 2 <= value <= 1 + 3 * layer / 2, layer
    assert on_page(xiong.pre_row(width, layers))


def test_the_last_gradient_of_post_norm_does_not_depend_on_the_depth():
    """Fig. 3; theorem 1: O(d sqrt(ln d)) whatever L is."""
    gradients = [xiong.last_gradient(layers, pre=False) for layers in xiong.DEPTHS]
    assert max(gradients) / min(gradients) < 1.25
    assert on_page(xiong.gradient_row(pre=False))


def test_the_last_gradient_of_pre_norm_falls_as_one_over_the_root_of_the_depth():
    """Fig. 3; theorem 1: O(d sqrt(ln(d) / L)). From 6 to 48 layers: sqrt(1/8) = 0.354."""
    gradients = [xiong.last_gradient(layers, pre=True) for layers in xiong.DEPTHS]
    assert gradients == sorted(gradients, reverse=True)
    assert gradients[-1] / gradients[0] == pytest.approx(math.sqrt(xiong.DEPTHS[0] / xiong.DEPTHS[-1]), rel=0.35)
    assert on_page(xiong.gradient_row(pre=True))
