"""The function modes of a pass: they see each call of a torch function and send what every call has as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from propcheck.tracing.addition_calls import fused_sum, sum_of
from propcheck.tracing.events import AdditionOperands, FunctionCall
from propcheck.tracing.graph import stands_for
from propcheck.tracing.graph_builder import operands_of
from propcheck.tracing.op_names import CASTS

if TYPE_CHECKING:
    from propcheck.tracing.addition_calls import Sum
    from propcheck.tracing.events import Listeners
    from propcheck.tracing.graph import Addition
    from propcheck.tracing.module_hooks import ModuleHooks

Runner = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs a function in its own way; it is given the function and its arguments."""


class FunctionMode(TorchFunctionMode):
    """Sends the events that every call has, and counts the additions.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    listeners
        Receive the events.
    runners
        By function name: what runs that function instead, so that it can measure the gradient of its weight.
    hooks
        Know which module runs.

    Attributes
    ----------
    block
        Number of the block that runs; None: that of the innermost module.
    additions_met
        How many additions of two tensors of one shape there were, residual or not.
    """

    def __init__(
        self, names: Mapping[int, str], listeners: Listeners, runners: Mapping[str, Runner], hooks: ModuleHooks
    ) -> None:
        super().__init__()
        self.names, self.listeners, self.runners, self.hooks = names, listeners, runners, hooks
        self.block: int | None = None
        self.additions_met = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        block = self.hooks.block if self.block is None else self.block
        call = FunctionCall(func, getattr(func, "__name__", ""), args, kwargs or {}, self.hooks.module, block)
        for listener in self.listeners:
            listener.function_called(call)
        self._send_parameters(call)
        addition = self._addition(call)
        if addition is None:
            result = self._compute(call)
        else:
            self.additions_met += 1
            result = self._add(call, addition, self.additions_met - 1)
        for listener in self.listeners:
            listener.function_returned(call, result)
        return result

    def _send_parameters(self, call: FunctionCall) -> None:
        if call.name in ("__get__", "__set__"):  # an attribute, not the value
            return
        for operand in operands_of(call):
            parameter = self.names.get(id(operand))
            if parameter is not None:
                for listener in self.listeners:
                    listener.parameter_used(parameter, call.name)

    def _addition(self, call: FunctionCall) -> Sum | None:
        return sum_of(call) or fused_sum(call, None)

    def _add(self, call: FunctionCall, addition: Sum, number: int) -> Tensor:
        """Run the addition with this number."""
        raise NotImplementedError

    def _send_operands(self, traced: Addition, addition: Sum, *, stream_is_first: bool) -> AdditionOperands:
        stream, update = addition.stream_and_update(stream_is_first=stream_is_first)
        at_sum = addition.gradients_at_sum(stream_is_first=stream_is_first)
        operands = AdditionOperands(traced, stream, update, addition.in_place, at_sum)
        for listener in self.listeners:
            listener.before_addition(operands)
        return operands

    def _send_total(self, operands: AdditionOperands, total: Tensor) -> None:
        for listener in self.listeners:
            listener.after_addition(operands, total)

    def _compute(self, call: FunctionCall) -> Any:
        """Run any other function."""
        runner = self.runners.get(call.name)
        result = call.run() if runner is None else runner(call.function, call.args, call.kwargs)
        is_cast = call.name in CASTS and call.args and result is not call.args[0]
        if is_cast and isinstance(result, Tensor) and result.requires_grad:
            stands_for(result, call.args[0])  # the branch may have read the stream before it was cast
        return result


class Recomputation(FunctionMode):
    """Sends the additions of a part that is computed again for the backward pass; they are recognised by their numbers.

    Parameters
    ----------
    forward
        The mode of the forward pass.
    listeners
        Receive the events.
    additions
        The residual additions of the forward pass by number, and whether their first operand is the stream.
    first
        The number of the first addition in this part.
    block
        The number of its block.
    """

    def __init__(
        self,
        forward: FunctionMode,
        listeners: Listeners,
        additions: Mapping[int, tuple[Addition, bool]],
        *,
        first: int,
        block: int | None,
    ) -> None:
        super().__init__(forward.names, listeners, forward.runners, forward.hooks)
        self.additions_met, self.block = first, block
        self._additions = additions

    def _add(self, call: FunctionCall, addition: Sum, number: int) -> Tensor:
        traced, stream_is_first = self._additions.get(number, (None, True))
        result: Tensor
        if traced is None or traced.inner:
            result = call.run()
        else:
            operands = self._send_operands(traced, addition, stream_is_first=stream_is_first)
            result = call.run()
            self._send_total(operands, result)
        return result
