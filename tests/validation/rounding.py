"""What an addition in bf16 loses, as the scan's own statistics measure it.

Stream and update are Gaussian. ``swallowed`` is the share of elements that the addition leaves as they were, ``add_error`` the
rounding error relative to the update.
"""

from __future__ import annotations

from functools import cache

import torch
from published import Row

from propcheck.measure.statistics import addition_statistics

# update / stream -> (swallowed, add_error); measured once with torch 2.13 on a CPU, by plain arithmetic on the tensors.
TABLE = {
    0.1: (0.018, 0.017),
    0.02: (0.09, 0.083),
    0.01: (0.17, 0.17),
    0.0065: (0.26, 0.25),
    0.0039: (0.39, 0.40),
    0.001: (0.78, 0.80),
}


@cache
def measured(ratio: float) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(1024, 1024, generator=generator).bfloat16()
    update = (torch.randn(1024, 1024, generator=generator) * ratio).bfloat16()
    found = addition_statistics(stream, update, stream + update)
    return found.swallowed.item(), found.add_error.item()


def row(ratio: float) -> Row:
    swallowed, error = TABLE[ratio]
    return Row(
        f"bf16 addition at update/stream {ratio:g}: swallowed, add_error",
        "Gaussian, 2²⁰ elements",
        f"{swallowed:g} / {error:g}",
        "not published: earlier measurement in plain arithmetic",
        measured(ratio),
        "{:.3f}",
    )


def rows() -> list[Row]:
    return [row(ratio) for ratio in TABLE]
