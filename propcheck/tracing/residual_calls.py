"""Find the residual addition in a call that adds two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.tracing.additions import Residual, counted_twice, find_residual
from propcheck.tracing.branches import path
from propcheck.tracing.graph import Double, mark, signal_of, touch, trace_of
from propcheck.tracing.tensors import is_transformed
from propcheck.tracing.update_parts import parts_of

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.tracing.addition_calls import Sum
    from propcheck.tracing.events import FunctionCall
    from propcheck.tracing.graph import Trace
    from propcheck.tracing.graph_builder import GraphBuilder


def residual_call(graph: GraphBuilder, call: FunctionCall, addition: Sum) -> Residual | None:
    """Return how an addition is residual, None if it is not; note one that counts the stream twice."""
    first, second = signal_of(addition.first), signal_of(addition.second)
    if is_transformed(addition.first) or is_transformed(addition.second):
        if first is not None or second is not None:
            for listener in graph.listeners:
                listener.not_followed(call.module or "", "runs inside a torch.func transform")
        return None
    if first is None or second is None:
        trace = first or second
        return None if trace is None else _learned_stream(graph, addition, trace)
    touch((first, second))
    parts = {
        trace: [part for _, part in parts_of(tensor)]
        for tensor, trace in ((addition.first, first), (addition.second, second))
        if parts_of(tensor)
    }
    residual = find_residual(first, second, parts, call.block)
    if residual is None:
        if addition.alpha == 1 and not addition.fused and counted_twice(first, second):
            graph.doubles.append(Double(first, graph.steps, call.block, call.module))
        return None
    if addition.alpha < 0 and not residual.stream_is_first:  # the stream is subtracted
        return None
    stream, update = addition.stream_and_update(stream_is_first=residual.stream_is_first)
    return residual if stream.dim() >= update.dim() and stream.numel() >= update.numel() else None


def _learned_stream(graph: GraphBuilder, addition: Sum, update: Trace) -> Residual | None:
    """Return the first addition to learned queries: to a tensor computed from parameters alone, which the update read."""
    is_first = signal_of(addition.first) is None
    stream = addition.first if is_first else addition.second
    trace = trace_of(stream)
    if trace is None or trace.kind != "weight" or stream.dim() < 3 or addition.first.shape != addition.second.shape:
        return None
    steps = path(update, None).steps
    if not update.product or not trace.parameters & frozenset().union(*(step.parameters for step in steps)):
        return None
    begun = graph.begin("root", parameters=trace.parameters)
    mark(stream, begun)
    return Residual(is_first, begun, (update,), (begun, update) if is_first else (update, begun), None)


def added_values(addition: Sum, residual: Residual) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the stream and the updates as they are added, copied if the addition overwrites them."""
    stream, update = addition.stream_and_update(stream_is_first=residual.stream_is_first)
    scaled = addition.scaled(stream_is_first=residual.stream_is_first)

    def value(operand: Tensor, name: str) -> Tensor:
        if name == scaled:
            return operand.detach().double() * addition.alpha
        return operand.detach().clone() if addition.in_place else operand.detach()

    # An update whose parts are of one kind is one update.
    pieces = [part for part, _ in parts_of(update)] if len(residual.updates) > 1 else [update]
    return value(stream, "stream"), tuple(value(piece, "update").expand_as(stream) for piece in pieces)
