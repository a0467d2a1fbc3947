"""One addition as it was called, whatever function it was written with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from propcheck.tracing.graph import signal_of
from propcheck.tracing.op_names import ADDITIONS, DIFFERENCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.tracing.propagation import Propagation

Operand = Literal["stream", "update"]


@dataclass(frozen=True, slots=True)
class Sum:
    """An addition's operands, and the factor of the second one: torch.add's alpha, -1 in a difference."""

    first: Tensor
    second: Tensor
    alpha: float = 1.0
    in_place: bool = False  # the first operand is overwritten
    fused: bool = False  # the second operand is in no tensor of the model's: it was computed here, for measuring it

    def stream_and_update(self, *, stream_is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the operands by what they are."""
        return (self.first, self.second) if stream_is_first else (self.second, self.first)

    def scaled(self, *, stream_is_first: bool) -> Operand | None:
        """Return which of the two is multiplied by alpha."""
        return None if self.alpha == 1 else "update" if stream_is_first else "stream"

    def without_gradient(self, *, stream_is_first: bool) -> list[Operand]:
        """Return the operands whose gradient is taken at the sum.

        Those are alpha times an operand, and an operand of a fused sum, which are nowhere in memory; and an update that is a
        view and is overwritten by the sum, where autograd leaves no place for a hook.
        """
        scaled = self.scaled(stream_is_first=stream_is_first)
        found: list[Operand] = [] if scaled is None else [scaled]
        _, update = self.stream_and_update(stream_is_first=stream_is_first)
        overwritten = self.in_place and self.first is update and update._is_view()  # noqa: SLF001
        if (self.fused or overwritten) and "update" not in found:
            found.append("update")
        return found


def sum_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sum | None:
    """Return an addition of two floating-point tensors, one of which has the shape of the sum; None for any other call."""
    taken = name in DIFFERENCES - {"rsub", "__rsub__"}
    if name not in ADDITIONS and not taken:
        return None
    first, second = bound(("input", "other"), args, kwargs)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not _is_wide(first, second):
        return None
    if not (first.is_floating_point() and second.is_floating_point()):
        return None
    alpha = kwargs.get("alpha", 1)
    in_place = name in ("add_", "__iadd__", "sub_", "__isub__", "subtract_")
    return Sum(first, second, -alpha if taken else alpha, in_place)


def fused_sum(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], propagation: Propagation | None) -> Sum | None:
    """Return an addition that is part of a function: x + value a b, x + value a / b, x + w (u - x), x + A B; else None.

    Parameters
    ----------
    name, args, kwargs
        The call.
    propagation
        Follows the computation of the second operand; None if that is not needed, and the first one stands for it.
    """
    parts = _PARTS.get(name)
    x, a, b = bound(("input", *_NAMES[name]), args, kwargs) if parts is not None else (None, None, None)
    if parts is None or not isinstance(x, Tensor) or not isinstance(a, Tensor) or not x.is_floating_point():
        return None
    scaled = any(kwargs.get(key, 1) != 1 for key in ("alpha", "beta"))
    if propagation is None or signal_of(x) is None or scaled:  # a bias, say: x + x is no residual addition
        return Sum(x, x, fused=True)
    with torch.no_grad():
        values = parts(x, a, b)
        if (factor := kwargs.get("value", 1)) != 1:
            last = values[-1][2]
            values.append(("mul", (last, factor), last * factor))
    result = values[0][2]
    for function, operands, value in values:
        propagation.follow(function, operands, {}, value)
        result = value
    return Sum(x, result if result.shape == x.shape else x, fused=True)


Steps = list[tuple[str, tuple[Any, ...], Tensor]]


def _addcmul(_x: Tensor, a: Tensor, b: Any) -> Steps:
    return [("mul", (a, b), a * b)]


def _addcdiv(_x: Tensor, a: Tensor, b: Any) -> Steps:
    return [("div", (a, b), a / b)]


def _lerp(x: Tensor, end: Tensor, weight: Any) -> Steps:
    difference = end - x
    return [("sub", (end, x), difference), ("mul", (difference, weight), difference * weight)]


def _addmm(_x: Tensor, a: Tensor, b: Any) -> Steps:
    return [("matmul", (a, b), a @ b)]


_PARTS: dict[str, Callable[[Tensor, Tensor, Any], Steps]] = {
    "addcmul": _addcmul, "addcmul_": _addcmul, "addcdiv": _addcdiv, "addcdiv_": _addcdiv,
    "lerp": _lerp, "lerp_": _lerp, "addmm": _addmm, "baddbmm": _addmm,
}  # fmt: skip
_NAMES = {
    "addcmul": ("tensor1", "tensor2"),
    "addcmul_": ("tensor1", "tensor2"),
    "addcdiv": ("tensor1", "tensor2"),
    "addcdiv_": ("tensor1", "tensor2"),
    "lerp": ("end", "weight"),
    "lerp_": ("end", "weight"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}


def _is_wide(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one shape, or the smaller one is repeated along leading dimensions of the other."""
    if first.shape == second.shape:
        return True
    small, large = sorted((first.shape, second.shape), key=lambda shape: (shape.numel(), len(shape)))
    same = [a == b for a, b in zip(reversed(small), reversed(large), strict=False)]
    return len(small) > 1 and same[0] and all(one or size == 1 for one, size in zip(same, reversed(small), strict=True))


def kept(operand: Tensor, factor: float, *, copied: bool) -> Tensor:
    """Return what is added, for measuring it after the addition, which may overwrite it."""
    if factor != 1:
        return operand.detach().double() * factor
    return operand.detach().clone() if copied else operand.detach()


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; those of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def channels_last(tensor: Tensor, channels: int | None) -> Tensor:
    """Return a tensor with the dimension of its channels last."""
    return tensor if channels is None else tensor.movedim(channels, -1)


def bound(keys: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of ``keys``, None for those not given."""
    return tuple(args[index] if index < len(args) else kwargs.get(key) for index, key in enumerate(keys))
