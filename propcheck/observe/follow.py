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
from propcheck.observe.propagate import ADDITIONS, SILENT, Propagation, tensors_in
from propcheck.observe.statistics import AdditionStatistics, addition_statistics, frobenius
from propcheck.observe.trace import Trace, mark, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


@dataclass(frozen=True, slots=True)
class _Residual:
    """The operands of a residual addition, in either order; ``alpha`` multiplies the second argument, as torch.add has it."""

    stream: Tensor
    update: Tensor
    of_stream: Trace
    of_update: Trace
    alpha: float
    stream_is_first: bool


class Follower(TorchFunctionMode):
    """Follows one forward pass (and the recomputation of its parts) of one model.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    ledger
        Where the gradients of weights go.
    """

    def __init__(self, names: dict[int, str], ledger: Ledger) -> None:
        super().__init__()
        self.sites: list[Site] = []
        self.ledger = ledger
        self.block: int | None = None
        self.measure = True  # forward statistics
        self.differentiate = True  # gradient hooks
        self.next_site = 0
        # Told of each parameter or buffer before it is used, and of the function that uses it.
        self.on_use: Callable[[str, str], None] = lambda _parameter, _function: None
        self._names = names
        self._propagation = Propagation(names)
        self._norms_at_last_sum = 0
        self._modules: list[int] = []  # of the modules being run, the number of products at their entry

    @property
    def roles(self) -> dict[str, str]:
        """What each parameter is for, as far as it was seen at work."""
        return self._propagation.roles

    @property
    def last_normed(self) -> bool:
        """Whether the last sum passed a norm."""
        return self._propagation.norms > self._norms_at_last_sum

    # ------------------------------------------------------------------ modules

    def watch(self, model: nn.Module) -> list[Any]:
        """Register hooks on every module of ``model``, to know where an operation happens; return their handles."""
        handles: list[Any] = []
        for path, module in model.named_modules():
            if path:
                handles.append(module.register_forward_pre_hook(self._entering))
                handles.append(module.register_forward_hook(self._leaving(path), with_kwargs=True, always_call=True))
        return handles

    def _entering(self, _module: nn.Module, _args: Any) -> None:
        self._modules.append(self._propagation.products)

    def _leaving(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            products = self._modules.pop()
            for value in tensors_in((output,)):
                trace = trace_of(value)
                if trace is None and value.requires_grad:
                    read = tensors_in((*args, *kwargs.values()))
                    trace = self._propagation.unknown(value, read, [*module.parameters()])
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
        self._propagation.measure = measure
        if first_site is not None:
            self.next_site = first_site
        try:
            yield
        finally:
            self.block, self.measure, self.differentiate = saved[:3]
            self._propagation.measure = self.measure
            if first_site is not None:
                self.next_site = saved[3]

    # ------------------------------------------------------------------ functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        for operand in tensors_in((*args, *kwargs.values())):
            parameter = self._names.get(id(operand))
            if parameter is not None and name not in ("__get__", "__set__"):  # an attribute, not the value
                self.on_use(parameter, name)
        if name == "embedding":
            return self._embedding(func, args, kwargs)
        if name in ADDITIONS and (found := _residual(args, kwargs)) is not None:
            return self._addition(func, args, kwargs, found)
        result = self._linear(func, args, kwargs) if name == "linear" else func(*args, **kwargs)
        if name not in SILENT:
            self._propagation.follow(name, args, kwargs, result)
        return result

    # ------------------------------------------------------------------ weights

    def _linear(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x, weight, bias = _bound(("input", "weight", "bias"), args, kwargs)
        name = self._names.get(id(weight))
        autocast = torch.is_autocast_enabled(x.device.type)
        plain = (
            name is None
            or not _is_differentiated(weight)
            or not worth_factoring(x, weight)
            or (x.dtype == torch.float64 if autocast else x.dtype != weight.dtype)
        )
        if plain:
            unchanged: Tensor = func(*args, **kwargs)
            return unchanged
        if autocast:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        result: Tensor = MeasuredLinear.apply(x, weight, bias, self.ledger, name)
        return result

    def _embedding(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        keys = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        numbers, weight, padding, max_norm, _, by_frequency, _ = _bound(keys, args, kwargs)
        name = self._names.get(id(weight))
        result: Tensor
        if name is not None and _is_differentiated(weight) and max_norm is None and not by_frequency:
            result = MeasuredEmbedding.apply(numbers, weight, padding, self.ledger, name)
        else:
            result = func(*args, **kwargs)
        self._propagation.looked_up(result, weight)
        return result

    # ------------------------------------------------------------------ sites

    def _addition(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: _Residual) -> Tensor:
        """Measure one residual addition: before it happens, since it may be in place, and after."""
        number = self.next_site
        self.next_site += 1
        in_place = func.__name__ in ("add_", "__iadd__")
        scaled = None if found.alpha == 1 else found.update if found.stream_is_first else found.stream
        operands = {"stream": found.stream, "update": found.update}
        # Columns whose gradient is the sum's: of alpha times an operand, which is nowhere in memory, and of an update
        # that is a view and is overwritten by the sum, where autograd leaves no place for a hook.
        overwritten = in_place and args[0] is found.update and found.update._is_view()  # noqa: SLF001
        as_sum = ["sum", *(column for column, one in operands.items() if one is scaled)]
        if overwritten and "update" not in as_sum:
            as_sum.append("update")
        if self.differentiate:
            for column, one in operands.items():
                if column not in as_sum:
                    self._take_gradient(one, number, column)
        kept = [_kept(one, found.alpha if one is scaled else 1, copied=in_place) for one in operands.values() if self.measure]
        result: Tensor = func(*args, **kwargs)
        if self.measure:
            statistics = addition_statistics(kept[0], kept[1], result)
            of_stream = found.of_stream
            if scaled is found.stream:
                of_stream = replace(of_stream, scalings=of_stream.scalings + 1)
            # A parameter that the stream passed (a norm after the last sum, positions) is not on the way to the update.
            of_update = replace(found.of_update, parameters=found.of_update.parameters - of_stream.parameters)
            shape, dtypes = tuple(result.shape), (found.stream.dtype, found.update.dtype)
            self.sites.append(Site(number, self.block, of_update, of_stream, shape, *dtypes, statistics))
            self._norms_at_last_sum = self._propagation.norms
        if self.differentiate:
            for column in as_sum:
                self._take_gradient(result, number, column)
        mark(result, Trace("stream", roots=found.of_stream.roots | found.of_update.roots))
        return result

    def _take_gradient(self, tensor: Tensor, number: int, column: str) -> None:
        """Measure the gradient of ``tensor`` once, for every column that asks for it."""
        if not tensor.requires_grad:
            return
        version, slots = tensor.__dict__.get(_SLOTS, (None, []))
        if version != tensor._version:  # noqa: SLF001 - a tensor that was changed in place is another one to autograd
            slots = []
            tensor.__dict__[_SLOTS] = (tensor._version, slots)  # noqa: SLF001

            def hook(gradient: Tensor) -> None:
                norm = frobenius(gradient)
                for site, name in slots:
                    self.sites[site].gradients[name] = norm

            tensor.register_hook(hook)
        slots.append((number, column))


_SLOTS = "_propcheck_slots"


def _residual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Residual | None:
    """Return the operands of an addition if they are a stream and a branch of one shape."""
    first, second = _bound(("input", "other"), args, kwargs)
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape != second.shape:
        return None
    of_first, of_second = trace_of(first), trace_of(second)
    if of_first is None or of_second is None:
        return None
    alpha = kwargs.get("alpha", 1)
    if (of_first.kind, of_second.kind) == ("stream", "branch"):
        found = _Residual(first, second, of_first, of_second, alpha, stream_is_first=True)
    elif (of_first.kind, of_second.kind) == ("branch", "stream"):
        found = _Residual(second, first, of_second, of_first, alpha, stream_is_first=False)
    else:
        return None
    # A look-up that a branch makes for itself (a bias of its scores, a value by token) is not the stream.
    older = min(found.of_stream.roots) < min(found.of_update.roots)
    return found if older or found.of_stream.roots & found.of_update.roots else None


def _kept(operand: Tensor, factor: float, *, copied: bool) -> Tensor:
    """Return what is added, for measuring it after the addition, which may overwrite it."""
    if factor != 1:
        return operand.detach().double() * factor
    return operand.detach().clone() if copied else operand


def _is_differentiated(weight: Tensor) -> bool:
    """Whether autograd will ask for the gradient of ``weight`` in the usual way.

    Non-reentrant checkpointing runs its part again outside of the follower, and expects the very tensors to be saved that
    plain code saves; it shows by its hooks on saved tensors.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
    return weight.requires_grad and torch.is_grad_enabled() and hooks is None


def _bound(keys: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of ``keys``, None for those not given."""
    return tuple(args[index] if index < len(args) else kwargs.get(key) for index, key in enumerate(keys))
