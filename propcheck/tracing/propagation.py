"""Propagate traces through torch's functions: the trace of a result from those of the operands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from propcheck.tracing import op_names
from propcheck.tracing.events import AttentionCall
from propcheck.tracing.graph import Trace, is_drawn, mark, mark_drawn, signal_of, trace_of
from propcheck.tracing.graph_builder import Operation, operands_of
from propcheck.tracing.op_rules import product_kinds, step_of
from propcheck.tracing.tensors import bound, is_transformed, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.tracing.events import FunctionCall
    from propcheck.tracing.graph_builder import GraphBuilder

_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def propagate(graph: GraphBuilder, call: FunctionCall, result: Any) -> None:
    """Mark what a function returned, or wrote into its first argument."""
    if call.name == "__setitem__":
        result = call.args[0]
    if not isinstance(result, Tensor | tuple | list) or isinstance(result, torch.Size):
        return
    operands = tensors_in(call.args[:1]) if call.name in op_names.AS else operands_of(call)
    drawn = call.name in op_names.DRAWS or any(map(is_drawn, operands))
    if drawn and not any(map(trace_of, operands)):
        for value in tensors_in((result,)):
            mark_drawn(value)
    _begin_query(graph, call)
    signals = [operand for operand in operands if id(operand) not in graph.names and signal_of(operand) is not None]
    operation = graph.operation(call, result, operands)
    trace = _trace(graph, operation, operands)
    if trace is None:
        return
    if _is_attention(operation, trace) and not any(map(is_transformed, operands)):
        trace = replace(trace, is_attention=True)
        _send_attention(graph, operation, trace.order)
    if any(map(is_drawn, operands)):
        trace = replace(trace, features=trace.features | {"drawn"})
    for value in tensors_in((result,)):
        channels = _channels_of(call.name, signals, value)
        mark(value, trace if channels == trace.channels else replace(trace, channels=channels))


def look_up(graph: GraphBuilder, call: FunctionCall, result: Tensor) -> None:
    """Mark the result of an embedding."""
    _, weight = bound(("input", "weight"), call.args, call.kwargs)
    name = graph.names.get(id(weight))
    if name is not None:
        graph.roles.setdefault(name, "embedding")
    mark(result, graph.begin("root", parameters=frozenset({name} if name else ())))


def propagate_unknown(
    graph: GraphBuilder, call: FunctionCall, result: Tensor, parameters: Sequence[nn.Parameter]
) -> Trace | None:
    """Mark what a module computed in a way that cannot be followed (its own kernel) as a product of all its operands.

    ``call`` is the call of the module.
    """
    signals = tuple((tensor, trace) for tensor in operands_of(call) if (trace := signal_of(tensor)) is not None)
    if not signals:
        return None
    names = frozenset(name for parameter in parameters if (name := graph.names.get(id(parameter))) is not None)
    parents = tuple(trace for _, trace in signals)
    mark(result, graph.product(Operation(call, result, signals[:1], weights=((result, names),), parents=parents)))
    return trace_of(result)


def _begin_query(graph: GraphBuilder, call: FunctionCall) -> None:
    """Begin a stream at a learned query: a tensor [batch, tokens, width] computed from parameters alone enters a layer."""
    query = call.args[0] if call.args else None
    if not isinstance(query, Tensor) or query.dim() <= 2 or not (call.name == "linear" or call.name in op_names.NORMS):
        return
    trace = trace_of(query)
    if trace is not None and trace.kind == "weight" and id(query) not in graph.names:
        mark(query, graph.begin("root", parameters=trace.parameters))


def _trace(graph: GraphBuilder, operation: Operation, operands: Sequence[Tensor]) -> Trace | None:
    if operation.signals:
        _note_roles(graph, operation)
        return step_of(graph, operation)
    if operation.factors:
        return _factor(graph, operation)
    # Operands computed from nothing that is followed: zeros to start from, noise, positions.
    untraced = [operand for operand in operands if trace_of(operand) is None and id(operand) not in graph.names]
    multiplies = operation.name in op_names.PRODUCTS
    if untraced and multiplies and any(isinstance(weight, nn.Parameter) for weight, _ in operation.weights):
        begun = graph.begin("root")
        for operand in untraced:
            mark(operand, begun)
        operation = replace(operation, signals=((untraced[0], begun),), parents=(begun,))
        return graph.product(operation, *product_kinds(operation.name))
    return Trace("weight", 0, parameters=operation.parameters) if operation.parameters else None


def _factor(graph: GraphBuilder, operation: Operation) -> Trace:
    """Return the step of a factor: eps added, a root taken, a gain multiplied in."""
    first, name, args = operation.factors[0], operation.name, operation.call.args
    is_root = name in op_names.ROOTS or (name == "pow" and isinstance(args[-1], float) and args[-1] in (-0.5, 0.5))
    is_added = name in op_names.ADDITIONS
    added = next((value for value in args if isinstance(value, int | float)), None) if is_added else None
    divisor = args[-1] if name in op_names.DIVISIONS else None  # no gain
    scaled = operation.weights if name in op_names.SCALINGS else ()
    gains = [tensor for tensor, _ in scaled if tensor is not divisor and not _is_factor(tensor)]
    return graph.factor(
        operation,
        rooted=first.rooted or is_root,
        reduced=first.reduced,
        of=first.of,
        eps=first.eps if added is None or first.rooted else float(added),
        gain=gains[0] if gains else first.gain,
    )


def _is_factor(tensor: Tensor) -> bool:
    trace = trace_of(tensor)
    return trace is not None and trace.kind == "factor"


def _note_roles(graph: GraphBuilder, operation: Operation) -> None:
    """Note what each parameter is for, at the first function in which it, or a tensor computed from it, meets a signal."""
    for tensor, names in operation.weights:
        for name in names:
            if name not in graph.roles:
                graph.roles[name] = _role(operation, tensor)


def _role(operation: Operation, tensor: Tensor) -> str:
    name = operation.name
    if name in op_names.ADDITIONS or operation.call.kwargs.get("bias") is tensor:
        return "bias"
    scales = name in op_names.SCALINGS
    if name in op_names.NORMS or (scales and (operation.ungained or any(factor.rooted for factor in operation.factors))):
        return "norm"
    if name in op_names.PRODUCTS:
        is_bias = tensor.dim() == 1 and name not in op_names.UNBIASED
        return "bias" if is_bias else "convolution" if name in op_names.CONVOLUTIONS else "linear"
    return "scale" if scales else "other"


def _is_attention(operation: Operation, trace: Trace) -> bool:
    """Whether a step is a fused attention, or a softmax over the last dimension of products of activations."""
    if trace.kind != "signal" or operation.name not in op_names.ATTENTIONS | op_names.SOFTMAXES:
        return False
    if operation.name == "scaled_dot_product_attention":
        return True
    if operation.name not in ("softmax", "_softmax"):
        return False
    logits, dim = bound(("input", "dim"), operation.call.args, operation.call.kwargs)
    signal = signal_of(logits)
    return signal is not None and signal.node is not None and signal.node.mixed and dim in (-1, logits.dim() - 1)


def _send_attention(graph: GraphBuilder, operation: Operation, step: int) -> None:
    if operation.name == "scaled_dot_product_attention":
        arguments = {**dict(zip(_ATTENTION_ARGUMENTS, operation.call.args, strict=False)), **operation.call.kwargs}
        call = AttentionCall(
            step,
            query=arguments["query"],
            key=arguments["key"],
            mask=arguments.get("attn_mask"),
            is_causal=arguments.get("is_causal", False),
            scale=arguments.get("scale"),
            enable_gqa=arguments.get("enable_gqa", False),
        )
        for listener in graph.listeners:
            listener.fused_attention(call)
        return
    (logits,) = bound(("input",), operation.call.args, operation.call.kwargs)
    for listener in graph.listeners:
        listener.softmax_attention(step, logits, operation.result)


def _channels_of(name: str, operands: Sequence[Tensor], result: Tensor) -> int | None:
    """Return which dimension of the result of function ``name`` holds the channels, None for the last."""
    if name in op_names.CONVOLUTIONS | op_names.POOLS:
        return max(0, result.dim() - (int(name.rstrip("d")[-1]) + 1))  # before one, two or three of space
    signals = [(tensor, trace.channels) for tensor in operands if (trace := signal_of(tensor)) is not None and tensor.dim()]
    if name in op_names.PRODUCTS or not signals:
        return None
    operand, before = max(signals, key=lambda signal: signal[0].numel())
    if before is None and name not in op_names.VIEWS:
        return None
    channels = operand.dim() - 1 if before is None or before >= operand.dim() else before
    if result.shape == operand.shape and name not in op_names.VIEWS:
        return channels
    after = _moved(operand, channels, result, is_view=name in op_names.VIEWS)
    return None if after is None or after == result.dim() - 1 else after


def _moved(operand: Tensor, channels: int, result: Tensor, *, is_view: bool) -> int | None:
    """Return where a dimension of ``operand`` is in ``result``, None if it is gone."""
    size = operand.shape[channels]
    candidates = [dim for dim in range(result.dim()) if result.shape[dim] == size]
    if is_view and size > 1:  # a dimension keeps its stride wherever it is moved to
        same_stride = [dim for dim in candidates if result.stride(dim) == operand.stride(channels)]
        candidates = same_stride or candidates
    return channels if channels in candidates else next(reversed(candidates), None)
