"""What each torch function does to traced tensors: a table from its name to the handler that makes the result's step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from propcheck.tracing import op_names
from propcheck.tracing.graph import Trace, is_stream
from propcheck.tracing.graph_builder import GraphBuilder, Operation, operands_of
from propcheck.tracing.norm_calls import note_gain, recognise_norm
from propcheck.tracing.stream_mixing import mixed_streams, spread_by_einsum
from propcheck.tracing.tensors import bound, is_narrow

if TYPE_CHECKING:
    from collections.abc import Iterable

Handler = Callable[[GraphBuilder, Operation], Trace]

_NOTHING: frozenset[str] = frozenset()


def step_of(graph: GraphBuilder, operation: Operation) -> Trace:
    """Return the step that a function with at least one signal operand makes."""
    return _HANDLERS.get(operation.name, _copy)(graph, operation)


def _copy(graph: GraphBuilder, operation: Operation, features: frozenset[str] = _NOTHING, **changes: Any) -> Trace:
    """Copy a node, as elementwise functions, views, indices and dropout do; merge several."""
    if operation.spans_nodes:
        return graph.merge(operation, features)
    return graph.copy(operation, features, **changes)


# ---------------------------------------------------------------- products


def product_kinds(name: str) -> tuple[str, ...]:
    """Return what a product does beside multiplying, as features of its step."""
    if name in op_names.RECURRENCES:
        return ("scanned",)
    if name in op_names.ATTENTIONS:
        return ("softmax", "mixed")
    if name in op_names.CONVOLUTIONS | op_names.TRANSFORMS | op_names.POOLS:
        return ("convolved" if name in op_names.SEQUENTIAL else "spread",)
    return ()


def _multiply(graph: GraphBuilder, operation: Operation) -> Trace:
    if repeated := spread_by_einsum(operation.call, operation.signals):
        return _copy(graph, replace(operation, signals=repeated))
    if streams := mixed_streams(operation.call, operation.signals):
        mixed = replace(operation, signals=streams)
        return graph.merge(mixed, carries=mixed.traces)
    return graph.product(operation, *product_kinds(operation.name))


def _convolve(graph: GraphBuilder, operation: Operation) -> Trace:
    _, kernel = bound(("input", "weight"), operation.call.args, operation.call.kwargs)
    is_pointwise = isinstance(kernel, Tensor) and kernel.shape[2:].numel() == 1
    return graph.product(operation, *(() if is_pointwise else product_kinds(operation.name)))


def _scan(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest
    if is_stream(trace.node) and not trace.step_size:  # it mixes the tokens of the stream itself
        return graph.product(operation, "scanned")
    return _copy(graph, operation, _since_product(trace, "scanned"))


# ---------------------------------------------------------------- sums and collections


def _add(graph: GraphBuilder, operation: Operation) -> Trace:
    if not operation.spans_nodes:
        _, trace = operation.latest
        return graph.copy(operation, exponential=trace.exponential, promoted=_promotion(graph, operation))
    carries: Iterable[Trace] = operation.traces
    if not all(is_stream(trace.node) for trace in operation.traces):
        # Beside a tensor computed from it, a normed copy of the stream is read; the sum does not carry it on.
        carries = [trace for trace in operation.traces if trace.norm is None]
    return graph.merge(operation, carries=carries, keeps_routing=False)


def _subtract(graph: GraphBuilder, operation: Operation) -> Trace:
    if not operation.spans_nodes:
        return graph.copy(operation, promoted=_promotion(graph, operation))
    minuend = operation.call.args[1 if operation.name in ("rsub", "__rsub__") else 0]
    return graph.merge(operation, carries=[trace for tensor, trace in operation.signals if tensor is minuend])


def _collect(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest
    features = _NOTHING
    if operation.name == "__setitem__" and _writes_one_index(operation.call.args[1]):  # one token after the other
        features = _since_product(trace, "scanned")
    if not operation.spans_nodes:
        return graph.copy(operation, features)
    return graph.merge(operation, features, carries=operation.traces)


def _collect_sums(graph: GraphBuilder, operation: Operation) -> Trace:
    return _add(graph, operation) if operation.spans_nodes else graph.copy(operation)


# ---------------------------------------------------------------- scalings and norms


def _scale(graph: GraphBuilder, operation: Operation) -> Trace:
    ungained, stepped = operation.ungained, False
    if len(operation.signals) > 1:
        stepped = any(trace.step_size for trace in operation.traces)
        # A gate, or a weight per token, scales the other operand.
        wide = tuple(signal for signal in operation.signals if signal[0].dim() and signal[0].shape[-1] != 1)
        operation = replace(operation, signals=wide or operation.signals)
    operand, trace = operation.latest
    features: set[str] = {"stepped"} if stepped else set()
    if any(_sums_exponentials(factor, trace) for factor in operation.factors):
        features.add("softmax")
    if operation.spans_nodes:
        return graph.merge(operation, frozenset(features), factors=operation.traces)
    promoted = _promotion(graph, operation)
    if any(factor.rooted for factor in operation.factors):
        return _normalise(graph, operation, frozenset(features), promoted=promoted)
    numbers = any(_is_number(value) for value in operation.call.args if value is not operand)
    step = graph.copy(
        operation,
        frozenset(features),
        scalings=trace.scalings + numbers,
        ungained=ungained and not operation.parameters,
        promoted=promoted,
    )
    if ungained and operation.parameters and isinstance(operation.result, Tensor) and step.norm is not None:
        note_gain(graph, step.norm, operation.weights, operation.result)
    return step


def _norm(graph: GraphBuilder, operation: Operation) -> Trace:
    return graph.merge(operation) if operation.spans_nodes else _normalise(graph, operation)


def _normalise(graph: GraphBuilder, operation: Operation, features: frozenset[str] = _NOTHING, **changes: Any) -> Trace:
    operand, trace = operation.latest
    norm = recognise_norm(graph, operation, operand, trace.node)
    if trace.node is not None:
        trace.node.normed = trace.node.read = True
    return graph.copy(operation, features, norm=norm, ungained=not operation.parameters, **changes)


def _reduce(graph: GraphBuilder, operation: Operation) -> Trace:
    operand, trace = operation.latest
    if operation.spans_nodes or operation.factors or not _reduces_width(operation, operand):
        return _copy(graph, operation)
    node = trace.node
    is_inner_product = node is not None and node.kind == "merge" and node.order == trace.order and not node.carries
    if operation.name == "sum" and is_inner_product:
        return graph.product(replace(operation, signals=operation.signals * 2))
    result = operation.result[0] if isinstance(operation.result, tuple | list) else operation.result
    return graph.factor(operation, rooted=operation.name in op_names.ROOTS, reduced=(operation.name, result.dtype), of=node)


# ---------------------------------------------------------------- elementwise functions


def _softmax(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest
    return _copy(graph, operation, _since_product(trace, "softmax"), gate=trace.gate or operation.name in op_names.GATES)


def _route(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest
    return _copy(graph, operation, _since_product(trace, "routed"), routed=True)


def _gate(graph: GraphBuilder, operation: Operation) -> Trace:
    return _copy(graph, operation, gate=True)


def _exponentiate(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest
    decayed = frozenset({"decayed"}) if trace.step_size else _NOTHING
    return _copy(graph, operation, decayed, exponential=True, step_size=False)


def _softplus(graph: GraphBuilder, operation: Operation) -> Trace:
    if not operation.spans_nodes:
        graph.step_biases |= graph.recent_biases(operation.latest[1])
    return _copy(graph, operation, step_size=True)


def _logarithm(graph: GraphBuilder, operation: Operation) -> Trace:
    _, trace = operation.latest  # the logarithm of 1 + exp(x) is a softplus
    return _softplus(graph, operation) if trace.exponential else _copy(graph, operation)


def _cast(graph: GraphBuilder, operation: Operation) -> Trace:
    operand, trace = operation.latest
    # A cast to the same dtype returns its operand.
    promoted = trace.promoted if operation.result is operand else None
    return _copy(graph, operation, same_as=trace.value, promoted=promoted)


def _keep_elements(graph: GraphBuilder, operation: Operation) -> Trace:
    return _copy(graph, operation, same_as=operation.latest[1].value)


_HANDLERS: Mapping[str, Handler] = {
    **dict.fromkeys(op_names.SCANS, _scan),
    **dict.fromkeys(op_names.PRODUCTS, _multiply),
    **dict.fromkeys(op_names.CONVOLUTIONS, _convolve),
    **dict.fromkeys(op_names.COLLECTIONS, _collect),
    **dict.fromkeys(op_names.SUMS, _collect_sums),
    **dict.fromkeys(op_names.ADDITIONS, _add),
    **dict.fromkeys(op_names.DIFFERENCES, _subtract),
    **dict.fromkeys(op_names.SCALINGS, _scale),
    **dict.fromkeys(op_names.NORMS, _norm),
    **dict.fromkeys(op_names.REDUCTIONS, _reduce),
    **dict.fromkeys(op_names.GATES, _gate),
    **dict.fromkeys(op_names.SOFTMAXES, _softmax),
    **dict.fromkeys(op_names.ROUTERS, _route),
    **dict.fromkeys(op_names.EXPONENTIALS, _exponentiate),
    **dict.fromkeys(("softplus", "logaddexp"), _softplus),
    **dict.fromkeys(("log", "log1p"), _logarithm),
    **dict.fromkeys(op_names.COPIES, _keep_elements),
    **dict.fromkeys(op_names.CASTS, _cast),
}


def _since_product(trace: Trace, feature: str) -> frozenset[str]:
    """Return a feature that counts only after a product."""
    return frozenset({feature}) if trace.product else _NOTHING


def _promotion(graph: GraphBuilder, operation: Operation) -> str | None:
    """Describe the operand of elementwise arithmetic that gave a copy a wider dtype, now or earlier."""
    operand, trace = operation.latest
    result = operation.result
    if not isinstance(result, Tensor):
        return None
    if not is_narrow(operand.dtype) or is_narrow(result.dtype):
        return trace.promoted
    wide = next((tensor for tensor in operands_of(operation.call) if tensor.dtype == result.dtype), None)
    if wide is None:
        return trace.promoted
    dtype = str(wide.dtype).removeprefix("torch.")
    return f"{operation.name.strip('_')} with {graph.source_of(wide)} ({dtype})"


def _writes_one_index(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, int) and not isinstance(part, bool) for part in parts)


def _sums_exponentials(factor: Trace, trace: Trace) -> bool:
    """Whether exponentials of products of activations are divided by their sum: a softmax that is written out."""
    node = trace.node
    summed = factor.reduced is not None and factor.reduced[0] == "sum" and not factor.rooted
    return summed and trace.exponential and node is not None and node.mixed and factor.of is node


def _is_number(value: Any) -> bool:
    """Whether a factor is a single number other than 1, or a tensor of one element."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float) and value != 1


def _reduces_width(operation: Operation, operand: Tensor) -> bool:
    position = op_names.REDUCTIONS[operation.name]
    dims = operation.call.kwargs.get("dim", operation.call.args[position] if len(operation.call.args) > position else None)
    if dims is None or isinstance(dims, bool):
        return True
    return any(dim in (-1, operand.dim() - 1) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))
