"""How what is known of tensors travels through torch's functions: the result's trace from the operands' traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.observe.statistics import moments
from propcheck.observe.trace import Norm, Trace, mark, merged, trace_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

# By the name of the torch function, whatever object it is called on.
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
_ATTENTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_RECURRENCES = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_PRODUCTS = _CONVOLUTIONS | _ATTENTIONS | _RECURRENCES | {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmm_", "baddbmm", "addbmm", "addmv",
    "einsum", "tensordot", "bilinear", "chain_matmul", "linalg_multi_dot", "solve_triangular", "linalg_solve_triangular",
}  # fmt: skip
# Products whose one-dimensional parameters are vectors to multiply with, not biases.
_UNBIASED = {"matmul", "__matmul__", "__rmatmul__", "mv", "einsum", "tensordot"}
_SOFTMAXES = {"softmax", "log_softmax", "_softmax"}
_SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax"} | _RECURRENCES
_ROUTERS = {"topk", "index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "one_hot"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "native_layer_norm"}
# Reductions, with the position of the argument that says over which dimensions.
_REDUCTIONS = {
    "mean": 1, "sum": 1, "var": 1, "std": 1, "var_mean": 1, "std_mean": 1, "norm": 2, "vector_norm": 2, "linalg_norm": 2,
    "linalg_vector_norm": 2,
}  # fmt: skip
_ROOTS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_", "norm", "vector_norm", "linalg_norm", "linalg_vector_norm", "std", "std_mean"}
_SCALINGS = {
    "mul", "mul_", "multiply", "multiply_", "div", "div_", "divide", "divide_", "true_divide", "true_divide_",
}  # fmt: skip
ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
# Results that carry no signal.
SILENT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_empty", "new_ones",
    "new_full",
}  # fmt: skip


class Propagation:
    """Marks the results of functions, and keeps count of what was met on the way.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.roles: dict[str, str] = {}
        self.measure = True  # take the statistics of what norms read
        self.norms = 0  # met by a stream so far
        self.products = 0
        self._lookups = 0
        self._names = names

    def looked_up(self, result: Tensor, weight: Any) -> None:
        """Mark the result of an embedding: stream."""
        name = self._names.get(id(weight))
        if name is not None:
            self.roles.setdefault(name, "embedding")
        mark(result, Trace("stream", roots=frozenset({self._lookups}), parameters=frozenset({name} if name else ())))
        self._lookups += 1

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Mark what the function ``name`` returned, or wrote into its first argument."""
        if name == "__setitem__":
            result = args[0]
        if not isinstance(result, Tensor | tuple | list) or isinstance(result, torch.Size):
            return
        operands = tensors_in((*args, *kwargs.values()))
        # What each operand brings of parameters: itself, or those that it was computed from.
        brought: list[tuple[Tensor, frozenset[str]]] = []
        signals: list[tuple[Tensor, Trace]] = []
        factors: list[Trace] = []
        for operand in operands:
            trace = trace_of(operand)
            parameter = self._names.get(id(operand))
            if parameter is not None:
                brought.append((operand, frozenset({parameter})))
            elif trace is not None and trace.kind in ("weight", "factor"):
                brought.append((operand, trace.parameters))
            if trace is not None and trace.kind == "factor":
                factors.append(trace)
            elif trace is not None and trace.kind != "weight":
                signals.append((operand, trace))
        weights = frozenset().union(*(names for _, names in brought))
        if signals:
            trace = self._of_signals(name, args, kwargs, signals, factors, brought, weights)
        elif factors:  # eps added, a root taken
            rooted = factors[0].rooted or name in _ROOTS or (name == "pow" and _is_root(args[-1]))
            trace = replace(factors[0], rooted=rooted, parameters=weights)
        elif weights:
            trace = Trace("weight", parameters=weights)
        else:
            return
        for value in tensors_in((result,)):
            mark(value, trace)

    def unknown(self, result: Tensor, read: list[Tensor], parameters: list[nn.Parameter]) -> Trace | None:
        """Mark what a module computed by a way that cannot be followed (a kernel of its own) as a product of all it has."""
        traces = [trace for tensor in read if (trace := trace_of(tensor)) is not None and trace.kind in ("stream", "branch")]
        if not traces:
            return None
        trace = merged(traces)
        own = frozenset(name for parameter in parameters if (name := self._names.get(id(parameter))) is not None)
        mark(result, self._product("", replace(trace, parameters=trace.parameters | own), weighed=bool(own), mixed=False))
        return trace_of(result)

    def _of_signals(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        signals: list[tuple[Tensor, Trace]],
        factors: list[Trace],
        brought: list[tuple[Tensor, frozenset[str]]],
        weights: frozenset[str],
    ) -> Trace:
        trace = merged([trace for _, trace in signals])
        operand = signals[0][0]
        normalises = name in _NORMS or (name in _SCALINGS and any(factor.rooted for factor in factors))
        for tensor, names in brought:
            for parameter in names:
                self.roles.setdefault(parameter, _role(name, kwargs, trace, tensor, normalises=normalises))
        if weights - trace.parameters:
            trace = replace(trace, parameters=trace.parameters | weights)
        if name in _PRODUCTS:
            return self._product(name, trace, weighed=bool(weights), mixed=len(signals) > 1)
        if normalises:
            return self._normalised(trace, operand, gained=bool(weights))
        if name in _REDUCTIONS and not factors and _reduces_width(name, args, kwargs, operand):
            return Trace("factor", rooted=name in _ROOTS)
        if name in _SCALINGS:
            others = [value for value in args if value is not operand]
            if trace.kind == "stream" and any(map(_is_number, others)):
                trace = replace(trace, scalings=trace.scalings + 1)
            return replace(trace, ungained=False) if weights and trace.ungained else trace
        feature = "softmax" if name in _SOFTMAXES else "scanned" if name in _SCANS else "routed" if name in _ROUTERS else None
        if feature is not None and trace.kind == "branch" and feature not in trace.features:
            trace = replace(trace, features=trace.features | {feature})
        return trace

    def _product(self, name: str, trace: Trace, *, weighed: bool, mixed: bool) -> Trace:
        self.products += 1
        features = trace.features
        if weighed:
            features |= {"weighed"}
        if name in _CONVOLUTIONS:
            features |= {"convolved"}
        if name in _RECURRENCES:
            features |= {"scanned"}
        elif name in _ATTENTIONS:
            features |= {"softmax", "mixed"}
        elif mixed:
            features |= {"mixed"}
        reads = trace.kind == "stream"
        return Trace(
            "branch",
            roots=trace.roots,
            read_norm=trace.norm if reads else trace.read_norm,
            read_scalings=trace.scalings if reads else trace.read_scalings,
            parameters=trace.parameters,
            features=features,
            product=self.products,
            module=trace.module,
        )

    def _normalised(self, trace: Trace, operand: Tensor, *, gained: bool) -> Trace:
        """Return what is known of a norm's result; of one that reads a stream, note what it read."""
        if trace.kind == "branch":
            return replace(trace, written_norm=True, ungained=not gained)
        mean_square = None
        if self.measure:
            self.norms += 1
            with torch.no_grad():
                mean_square = moments(operand).mean_square
        return replace(trace, norm=Norm(self.norms, mean_square), ungained=not gained)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among ``values``, one level of nesting deep."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [inner for inner in value if isinstance(inner, Tensor)]
        elif isinstance(value, dict):
            found += [inner for inner in value.values() if isinstance(inner, Tensor)]
    return found


def _is_number(value: Any) -> bool:
    """Whether a factor is one number, in whatever form."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float) and value != 1


def _is_root(exponent: Any) -> bool:
    return isinstance(exponent, float) and exponent in (-0.5, 0.5)


def _reduces_width(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operand: Tensor) -> bool:
    position = _REDUCTIONS[name]
    dims = kwargs.get("dim", args[position] if len(args) > position else None)
    if dims is None or isinstance(dims, bool):
        return True
    return any(dim in (-1, operand.dim() - 1) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))


def _role(name: str, kwargs: Mapping[str, Any], trace: Trace, tensor: Tensor, *, normalises: bool) -> str:
    """Return the role of a parameter from the function in which it, or what was computed from it, met a signal."""
    if name in ADDITIONS or kwargs.get("bias") is tensor:
        return "bias"
    if normalises or (name in _SCALINGS and trace.ungained):
        return "norm"
    if name in _PRODUCTS:
        is_bias = tensor.dim() == 1 and name not in _UNBIASED
        return "bias" if is_bias else "convolution" if name in _CONVOLUTIONS else "linear"
    return "scale" if name in _SCALINGS else "other"
