"""How much of an update a bf16 addition loses, by the ratio of update and stream."""

import pytest
import rounding
from published import on_page


@pytest.mark.parametrize("ratio", rounding.TABLE)
def test_lost_elements_and_error_are_those_of_the_table(ratio):
    assert rounding.measured(ratio) == pytest.approx(rounding.TABLE[ratio], rel=0.1)
    assert on_page(rounding.row(ratio))
