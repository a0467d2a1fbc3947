"""The parts of a sum of updates that has not joined the stream yet: ``x + (attention + mlp)`` has two updates.

The parts hang on the tensor itself and die with it. Functions that are linear in each element are applied to them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.tracing.additions import different_kinds
from propcheck.tracing.graph import Trace, signal_of

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = "_propcheck_parts"
# Functions f(x, ...) with f(a + b) = f(a) + f(b), but for rounding.
_LINEAR = {
    "view", "reshape", "view_as", "transpose", "permute", "squeeze", "unsqueeze", "flatten", "unflatten", "contiguous", "to",
    "type", "type_as", "float", "half", "bfloat16", "double", "mul", "multiply", "div", "divide", "true_divide", "__getitem__",
    "clone", "expand", "movedim", "swapaxes",
}  # fmt: skip

Part = tuple[Tensor, Trace]


def parts_of(tensor: Any) -> tuple[Part, ...]:
    """Return the parts of a sum of updates of different kinds; nothing for any other tensor."""
    found: tuple[Part, ...] = getattr(tensor, _NAME, ())
    return found


def before_sum(first: Tensor, second: Tensor, *, in_place: bool) -> tuple[Part, ...]:
    """Return the parts of the sum of two tensors that is about to be made; nothing if it is one update, or none."""
    one, other = signal_of(first), signal_of(second)
    if one is None or other is None or first.shape != second.shape:
        return ()
    if not (parts_of(first) or parts_of(second) or different_kinds(one, other)):
        return ()
    kept = first.detach().clone() if in_place else first.detach()
    return (*(parts_of(first) or ((kept, one),)), *(parts_of(second) or ((second.detach(), other),)))


def keep(tensor: Tensor, parts: tuple[Part, ...]) -> None:
    """Say what a tensor is the sum of."""
    if parts:
        setattr(tensor, _NAME, parts)
    elif hasattr(tensor, _NAME):
        delattr(tensor, _NAME)


def carry(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
    """Give a function's result the parts of its operand, if it has some and the function keeps sums."""
    if not isinstance(result, Tensor):
        return
    own = [argument for argument in args if parts_of(argument)]
    if len(own) != 1:
        return
    (operand,) = own
    found: list[Part] = []
    for value, trace in parts_of(operand):
        if name == "dropout":  # the same mask
            moved = torch.where(operand == 0, value, value * (result / operand)) if result is not operand else value
        elif name in _LINEAR and not any(signal_of(other) for other in args if other is not operand):
            with torch.no_grad():
                moved = func(*(value if argument is operand else argument for argument in args), **kwargs)
        else:
            return
        found.append((moved.detach(), trace))
    keep(result, tuple(found))
