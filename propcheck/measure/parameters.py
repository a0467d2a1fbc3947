"""Exact statistics of the values of a parameter: moments, zeros, non-finite values, duplicate rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from propcheck.deferred_init.keyed_rng import CHUNK
from propcheck.measure.statistics import as_integers

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.deferred_init.keyed_rng import Workers


@dataclass(frozen=True, slots=True)
class Census:
    """Of one tensor; None where undefined. NaN and infinity propagate into mean, std and absmax."""

    mean: float | None
    std: float | None
    absmax: float | None
    zeros: int
    nonfinite: int
    duplicate_rows: int | None


def census(tensor: Tensor, workers: Workers) -> Census:
    """Return the statistics of a tensor of any shape and dtype on the CPU; a complex number counts as two numbers.

    Short rows are summed in fp32 and combined in fp64; ``std`` is the population standard deviation.
    """
    tensor = tensor.detach()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().view(-1)
    count = flat.numel()
    if not count:
        return Census(None, None, None, 0, 0, None)
    chunks = [flat[start : start + CHUNK] for start in range(0, count, CHUNK)]
    totals, squares, largest, nonzero = zip(*workers.map(_count, chunks), strict=True)
    mean, square = sum(totals) / count, sum(squares) / count
    # If the sum of squares is finite, so are all terms; if it is infinite, it may be an overflow.
    nonfinite = 0 if math.isfinite(square) else sum(int((~torch.isfinite(chunk)).sum()) for chunk in chunks)
    variance = square - mean * mean
    if not nonfinite and not (variance > 1e-6 * square and square > _LEAST_SQUARE):
        # The difference lost its digits, or the squares left fp32's range: use fp64 and deviations from the mean.
        mean = sum(float(chunk.sum(dtype=torch.float64)) for chunk in chunks) / count
        variance = sum(float((chunk.double() - mean).square_().sum()) for chunk in chunks) / count
    return Census(
        mean=mean,
        std=math.nan if nonfinite else math.sqrt(variance),
        absmax=math.nan if any(map(math.isnan, largest)) else max(largest),
        zeros=count - sum(nonzero),
        nonfinite=nonfinite,
        duplicate_rows=duplicate_rows(tensor),
    )


# Below this mean square, the squares lie in fp32's subnormal range, where digits are lost.
_LEAST_SQUARE = 1e-30
# Elements that are summed in fp32.
_ROW = 1 << 10


def _count(chunk: Tensor) -> tuple[float, float, float, int]:
    """Return sum, sum of squares, largest magnitude and the number of non-zero values of a 1-d tensor."""
    wide = chunk.double() if chunk.dtype == torch.float64 or not chunk.is_floating_point() else chunk.float()
    low, high = torch.aminmax(wide)
    bits = as_integers(chunk) if chunk.is_floating_point() else None
    # Shifting the sign out makes -0 a zero too; numpy counts set integers at memory speed.
    nonzero = int(np.count_nonzero((bits << 1).numpy())) if bits is not None else int(chunk.count_nonzero())
    largest = max(abs(float(low)), abs(float(high))) if not math.isnan(float(low)) else math.nan
    whole = len(wide) // _ROW * _ROW
    total = square = 0.0
    for rows in (wide[:whole].view(-1, _ROW), wide[whole:].view(1, -1)):
        lengths = torch.linalg.vector_norm(rows, dim=-1).double()
        total += float(rows.sum(-1).sum(dtype=torch.float64))
        square += float(torch.dot(lengths, lengths))
    return total, square, largest, nonzero


# The elements of a row that are compared first; rows rarely start alike unless they are equal.
_PREFIX = 16


def duplicate_rows(tensor: Tensor) -> int | None:
    """Return how many rows (slices of the first dimension) are bitwise equal to an earlier row; None below two dimensions."""
    if tensor.dim() < 2:
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
