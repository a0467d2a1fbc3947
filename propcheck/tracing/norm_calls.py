"""Recognise normalisations, fused or written out, and their gains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.tracing.events import NormCall
from propcheck.tracing.graph import Norm, trace_of
from propcheck.tracing.op_names import NORMS
from propcheck.tracing.tensors import is_transformed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from propcheck.records import NormKind
    from propcheck.tracing.graph import Node, Trace
    from propcheck.tracing.graph_builder import GraphBuilder, Operation

# The statistic that a norm written out divides by, from the reduction that it uses; any other reduction gives a length.
_STATISTICS: dict[str, NormKind] = {"mean": "mean_square", "var": "variance", "std": "variance", "var_mean": "variance"}
# Fused norms over the last dimensions: the positions of their weight and eps, and the default of eps.
_FUSED: dict[str, tuple[NormKind, int, int, float | None]] = {
    "layer_norm": ("variance", 2, 4, 1e-5),
    "native_layer_norm": ("variance", 2, 4, None),
    "rms_norm": ("mean_square", 2, 3, None),
}


@dataclass(frozen=True, slots=True)
class _Form:
    """What a norm computes.

    ``is_along_last`` is whether its vectors lie along the last dimension; where they do not, nothing else is known.
    """

    dtype: torch.dtype
    width: int
    kind: NormKind = "mean_square"
    eps: float | None = None
    gain: Any = None
    is_along_last: bool = True


def recognise_norm(graph: GraphBuilder, operation: Operation, operand: Tensor, node: Node | None) -> Norm:
    """Return the norm that a fused function, or a product with a factor, computed; send its events."""
    result = operation.result[0] if isinstance(operation.result, tuple | list) else operation.result
    form = _form(operation, operand)
    norm = Norm(
        graph.norms,
        form.kind,
        form.dtype,
        form.width,
        graph.module,
        form.eps if form.is_along_last else None,
        late=bool(operation.factors) and all(factor.of is not node for factor in operation.factors),
        # A gain within the factor.
        parameter=min(frozenset().union(*(factor.parameters for factor in operation.factors)), default=None),
    )
    graph.norms += 1
    comparable = form.is_along_last and isinstance(result, Tensor) and result.shape == operand.shape
    for listener in graph.listeners:
        listener.norm(NormCall(norm, operand, result if comparable else None))
    if isinstance(form.gain, Tensor):
        trace = trace_of(form.gain)
        _note_gain(graph, norm, form.gain, trace.parameters if trace is not None else frozenset())
    return norm


def note_gain(graph: GraphBuilder, norm: Norm, gains: Iterable[tuple[Tensor, frozenset[str]]], output: Tensor) -> None:
    """Note the gains that the result of a norm was multiplied with, each with its parameters, and send their events."""
    for gain, parameters in gains:
        _note_gain(graph, norm, gain, parameters)
    for listener in graph.listeners:
        listener.norm_output(norm, output)


def _note_gain(graph: GraphBuilder, norm: Norm, gain: Tensor, parameters: frozenset[str]) -> None:
    if is_transformed(gain):
        return
    parameter = graph.names.get(id(gain))
    norm.parameter = parameter if parameter is not None else min(parameters, default=None)
    for listener in graph.listeners:
        listener.norm_gain(norm, gain)


def _form(operation: Operation, operand: Tensor) -> _Form:
    name = operation.name
    if name in _FUSED:
        return _fused_form(operation, operand)
    width = operand.shape[-1] if operand.dim() else 1
    dtype = torch.promote_types(operand.dtype, torch.float32)  # fused norms compute in fp32 or wider
    if name == "normalize":
        eps = _argument(operation, "eps", 3, 1e-12)
        is_along_last = _argument(operation, "dim", 2, 1) in (-1, operand.dim() - 1)
        # eps bounds the length, not its square.
        return _Form(dtype, width, "length", float(eps) ** 2, is_along_last=is_along_last)
    if name in NORMS:  # over other dimensions than the last
        return _Form(dtype, width, is_along_last=False)
    return _written_form(operation.factors, dtype, width)


def _fused_form(operation: Operation, operand: Tensor) -> _Form:
    kind, weight_position, eps_position, default = _FUSED[operation.name]
    eps = _argument(operation, "eps", eps_position, default)
    if eps is None and operation.name == "rms_norm":  # torch's own default
        eps = torch.finfo(operand.dtype).eps
    shape = _argument(operation, "normalized_shape", 1, (operand.shape[-1] if operand.dim() else 1,))
    width = shape if isinstance(shape, int) else torch.Size(shape).numel()
    dtype = torch.promote_types(operand.dtype, torch.float32)
    return _Form(dtype, width, kind, eps, _argument(operation, "weight", weight_position, None))


def _written_form(factors: Iterable[Trace], dtype: torch.dtype, width: int) -> _Form:
    for factor in factors:
        if factor.reduced is not None:
            function, reduced_dtype = factor.reduced
            return _Form(reduced_dtype, width, _STATISTICS.get(function, "length"), factor.eps, factor.gain)
    return _Form(dtype, width, is_along_last=False)


def _argument(operation: Operation, key: str, position: int, default: Any) -> Any:
    return operation.call.kwargs.get(key, operation.call.args[position] if len(operation.call.args) > position else default)
