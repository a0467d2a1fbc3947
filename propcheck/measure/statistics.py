"""Statistics of tensors, reduced in fp64 a block at a time.

torch's CPU norm of a large fp32 tensor accumulates in fp32 and is about 1 % off at 10^8 elements. The squares of finite fp32
values overflow above 1.8e19 and vanish below 1e-23, where exploding and vanishing signals are. In blocks that fit a cache, fp64
costs no more than fp32 over the whole tensor. Rows are tokens: a tensor is read as [tokens, width]. Results are 0-d fp64
tensors and stay on the device; nothing here waits for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from propcheck.records import NormKind

# Elements per block: on a CPU its fp64 copies stay in the cache, elsewhere few kernels are launched.
_BLOCK_ON_CPU, _BLOCK = 1 << 17, 1 << 24


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of each tensor as fp64 [rows, width]; all tensors have one shape [..., width]."""
    first = tensors[0]
    width = max(1, first.shape[-1]) if first.dim() else 1
    rows = max(1, (_BLOCK_ON_CPU if first.device.type == "cpu" else _BLOCK) // width)
    for parts in zip(*(tensor.detach().reshape(-1, width).split(rows) for tensor in tensors), strict=True):
        yield tuple(part.double() for part in parts)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a contiguous floating-point tensor as integers of its size, in the same memory."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _dot(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(left.reshape(-1), right.reshape(-1))


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner product of two tensors of one shape."""
    return torch.stack([_dot(a, b) for a, b in blocks(left, right)]).sum()


def frobenius(tensor: Tensor) -> Tensor:
    """Return the Frobenius norm of a tensor of any shape and dtype."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj())
    flat = tensor.reshape(-1, 1)  # rows of one element: blocks of any length
    return inner(flat, flat).sqrt()


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and mean square over all elements of a tensor."""

    mean: Tensor
    mean_square: Tensor


def moments(tensor: Tensor) -> Moments:
    """Return the moments of a tensor [..., width]."""
    total, square = torch.stack([torch.stack([block.sum(), _dot(block, block)]) for (block,) in blocks(tensor)]).sum(0)
    return Moments(total / tensor.numel(), square / tensor.numel())


@dataclass(frozen=True, slots=True)
class NormStatistics:
    """Input and output of a normalisation over all its vectors; None where unknown."""

    input_mean_square: Tensor
    input_absmax: Tensor
    output_mean_square: Tensor | None
    epsilon_share: Tensor | None  # of the vectors: those whose statistic is below 10 eps
    zero_share: Tensor | None  # of the vectors that are not zero: those whose output is


def norm_statistics(source: Tensor, result: Tensor | None, *, kind: NormKind, eps: float | None) -> NormStatistics:
    """Measure one normalisation.

    Parameters
    ----------
    source, result
        Vectors [..., width] before and after; ``result`` is None if they do not lie along the last dimension.
    kind
        The statistic of a vector: mean square, variance, or the sum of squares (``length``).
    eps
        The number added to it, if known.
    """
    if not source.numel():
        nothing = torch.full((), math.nan, dtype=torch.float64, device=source.device)
        return NormStatistics(nothing, nothing, None, None, None)
    sums: list[Tensor] = []
    extremes: list[Tensor] = []
    for parts in blocks(source) if result is None else blocks(source, result):
        x = parts[0]
        squares = torch.linalg.vecdot(x, x)  # [rows]
        low, high = torch.aminmax(x)
        extremes.append(torch.maximum(-low, high))
        numbers = [squares.sum()]
        if result is not None:
            statistic = squares if kind == "length" else squares / x.shape[-1]
            if kind == "variance":
                statistic = statistic - x.mean(-1).square()
            output_squares = torch.linalg.vecdot(parts[1], parts[1])
            numbers += [
                output_squares.sum(),
                (statistic < 10 * (eps or 0.0)).sum(),
                (squares > 0).sum(),
                ((squares > 0) & (output_squares == 0)).sum(),
            ]
        sums.append(torch.stack([number.double() for number in numbers]))
    total = torch.stack(sums).sum(0)
    rows = source.numel() / max(1, source.shape[-1] if source.dim() else 1)
    absmax = torch.stack(extremes).amax()
    if result is None:
        return NormStatistics(total[0] / source.numel(), absmax, None, None, None)
    return NormStatistics(
        input_mean_square=total[0] / source.numel(),
        input_absmax=absmax,
        output_mean_square=total[1] / source.numel(),
        epsilon_share=None if eps is None else total[2] / rows,
        zero_share=total[4] / total[3],
    )


@dataclass(frozen=True, slots=True)
class AdditionStatistics:
    """Of one residual addition ``total = stream + update``; columns of ``sublayers.parquet``.

    A quotient 0 / 0 (the cosine with a zero update, for example) is NaN here.
    """

    stream: Moments
    update: Moments
    total: Moments
    total_absmax: Tensor
    cosine: Tensor
    add_error: Tensor
    swallowed: Tensor
    nonfinite: Tensor
    token_correlation: Tensor


def addition_statistics(stream: Tensor, update: Tensor, total: Tensor) -> AdditionStatistics:  # noqa: PLR0914 - one local per statistic
    """Measure one residual addition.

    Parameters
    ----------
    stream, update, total
        The operands and the result, of one shape [..., width], in their dtypes.
    """
    sums: list[Tensor] = []
    extremes: list[Tensor] = []
    directions: list[Tensor] = []  # sums of the tokens' unit vectors, [width]
    for x, u, s in blocks(stream, update, total):
        # fl(x+F) - (x+F): a sum of halves or floats is exact in fp64 to well below their rounding.
        error = (s - x).sub_(u)
        squares = torch.linalg.vecdot(s, s)  # [rows]
        directions.append(torch.where(squares == 0, 0.0, squares.rsqrt()) @ s)
        moved = u != 0
        numbers = [
            x.sum(), _dot(x, x), u.sum(), _dot(u, u), s.sum(), _dot(s, s), _dot(x, u), _dot(error, error),
            moved.sum(), (moved & (s == x)).sum(), torch.isfinite(s).sum(), (squares != 0).sum(),
        ]  # fmt: skip
        sums.append(torch.stack([number.double() for number in numbers]))
        low, high = torch.aminmax(s)
        extremes.append(torch.maximum(-low, high))
    x1, x2, u1, u2, s1, s2, xu, errors, moved_count, unmoved, finite, tokens = torch.stack(sums).sum(0)
    count = total.numel()
    direction = torch.stack(directions).sum(0)
    return AdditionStatistics(
        stream=Moments(x1 / count, x2 / count),
        update=Moments(u1 / count, u2 / count),
        total=Moments(s1 / count, s2 / count),
        total_absmax=torch.stack(extremes).amax(),
        cosine=xu / (x2.sqrt() * u2.sqrt()),
        add_error=(errors / u2).sqrt(),
        swallowed=unmoved / moved_count,
        nonfinite=count - finite,
        token_correlation=token_correlation(direction, tokens),
    )


@dataclass(frozen=True, slots=True)
class Logits:
    """Of the logits of a model: the root of the variance over the vocabulary, averaged over tokens; the largest magnitude."""

    std: float
    absmax: float


def logit_statistics(logits: Tensor) -> Logits:
    """Measure logits [..., vocabulary]."""
    variances, extremes = [], []
    for (rows,) in blocks(logits):
        variances.append(rows.var(-1, correction=0).sum())
        low, high = torch.aminmax(rows)
        extremes.append(torch.maximum(-low, high))
    count = logits.numel() / logits.shape[-1]
    return Logits(float((torch.stack(variances).sum() / count).sqrt()), float(torch.stack(extremes).amax()))


def joint_statistics(stream: Tensor, updates: Sequence[Tensor], total: Tensor) -> list[AdditionStatistics]:
    """Measure a sum of several updates, ``total = stream + update + update``; one result per update.

    They share the stream, the sum, and the effect of rounding on the sum of the updates.
    """
    joint = addition_statistics(stream, torch.stack([update.detach().double() for update in updates]).sum(0), total)
    results = []
    for update in updates:
        of_update = moments(update)
        cosine = inner(stream, update) / (joint.stream.mean_square.sqrt() * of_update.mean_square.sqrt() * total.numel())
        results.append(replace(joint, update=of_update, cosine=cosine))
    return results


def token_correlation(direction: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cosine over all pairs of distinct tokens; zero vectors are excluded.

    With unit vectors e_t, the sum over t != s of e_t . e_s is |sum e_t|^2 - n, so no [tokens, tokens] matrix is needed.

    Parameters
    ----------
    direction
        Sum of the unit vectors, [width].
    tokens
        Their number n; below 2 the result is NaN.
    """
    return (torch.dot(direction, direction) - tokens) / (tokens * (tokens - 1))
