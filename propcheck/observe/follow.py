"""Find the residual additions of any model by following its tensors, and measure each as it happens.

``Follower`` is a ``TorchFunctionMode``. The output of an embedding is the stream; a tensor that passed a product since
is a branch; everything else keeps what it is given. An addition of a stream and a branch of the same shape is a site, and
its result is the stream. Module names serve only to say where a site is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from propcheck.observe.gradients import Ledger, MeasuredEmbedding, MeasuredLinear, worth_factoring
from propcheck.observe.statistics import AdditionStatistics, Moments, addition_statistics, frobenius, moments, rows_fp32
from propcheck.observe.trace import Norm, Trace, mark, merged, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# By the name of the torch function, whatever object it is called on.
_PRODUCTS = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addmm_", "baddbmm", "addbmm", "addmv", "einsum",
    "tensordot", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention", "multi_head_attention_forward", "chain_matmul", "linalg_multi_dot", "solve_triangular",
    "linalg_solve_triangular",
}  # fmt: skip
_CONVOLUTIONS = {name for name in _PRODUCTS if name.startswith("conv")}
_ATTENTIONS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_SOFTMAXES = {"softmax", "log_softmax", "_softmax"}
_SCANS = {"cumsum", "cumprod", "logcumsumexp", "cummax"}
_ROUTERS = {"topk", "index_add", "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "one_hot"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "native_layer_norm"}
_REDUCTIONS = {"mean", "sum", "var", "std", "norm", "vector_norm", "linalg_vector_norm", "var_mean", "std_mean"}
_ROOTS = {"rsqrt", "rsqrt_", "sqrt", "sqrt_", "norm", "vector_norm", "linalg_vector_norm", "std"}
_SCALINGS = {"mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "__rmul__", "__truediv__", "__rtruediv__"}
_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
# Functions whose result holds the values of their argument, if the dtype does not narrow.
_SAME_VALUES = {
    "to", "float", "double", "type_as", "type", "clone", "contiguous", "detach", "view", "reshape", "view_as", "expand",
    "expand_as", "flatten", "unflatten", "unsqueeze", "squeeze", "requires_grad_",
}  # fmt: skip
# Results that carry no signal.
_SILENT = {
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_zeros",
    "new_empty",
    "new_ones",
    "new_full",
}


@dataclass(slots=True)
class Site:
    """What was seen at one residual addition; tensors are 0-d and still on the device."""

    number: int
    block: int | None
    branch: Trace
    stream: Trace
    shape: tuple[int, ...]
    stream_dtype: torch.dtype
    update_dtype: torch.dtype
    statistics: AdditionStatistics
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by "stream", "update", "sum"


class Follower(TorchFunctionMode):
    """Follows one forward pass (and the recomputation of its parts) of one model.

    Parameters
    ----------
    names
        The name of each parameter, by ``id``.
    ledger
        Where the gradients of weights go.
    """

    def __init__(self, names: dict[int, str], ledger: Ledger) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.roles: dict[str, str] = {}
        self.ledger = ledger
        self.block: int | None = None
        self.measure = True  # forward statistics
        self.differentiate = True  # gradient hooks
        self._names = names
        self.next_site = 0
        self._products = 0
        self.norms = 0  # met so far
        self.norms_at_last_sum = 0
        self._modules: list[int] = []  # of the modules being run, the number of products at their entry

    # ------------------------------------------------------------------ modules

    def watch(self, model: nn.Module) -> list[Any]:
        """Hook every module of ``model`` to know where an operation happens; returns the hooks' handles."""
        handles: list[Any] = []
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(self._entering))
                handles.append(module.register_forward_hook(self._leaving(path), with_kwargs=True, always_call=True))
        return handles

    def _entering(self, _module: nn.Module, _args: Any) -> None:
        self._modules.append(self._products)

    def _leaving(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            products = self._modules.pop()
            for value in _tensors(output):
                trace = trace_of(value)
                # The module that made the last product wrote the branch, or the outermost module around it.
                if trace is not None and trace.kind == "branch" and trace.product > products:
                    mark(value, replace(trace, module=path))

        return hook

    # ------------------------------------------------------------------ recomputation

    @contextmanager
    def segment(self, block: int | None, first_site: int | None, *, measure: bool, differentiate: bool) -> Iterator[None]:
        """Say what to observe within a part of the model; ``first_site`` is given when the part is computed again."""
        saved = self.block, self.measure, self.differentiate, self.next_site
        self.block, self.measure, self.differentiate = block, measure, differentiate
        if first_site is not None:
            self.next_site = first_site
        try:
            yield
        finally:
            self.block, self.measure, self.differentiate = saved[:3]
            if first_site is not None:
                self.next_site = saved[3]

    # ------------------------------------------------------------------ functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name == "__get__" and not args:
            return func(*args, **kwargs)
        operands = _operands(args, kwargs)
        parameters = [self._names[id(operand)] for operand in operands if id(operand) in self._names]
        traced = [(operand, trace) for operand in operands if (trace := trace_of(operand)) is not None]
        if name == "linear":
            result = self._linear(args, kwargs)
        elif name == "embedding":
            return self._embedding(func, args, kwargs)
        elif (not traced and not parameters) or name in _SILENT:
            return func(*args, **kwargs)
        elif name in _ADDITIONS and (found := _residual(args)) is not None:
            return self._addition(func, args, kwargs, *found)
        else:
            result = func(*args, **kwargs)
        if not (traced or parameters) or not isinstance(result, Tensor | tuple | list):
            return result
        trace = self._propagated(name, args, traced, parameters)
        for value in _tensors(result):
            known = trace
            if name in _REDUCTIONS and trace.source is not None and not (value.dim() and value.shape[-1] == 1):
                known = replace(trace.source, moments=None)  # a reduction over tokens, not over the width
            if known.moments is not None and not _keeps_values(name, value, traced[0][0]):
                known = replace(known, moments=None)
            mark(value, known)
        return result

    def _propagated(self, name: str, args: tuple[Any, ...], traced: list[tuple[Tensor, Trace]], parameters: list[str]) -> Trace:
        """Return what is known of the result of ``name``."""
        signals = [(operand, trace) for operand, trace in traced if trace.kind in ("stream", "branch")]
        factors = [trace for _, trace in traced if trace.kind == "factor"]
        weights = frozenset(parameters).union(*(trace.parameters for _, trace in traced if trace.kind == "weight"))
        if not signals:
            if not factors:
                return Trace("weight", parameters=weights)
            lead = factors[0]  # eps added, a root taken
            return replace(lead, rooted=lead.rooted or name in _ROOTS or (name == "pow" and args[-1] in (-0.5, 0.5)))
        trace = merged([trace for _, trace in signals])
        for parameter in weights:
            self.roles.setdefault(parameter, _role(name, args, trace, self._names, parameter))
        if weights - trace.parameters:
            trace = replace(trace, parameters=trace.parameters | weights)
        if name in _PRODUCTS:
            return self._product(name, trace, weighed=bool(weights), mixed=len(signals) > 1)
        if name in _NORMS or (name in _SCALINGS and any(factor.rooted for factor in factors)):
            return self._normalised(trace, signals[0][0])
        if name in _REDUCTIONS and not factors:
            return Trace("factor", source=trace, rooted=name in _ROOTS)
        feature = "softmax" if name in _SOFTMAXES else "scanned" if name in _SCANS else "routed" if name in _ROUTERS else None
        if feature is not None and trace.kind == "branch" and feature not in trace.features:
            trace = replace(trace, features=trace.features | {feature})
        if (
            name in _SCALINGS
            and trace.kind == "stream"
            and any(isinstance(value, int | float) and value != 1 for value in args)
        ):
            trace = replace(trace, scaled=True)
        return trace

    def _product(self, name: str, trace: Trace, *, weighed: bool, mixed: bool) -> Trace:
        self._products += 1
        features = trace.features
        if weighed:
            features |= {"weighed"}
        if name in _CONVOLUTIONS:
            features |= {"convolved"}
        if name in _ATTENTIONS:
            features |= {"softmax", "mixed"}
        elif mixed:
            features |= {"mixed"}
        return Trace(
            "branch",
            read_norm=trace.norm if trace.kind == "stream" else trace.read_norm,
            parameters=trace.parameters,
            features=features,
            product=self._products,
            module=trace.module,
        )

    def _normalised(self, trace: Trace, operand: Tensor) -> Trace:
        """Return what is known of a norm's result; of one that reads a stream, note what it read."""
        if trace.kind == "branch":
            return replace(trace, written_norm=True, moments=None)
        mean_square = None
        if self.measure:
            mean_square = (trace.moments or moments(rows_fp32(operand))).mean_square
        self.norms += 1
        return replace(trace, norm=Norm(self.norms, mean_square), moments=None)

    # ------------------------------------------------------------------ weights

    def _linear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x, weight, bias = _bound(("input", "weight", "bias"), args, kwargs)
        name = self._names.get(id(weight))
        if name is None or not weight.requires_grad or not torch.is_grad_enabled() or x.dim() < 2:
            return torch.nn.functional.linear(x, weight, bias)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return torch.nn.functional.linear(x, weight, bias)  # torch's own error, in the user's code
        if not worth_factoring(x.numel() // x.shape[-1], weight):
            return torch.nn.functional.linear(x, weight, bias)
        result: Tensor = MeasuredLinear.apply(x, weight, bias, self.ledger, name)
        return result

    def _embedding(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        keys = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        numbers, weight, padding, max_norm, _, by_frequency, _ = _bound(keys, args, kwargs)
        name = self._names.get(id(weight))
        result: Tensor
        if name is not None and weight.requires_grad and torch.is_grad_enabled() and max_norm is None and not by_frequency:
            result = MeasuredEmbedding.apply(numbers, weight, padding, self.ledger, name)
        else:
            result = func(*args, **kwargs)
        if name is not None:
            self.roles.setdefault(name, "embedding")
        mark(result, Trace("stream"))
        return result

    # ------------------------------------------------------------------ sites

    def _addition(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Tensor, update: Tensor) -> Tensor:
        """Measure one residual addition: before it happens, since it may be in place, and after."""
        of_stream, of_update = trace_of(stream), trace_of(update)
        assert of_stream is not None
        assert of_update is not None
        in_place = func.__name__ in ("add_", "__iadd__")
        number = self.next_site
        self.next_site += 1
        if self.differentiate:
            self._take_gradient(stream, number, "stream")
            self._take_gradient(update, number, "update")
        # An in-place addition destroys an operand that is still to be measured.
        kept = [operand.detach().clone() if in_place and self.measure else operand for operand in (stream, update)]
        result: Tensor = func(*args, **kwargs)
        if in_place:
            result.__dict__.pop(_SLOTS, None)
        known: Moments | None = None
        if self.measure:
            with torch.no_grad():
                statistics = addition_statistics(*kept, result, of_stream.moments)
            known = statistics.total
            self.norms_at_last_sum = self.norms
            self.sites.append(
                Site(number, self.block, of_update, of_stream, tuple(result.shape), stream.dtype, update.dtype, statistics)
            )
        if self.differentiate:
            self._take_gradient(result, number, "sum")
        after = Trace("stream", moments=known)
        mark(result, after)
        return result

    def _take_gradient(self, tensor: Tensor, number: int, column: str) -> None:
        """Measure the gradient of ``tensor`` once, for every column that asks for it."""
        if not tensor.requires_grad:
            return
        slots = tensor.__dict__.get(_SLOTS)
        if slots is None:
            slots = tensor.__dict__[_SLOTS] = []

            def hook(gradient: Tensor, slots: list[tuple[int, str]] = slots) -> None:
                norm = frobenius(gradient)
                for site, name in slots:
                    self.sites[site].gradients[name] = norm

            tensor.register_hook(hook)
        slots.append((number, column))


_SLOTS = "_propcheck_slots"


def _operands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments, one level of nesting deep."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [inner for inner in value if isinstance(inner, Tensor)]
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [inner for inner in value if isinstance(inner, Tensor)]
    return []


def _residual(args: tuple[Any, ...]) -> tuple[Tensor, Tensor] | None:
    """Return (stream, update) if the two operands of an addition are a stream and a branch of one shape."""
    if len(args) < 2 or not isinstance(args[0], Tensor) or not isinstance(args[1], Tensor) or args[0].shape != args[1].shape:
        return None
    first, second = trace_of(args[0]), trace_of(args[1])
    kinds = (first and first.kind, second and second.kind)
    if kinds == ("stream", "branch"):
        return args[0], args[1]
    if kinds == ("branch", "stream"):
        return args[1], args[0]
    return None


def _keeps_values(name: str, result: Tensor, operand: Tensor) -> bool:
    return (
        name in _SAME_VALUES
        and torch.promote_types(result.dtype, operand.dtype) == result.dtype
        and (result.numel() == operand.numel())
    )


def _bound(keys: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of ``keys``, None for those not given."""
    return tuple(args[index] if index < len(args) else kwargs.get(key) for index, key in enumerate(keys))


def _role(name: str, args: tuple[Any, ...], trace: Trace, names: dict[int, str], parameter: str) -> str:
    """Return the role of a parameter from the function in which it met a signal."""
    if name in _NORMS or (name in _SCALINGS and (trace.norm is not None or trace.written_norm)):
        return "norm"
    if name in _PRODUCTS:
        is_bias = len(args) > 2 and names.get(id(args[2])) == parameter and name not in ("addmm", "baddbmm", "addbmm")
        return "bias" if is_bias else "convolution" if name in _CONVOLUTIONS else "linear"
    return "scale" if name in _SCALINGS else "bias" if name in _ADDITIONS else "other"
