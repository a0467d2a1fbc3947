"""Exact facts about one parameter's values: moments, zeros, non-finite values, rows that repeat."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from propcheck.build.random import CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.build.random import Workers


@dataclass(frozen=True, slots=True)
class Census:
    """Of one tensor; None where there is nothing to count. NaN and infinity make mean, std and absmax what they are."""

    mean: float | None
    std: float | None
    absmax: float | None
    zeros: int | None
    nonfinite: int | None
    duplicate_rows: int | None


def census(tensor: Tensor, workers: Workers) -> Census:
    """Count ``tensor``, of any shape and dtype, on the CPU.

    Chunks are summed in fp32 and combined in fp64; ``std`` is the population's, about the mean.
    """
    flat = tensor.detach().contiguous().view(-1)
    count = flat.numel()
    if not count:
        return Census(None, None, None, 0, 0, None)
    chunks = [flat[start : start + CHUNK] for start in range(0, count, CHUNK)]
    totals, squares, largest, nonzero = zip(*workers.map(_count, chunks), strict=True)
    mean, square = sum(totals) / count, sum(squares) / count
    finite = math.isfinite(square)
    variance = square - mean * mean
    if finite and variance < 1e-6 * square:  # the difference has lost its digits: take it about the mean
        variance = sum(float(chunk.double().sub_(mean).square_().sum()) for chunk in chunks) / count
    return Census(
        mean=mean,
        std=math.sqrt(variance) if finite else math.nan,
        absmax=math.nan if any(map(math.isnan, largest)) else max(largest),
        zeros=count - sum(nonzero),
        # A finite sum of squares has no other terms; an infinite one may be an overflow.
        nonfinite=0 if finite else sum(int((~torch.isfinite(chunk)).sum()) for chunk in chunks),
        duplicate_rows=duplicate_rows(tensor.detach()),
    )


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _count(chunk: Tensor) -> tuple[float, float, float, int]:
    """Return sum, sum of squares, largest magnitude and the number of non-zero values of a 1-d tensor."""
    wide = chunk.double() if chunk.dtype == torch.float64 or not chunk.is_floating_point() else chunk.float()
    low, high = torch.aminmax(wide)
    bits = chunk.view(_BITS[chunk.element_size()]) if chunk.is_floating_point() else None
    # Shifting the sign out makes -0 a zero too; numpy counts set integers at memory speed.
    nonzero = int(np.count_nonzero((bits << 1).numpy())) if bits is not None else int(chunk.count_nonzero())
    largest = max(abs(float(low)), abs(float(high))) if not math.isnan(float(low)) else math.nan
    return float(wide.sum()), float(torch.dot(wide, wide)), largest, nonzero


# Elements of a row that are compared first: equal beginnings are rare unless rows are equal.
_PREFIX = 16


def duplicate_rows(tensor: Tensor) -> int | None:
    """Return how many rows (slices of the first dimension) equal an earlier one bit by bit; None below two dimensions."""
    if tensor.dim() < 2 or tensor.dtype.is_complex:
        return None
    rows = tensor.reshape(tensor.shape[0], -1)
    if not rows.shape[1]:
        return None
    candidates = np.arange(len(rows))
    width = _PREFIX
    while True:
        bits = rows[:, :width] if len(candidates) == len(rows) else rows[torch.from_numpy(candidates), :width]
        keys = bits.contiguous().view(torch.uint8).numpy()
        _, first, inverse, counts = np.unique(
            keys.view(np.dtype((np.void, keys.shape[1]))).ravel(), return_index=True, return_inverse=True, return_counts=True
        )
        if width >= rows.shape[1] or len(first) == len(candidates):
            return len(candidates) - len(first)
        candidates, width = candidates[counts[inverse] > 1], width * 16
