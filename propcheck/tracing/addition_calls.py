"""Recognise calls that add two tensors, whatever function they are written with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.tracing.events import FunctionCall
from propcheck.tracing.graph import signal_of
from propcheck.tracing.op_names import ADDITIONS, DIFFERENCES
from propcheck.tracing.propagation import propagate
from propcheck.tracing.tensors import bound

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.tracing.events import GradientOf, Operand
    from propcheck.tracing.graph_builder import GraphBuilder


@dataclass(frozen=True, slots=True)
class Sum:
    """The operands of an addition and the factor of the second one: torch.add's alpha, -1 in a difference."""

    first: Tensor
    second: Tensor
    alpha: float = 1.0
    in_place: bool = False  # the first operand is overwritten
    fused: bool = False  # the second operand exists only inside the function; it was computed here to be measured

    def stream_and_update(self, *, stream_is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the stream and the update."""
        return (self.first, self.second) if stream_is_first else (self.second, self.first)

    def scaled(self, *, stream_is_first: bool) -> Operand | None:
        """Return which of the two is multiplied by alpha."""
        return None if self.alpha == 1 else "update" if stream_is_first else "stream"

    def gradients_at_sum(self, *, stream_is_first: bool) -> tuple[GradientOf, ...]:
        """Return the gradients that are taken at the sum: its own, and those of operands that cannot have a hook.

        Such operands are alpha times a tensor and the operand of a fused sum, which are nowhere in memory; and an update that
        is a view and is overwritten by the sum, where autograd leaves no place for a hook.
        """
        scaled = self.scaled(stream_is_first=stream_is_first)
        names: list[GradientOf] = ["sum"] if scaled is None else ["sum", scaled]
        _, update = self.stream_and_update(stream_is_first=stream_is_first)
        overwritten = self.in_place and self.first is update and update._is_view()  # noqa: SLF001
        if (self.fused or overwritten) and "update" not in names:
            names.append("update")
        return tuple(names)


def sum_of(call: FunctionCall) -> Sum | None:
    """Return an addition of two floating-point tensors, one of which has the shape of the sum; None for any other call."""
    subtracts = call.name in DIFFERENCES - {"rsub", "__rsub__"}
    if call.name not in ADDITIONS and not subtracts:
        return None
    first, second = bound(("input", "other"), call.args, call.kwargs)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or not _has_shape_of_sum(first, second):
        return None
    if not (first.is_floating_point() and second.is_floating_point()):
        return None
    alpha = call.kwargs.get("alpha", 1)
    in_place = call.name in ("add_", "__iadd__", "sub_", "__isub__", "subtract_")
    return Sum(first, second, -alpha if subtracts else alpha, in_place)


def fused_sum(call: FunctionCall, graph: GraphBuilder | None) -> Sum | None:
    """Return an addition inside another function: x + value a b, x + value a / b, x + w (u - x), x + A B; else None.

    Parameters
    ----------
    call
        Any call.
    graph
        Where the computation of the second operand is traced; None if it is not needed and the first one may stand for it.
    """
    if call.name not in _FUSED:
        return None
    keys, steps_of = _FUSED[call.name]
    x, a, b = bound(("input", *keys), call.args, call.kwargs)
    if not isinstance(x, Tensor) or not isinstance(a, Tensor) or not x.is_floating_point():
        return None
    scaled = any(call.kwargs.get(key, 1) != 1 for key in ("alpha", "beta"))
    if graph is None or signal_of(x) is None or scaled:  # x may be a bias; x + x is no residual addition
        return Sum(x, x, fused=True)
    with torch.no_grad():
        steps = steps_of(x, a, b)
        if (factor := call.kwargs.get("value", 1)) != 1:
            last = steps[-1][2]
            steps.append(("mul", (last, factor), last * factor))
    result = steps[0][2]
    for function, operands, value in steps:
        propagate(graph, FunctionCall(None, function, operands), value)
        result = value
    return Sum(x, result if result.shape == x.shape else x, fused=True)


_Steps = list[tuple[str, tuple[Any, ...], Tensor]]


def _addcmul(_x: Tensor, a: Tensor, b: Any) -> _Steps:
    return [("mul", (a, b), a * b)]


def _addcdiv(_x: Tensor, a: Tensor, b: Any) -> _Steps:
    return [("div", (a, b), a / b)]


def _lerp(x: Tensor, end: Tensor, weight: Any) -> _Steps:
    difference = end - x
    return [("sub", (end, x), difference), ("mul", (difference, weight), difference * weight)]


def _addmm(_x: Tensor, a: Tensor, b: Any) -> _Steps:
    return [("matmul", (a, b), a @ b)]


# The names of their operands beside ``input``, and the steps that compute the second operand of the sum.
_FUSED: dict[str, tuple[tuple[str, str], Callable[[Tensor, Tensor, Any], _Steps]]] = {
    "addcmul": (("tensor1", "tensor2"), _addcmul),
    "addcmul_": (("tensor1", "tensor2"), _addcmul),
    "addcdiv": (("tensor1", "tensor2"), _addcdiv),
    "addcdiv_": (("tensor1", "tensor2"), _addcdiv),
    "lerp": (("end", "weight"), _lerp),
    "lerp_": (("end", "weight"), _lerp),
    "addmm": (("mat1", "mat2"), _addmm),
    "baddbmm": (("batch1", "batch2"), _addmm),
}


def _has_shape_of_sum(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have one shape, or the smaller one is repeated along leading dimensions of the other."""
    if first.shape == second.shape:
        return True
    small, large = sorted((first.shape, second.shape), key=lambda shape: (shape.numel(), len(shape)))
    same = [a == b for a, b in zip(reversed(small), reversed(large), strict=False)]
    repeats = all(equal or size == 1 for equal, size in zip(same, reversed(small), strict=True))
    return len(small) > 1 and same[0] and repeats
