"""The closed forms are within the errors that Kedia et al. 2024 (arXiv 2403.09635) published for them."""

import kedia
import pytest
from published import on_page


@pytest.mark.parametrize("name", kedia.PUBLISHED)
def test_errors_are_within_those_published(name):
    measured = kedia.percentiles(name)
    # Published to one decimal.
    assert all(found <= published + 0.05 for found, published in zip(measured, kedia.PUBLISHED[name], strict=True)), measured
    assert on_page(kedia.row(name))
