"""Numbers of one tensor: reduced row by row in fp32, combined in fp64, and left on the device until the pass is over.

torch's own CPU norm of a large fp32 tensor accumulates in fp32 throughout and is about 1 % off at 10^8 elements; rows are
short enough for fp32, their sums are not. Rows are tokens: every tensor is seen as [tokens, width]. A result is a 0-d fp64
tensor; nothing here synchronises with the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rows_fp32(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as [tokens, width] in fp32 (fp64 stays fp64): the one upcast that serves all its statistics."""
    tensor = tensor.detach()
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    return wide.reshape(-1, wide.shape[-1] if wide.dim() else 1)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner product of two tensors of shape [tokens, width]."""
    return (left * right).sum(-1).sum(dtype=torch.float64)


def frobenius(tensor: Tensor) -> Tensor:
    """Return the Frobenius norm of a tensor of any shape and dtype."""
    rows = rows_fp32(tensor)
    return dot(rows, rows).sqrt()


@dataclass(slots=True)
class Moments:
    """Mean and mean square of a tensor; keeps the fp32 rows while they are of use to others."""

    mean: Tensor
    mean_square: Tensor

    @property
    def rms(self) -> Tensor:
        """Root of the mean square."""
        return self.mean_square.sqrt()


def moments(rows: Tensor) -> Moments:
    """Return the moments of [tokens, width]."""
    count = rows.numel()
    return Moments(rows.sum(-1).sum(dtype=torch.float64) / count, dot(rows, rows) / count)


@dataclass(slots=True)
class AdditionStatistics:
    """What one residual addition ``total = stream + update`` does; columns of ``sublayers.parquet``."""

    stream: Moments
    update: Moments
    total: Moments
    total_absmax: Tensor
    cosine: Tensor
    add_error: Tensor
    swallowed: Tensor
    nonfinite: Tensor
    token_correlation: Tensor | None


def addition_statistics(stream: Tensor, update: Tensor, total: Tensor, stream_moments: Moments | None) -> AdditionStatistics:
    """Measure one residual addition.

    Parameters
    ----------
    stream, update, total
        The operands and the result, of one shape [..., width], as they are in memory.
    stream_moments
        Of ``stream``, where they are known already.
    """
    x, u, s = rows_fp32(stream), rows_fp32(update), rows_fp32(total)
    of_stream = stream_moments or moments(x)
    of_update = moments(u)
    count = s.numel()
    # fl(x+F) - (x+F) in fp64, where the sum of two halves or floats is exact to well below their rounding.
    error = s.double().sub_(x).sub_(u)
    swallowed = ((s == x) & (u != 0)).sum(dtype=torch.float64) / count
    return AdditionStatistics(
        stream=of_stream,
        update=of_update,
        total=moments(s),
        total_absmax=s.abs().max(),
        cosine=dot(x, u) / count / (of_stream.rms * of_update.rms),
        add_error=(error.square_().sum() / count).sqrt() / of_update.rms,
        swallowed=swallowed,
        nonfinite=count - torch.isfinite(s).sum(),
        token_correlation=token_correlation(s),
    )


def token_correlation(rows: Tensor) -> Tensor | None:
    """Return the mean cosine over all pairs of distinct tokens, None with fewer than two; zero vectors are left out.

    With unit vectors e_t, sum over t != s of e_t . e_s = |sum e_t|^2 - n, so no [tokens, tokens] matrix is needed.
    """
    if rows.shape[0] < 2:
        return None
    squares = (rows * rows).sum(-1)
    inverse = torch.where(squares > 0, squares.rsqrt(), 0.0).to(rows.dtype)
    total = (inverse @ rows).double()
    n = (squares > 0).sum(dtype=torch.float64)
    return (total.square().sum() - n) / (n * (n - 1))
