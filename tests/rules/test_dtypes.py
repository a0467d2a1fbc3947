"""Constants of the dtypes."""

import torch

from propcheck.rules.dtypes import LARGEST, SMALLEST_NORMAL


def test_the_largest_and_smallest_numbers_are_those_of_torch():
    for name, largest in LARGEST.items():
        info = torch.finfo(getattr(torch, name))
        assert (largest, SMALLEST_NORMAL[name]) == (info.max, info.smallest_normal)
