"""What DeepNorm, Peri-LN and Keel promise of 64 blocks, as a scan measures it."""

import depth_scaling
import pytest
from published import on_page


def test_deepnorm_sums_are_alpha_squared():
    """sqrt(2 * 64) = 11.314 at every addition; the update adds its own 2e-3 or so."""
    sums = depth_scaling.mean_squares("deepnorm")
    assert len(sums) == 128
    assert sums == pytest.approx([11.314] * 128, rel=2e-3)
    assert set(depth_scaling.scanned("deepnorm").sublayers.placement) == {"deepnorm"}
    assert on_page(depth_scaling.deepnorm_row())


def test_a_peri_ln_stream_grows_by_one_an_addition():
    """Each update has RMS 1, and 128 of them that know nothing of each other make 129.

    Those of one model are correlated a little: 113 to 125 were measured before, 3 to 12 % below.
    """
    assert list(depth_scaling.scanned("sandwich").sublayers.update_rms) == pytest.approx([1.0] * 256, rel=1e-3)
    assert depth_scaling.mean_squares("sandwich")[-1] == pytest.approx(129, rel=0.12)
    assert set(depth_scaling.scanned("sandwich").sublayers.placement) == {"sandwich"}
    assert on_page(depth_scaling.peri_ln_row())


def test_a_keel_gradient_is_the_same_at_both_ends():
    assert depth_scaling.keel_gradient() == pytest.approx(1.0, abs=0.02)
    assert on_page(depth_scaling.keel_row())
    placements = list(depth_scaling.scanned("keel").sublayers.placement)
    assert placements[:128] == ["pre"] + ["pre+post"] * 127


@pytest.mark.parametrize("placement", ["deepnorm", "sandwich", "keel"])
def test_none_of_them_is_found_fault_with(placement):
    assert not [finding for finding in depth_scaling.scanned(placement).findings if finding.severity == "error"]
