"""The parts of a sum of updates that has not joined the stream yet: ``x + (attention + mlp)`` has two updates.

The parts are attributes of the tensor itself. Functions that are linear in each element are applied to the parts too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.tracing.additions import different_kinds
from propcheck.tracing.graph import Trace, signal_of

if TYPE_CHECKING:
    from propcheck.tracing.addition_calls import Sum
    from propcheck.tracing.events import FunctionCall

_PARTS = "_propcheck_parts"
# Functions f(x, ...) with f(a + b) = f(a) + f(b), but for rounding.
_LINEAR = {
    "view", "reshape", "view_as", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "contiguous", "to",
    "type", "type_as", "float", "half", "bfloat16", "double", "mul", "multiply", "div", "divide", "true_divide", "__getitem__",
    "clone", "expand", "movedim", "swapaxes",
}  # fmt: skip

Part = tuple[Tensor, Trace]


def parts_of(tensor: Any) -> tuple[Part, ...]:
    """Return the parts of a sum of updates of different kinds; nothing for any other tensor."""
    parts: tuple[Part, ...] = getattr(tensor, _PARTS, ())
    return parts


def set_parts(tensor: Tensor, parts: tuple[Part, ...]) -> None:
    """Set or delete the parts of a tensor."""
    if parts:
        setattr(tensor, _PARTS, parts)
    elif hasattr(tensor, _PARTS):
        delattr(tensor, _PARTS)


def parts_of_sum(addition: Sum) -> tuple[Part, ...]:
    """Return the parts that a sum will have; nothing if it is one update, or none."""
    first, second = addition.first, addition.second
    if addition.alpha != 1:
        return ()
    first_trace, second_trace = signal_of(first), signal_of(second)
    if first_trace is None or second_trace is None or first.shape != second.shape:
        return ()
    if not (parts_of(first) or parts_of(second) or different_kinds(first_trace, second_trace)):
        return ()
    value = first.detach().clone() if addition.in_place else first.detach()
    return (*(parts_of(first) or ((value, first_trace),)), *(parts_of(second) or ((second.detach(), second_trace),)))


def carry_parts(call: FunctionCall, result: Any) -> None:
    """Give a function's result the parts of its operand, if the function keeps sums."""
    if not isinstance(result, Tensor):
        return
    operands = [argument for argument in call.args if parts_of(argument)]
    if len(operands) != 1:
        return
    (operand,) = operands
    is_linear = call.name in _LINEAR and not any(signal_of(other) for other in call.args if other is not operand)
    if not is_linear and call.name != "dropout":
        return
    parts: list[Part] = []
    for value, trace in parts_of(operand):
        if is_linear:
            with torch.no_grad():
                args = (value if argument is operand else argument for argument in call.args)
                moved = call.function(*args, **call.kwargs)
        elif result is operand:
            moved = value
        else:  # the same mask
            moved = torch.where(operand == 0, value, value * (result / operand))
        parts.append((moved.detach(), trace))
    set_parts(result, tuple(parts))
