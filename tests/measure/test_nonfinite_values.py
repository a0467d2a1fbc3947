"""What a tensor holds beside finite numbers, and at which tokens."""

import pytest
import torch

from propcheck.measure.nonfinite_values import Spoilt, content_of, spoilt_tokens


@pytest.mark.parametrize(
    ("shape", "place", "rows", "expected"),
    [
        ((2, 6, 8), (1, 4, 0), False, ((4,), 1, 6)),
        ((6, 2, 8), (4, 1, 0), False, ((4,), 1, 6)),
        ((12, 8), (10, 0), False, ((4,), 1, 6)),
        ((2, 3, 6, 8), (1, 2, 4, 0), False, ((4,), 1, 6)),
        ((2, 6, 3, 8), (1, 4, 2, 0), False, ((4,), 1, 6)),
        ((2, 3, 6, 6), (1, 2, 4, 0), True, ((4,), 1, 6)),
        ((2, 6, 6, 6), (1, 3, 4, 0), True, ((4,), 1, 6)),  # as many heads as tokens
        ((2, 8, 6), (1, 0, 4), False, ((4,), 1, 6)),
        ((2, 6), (1, 4), False, ((4,), 1, 6)),
        ((5, 7), (1, 4), False, ((), None, None)),
        ((8,), (4,), False, ((), None, None)),
    ],
)
def test_the_tokens_that_are_spoilt_are_found_by_the_shape(shape, place, rows, expected):
    tensor = torch.zeros(shape)
    tensor[place] = torch.nan
    assert spoilt_tokens(tensor, (2, 6), "NaN", rows=rows) == Spoilt(*expected)


def test_infinities_beside_a_nan_are_not_counted_as_one():
    scores = torch.zeros(2, 3, 6, 6)
    scores[:, :, :, 5] = -torch.inf
    scores[1, :, :2] = torch.nan
    assert spoilt_tokens(scores, (2, 6), "NaN", rows=False) == Spoilt((0, 1), 2, 6)
    assert spoilt_tokens(scores, (2, 6), "infinity", rows=False) == Spoilt((0, 1, 2, 3, 4, 5), 6, 6)


def test_a_tensor_is_told_in_words():
    given = torch.tensor([1.5, -2.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float16)
    found = content_of(given)
    assert (found.nan, found.plus, found.minus) == (True, True, True)
    assert found.words == "float16 numbers from -2 to 1.5 and NaN and infinity and -infinity"
    assert content_of(torch.tensor([1, 2])).finite
