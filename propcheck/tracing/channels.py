"""Find the dimension of the channels in a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.tracing.graph import signal_of
from propcheck.tracing.op_names import CONVOLUTIONS, POOLS, PRODUCTS, VIEWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def channels_of(name: str, operands: Sequence[Tensor], result: Tensor) -> int | None:
    """Return which dimension of the result of function ``name`` holds the channels, None for the last."""
    if name in CONVOLUTIONS | POOLS:
        return max(0, result.dim() - (int(name.rstrip("d")[-1]) + 1))  # before one, two or three of space
    signals = [(tensor, trace.channels) for tensor in operands if (trace := signal_of(tensor)) is not None and tensor.dim()]
    if name in PRODUCTS or not signals:
        return None
    operand, before = max(signals, key=lambda signal: signal[0].numel())
    if before is None and name not in VIEWS:
        return None
    channels = operand.dim() - 1 if before is None or before >= operand.dim() else before
    if result.shape == operand.shape and name not in VIEWS:
        return channels
    after = _moved(operand, channels, result, is_view=name in VIEWS)
    return None if after is None or after == result.dim() - 1 else after


def _moved(operand: Tensor, channels: int, result: Tensor, *, is_view: bool) -> int | None:
    """Return where a dimension of ``operand`` is in ``result``, None if it is gone."""
    size = operand.shape[channels]
    candidates = [dim for dim in range(result.dim()) if result.shape[dim] == size]
    if is_view and size > 1:  # a dimension keeps its stride wherever it is moved to
        same_stride = [dim for dim in candidates if result.stride(dim) == operand.stride(channels)]
        candidates = same_stride or candidates
    return channels if channels in candidates else next(reversed(candidates), None)
