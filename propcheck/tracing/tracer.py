"""Find the residual additions of any model by following its tensors, and measure each as it happens.

``Follower`` is a ``TorchFunctionMode``. It marks what every function returns with a step of the graph in ``trace``, and asks
``additions`` whether a sum is a residual addition. Module names serve only to say where a site is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from propcheck.measure.padding import padding_masks, real_positions
from propcheck.measure.rotary_precision import FUNCTIONS
from propcheck.measure.statistics import addition_statistics, frobenius, joint_statistics
from propcheck.measure.weight_calls import run_embedding, run_linear
from propcheck.records import Angle, Doubling
from propcheck.tracing.addition_calls import Sum, channels_last, fused_sum, kept, sum_of, version
from propcheck.tracing.additions import Residual, Site, counted_twice, residual, settle, sites
from propcheck.tracing.branches import ancestors, path
from propcheck.tracing.graph import (
    Addition,
    Update,
    is_stream,
    is_transformed,
    mark,
    outermost,
    signal_of,
    stands_for,
    trace_of,
)
from propcheck.tracing.op_names import CASTS, FUSED, SILENT
from propcheck.tracing.propagation import Propagation, tensors_in
from propcheck.tracing.update_parts import before_sum, carry, keep, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from propcheck.measure.gradients import Ledger
    from propcheck.tracing.graph import Norm, Trace


@dataclass(frozen=True, slots=True)
class _Kept:
    """The operands of the last residual addition: another update of the same stream may follow."""

    addition: Addition
    stream: tuple[Tensor, int]  # and its version: what was changed since cannot be measured again
    updates: tuple[tuple[Tensor, int], ...]


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
        self.ledger = ledger
        self.block: int | None = None
        self.measure = True  # forward statistics
        self.differentiate = True  # gradient hooks
        self.next_site = 0  # number of the next addition, residual or not, of two tensors of one shape
        # Told of each parameter or buffer before it is used, and of the function that uses it.
        self.on_use: Callable[[str, str], None] = lambda _parameter, _function: None
        # Told of what each addition adds, padding left out: the addition, "stream", "update", "grad_stream" ..., which of its
        # updates, and the tensor.
        self.on_value: Callable[[Addition, str, int, Tensor], None] = lambda _addition, _column, _part, _tensor: None
        self._unobserved: dict[str, str] = {}  # by module: what could not be followed into
        self._names = names
        self._propagation = Propagation(names)
        self._additions: dict[int, tuple[Addition, bool]] = {}  # by number, and whether the first operand is the stream
        self._kept: list[_Kept] = []  # of one stream
        self._doubled: list[tuple[Trace, int, int | None, str | None]] = []  # what, the last step before, block and module
        self._block_of: dict[str, int | None] = {}  # by module
        self._since: dict[int, int] = {}  # by block: the last step before it began
        self._sites: list[Site] | None = None
        self._modules: list[tuple[str, int, int | None]] = []  # being run: path, number of products at the entry, block

    @property
    def roles(self) -> dict[str, str]:
        """What each parameter is for, as far as it was seen at work."""
        stepped = frozenset().union(*(one.branch.parameters for one in self.sites if "decayed" in one.branch.features))
        return self._propagation.roles | dict.fromkeys(self._propagation.step_biases & stepped, "step_bias")

    @property
    def norms(self) -> list[Norm]:
        """The normalisations, in order."""
        return self._propagation.norms.met

    @property
    def angles(self) -> tuple[Angle, ...]:
        """The sines and cosines of angles in half precision."""
        return self._propagation.angles.records(self.block_of)

    @property
    def doublings(self) -> tuple[Doubling, ...]:
        """The additions that count the stream twice, once the pass is over."""
        streams = {one.stream.node for one in self.sites}  # what an update replaced begins a stream too
        return tuple(
            Doubling(next((one.number for one in self.sites if one.order > step), None), block, module)
            for what, step, block, module in self._doubled
            if is_stream(what.node) or what.node in streams
        )

    def block_of(self, module: str | None) -> int | None:
        """Return the number of the block that a module is in."""
        return self._block_of.get(module or "")

    @property
    def sites(self) -> list[Site]:
        """The residual additions, once the pass is over."""
        if self._sites is None:
            self._sites = sites([self._additions[number][0] for number in sorted(self._additions)])
        return self._sites

    @property
    def unobserved(self) -> tuple[str, ...]:
        """A sentence for each place that could not be followed."""
        return tuple(f"{path}: {what}" for path, what in self._unobserved.items())

    # ------------------------------------------------------------------ modules

    def begin(self, batch: Any) -> None:
        """Say what the model is called with: what is computed from a float input is a signal; padding is not measured."""
        self._propagation.norms.masks = padding_masks(batch)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                mark(tensor, self._propagation.begin("root"))

    def real(self, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor that are no padding."""
        return real_positions(tensor, self._propagation.norms.masks)

    def end(self, loss: Tensor) -> None:
        """Say what the pass led to."""
        trace = trace_of(loss)
        used = None if trace is None else ancestors(trace)  # None: computed in a way that cannot be followed
        settle([self._additions[number][0] for number in sorted(self._additions)], used)
        self.measure = False  # modules that run in the backward pass run again

    def watch(self, model: nn.Module, blocks: Mapping[str, int] = MappingProxyType({})) -> list[Any]:
        """Register hooks on every module of ``model``, to know where an operation happens; return their handles.

        ``blocks`` are the numbers of the blocks by their paths.
        """
        handles: list[Any] = []
        for name, module in model.named_modules():
            if name:
                parts = name.split(".")
                around = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
                block = self._block_of[name] = next((blocks[one] for one in around if one in blocks), None)
                handles.append(module.register_forward_pre_hook(self._entering(name, block)))
                left = self._leaving(name, is_block=name in blocks)
                handles.append(module.register_forward_hook(left, with_kwargs=True, always_call=True))
        return handles

    def _entering(self, path: str, block: int | None) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            if block is not None and (not self._modules or self._modules[-1][2] != block):
                self._since[block] = self._propagation.steps
            self._modules.append((path, self._propagation.products, block))
            self._propagation.module = path

        return hook

    def _leaving(self, path: str, *, is_block: bool) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            _, products, _ = self._modules.pop()
            self._propagation.module = self._modules[-1][0] if self._modules else None
            if not self.measure:
                return
            for value in tensors_in((output,)):
                trace = trace_of(value)
                if trace is None and value.requires_grad and id(value) not in self._names:
                    read = tensors_in((*args, *kwargs.values()))
                    trace = self._propagation.unknown(value, read, [*module.parameters()])
                    if trace is not None:
                        self._unobserved.setdefault(path, f"what {type(module).__name__} computes cannot be followed")
                # The module that made the last product wrote the branch, or the outermost module around it in the block.
                if trace is not None and trace.kind == "signal" and trace.product > products and not is_block:
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
        for operand in tensors_in((*args, *kwargs.values())):
            parameter = self._names.get(id(operand))
            if parameter is not None and name not in ("__get__", "__set__"):  # an attribute, not the value
                self.on_use(parameter, name)
        if name == "embedding":
            vectors, weight = run_embedding(func, args, kwargs, self._names, self.ledger)
            if self.measure:
                self._propagation.looked_up(vectors, weight)
            return vectors
        found = sum_of(name, args, kwargs) or fused_sum(name, args, kwargs, self._propagation if self.measure else None)
        if found is not None:
            return self._addition(func, args, kwargs, found)
        if self.measure and name in FUNCTIONS:
            self._propagation.angles.meet(args[-1] if args else kwargs["input"], self._propagation.module)
        linear = name == "linear"
        result = run_linear(func, args, kwargs, self._names, self.ledger) if linear else func(*args, **kwargs)
        if name in CASTS and args and isinstance(result, Tensor) and result.requires_grad and result is not args[0]:
            stands_for(result, args[0])  # the branch may have read the stream before it was cast
        if self.measure and name not in SILENT:
            if name in FUSED and self._modules:
                self._unobserved.setdefault(self._modules[-1][0], f"it runs as one fused function ({name})")
            self._propagation.follow(name, args, kwargs, result)
            carry(func, name, args, kwargs, result)
        return result

    # ------------------------------------------------------------------ sites

    def _addition(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sum) -> Tensor:
        """Measure one addition, if it may be residual: before it happens, since it may be in place, and after."""
        number = self.next_site
        self.next_site += 1
        if self.measure:
            how = self._decide(found)
            known = None if how is None else (self._new(found, how), how.stream_is_first)
        else:
            how, known = None, self._additions.get(number)
        if known is None:
            parts = before_sum(found.first, found.second, in_place=found.in_place) if self.measure and found.alpha == 1 else ()
            plain: Tensor = func(*args, **kwargs)
            if self.measure:
                self._propagation.follow(func.__name__, args, kwargs, plain)
                keep(plain, parts)
            return plain
        addition, stream_is_first = known
        stream, update = found.stream_and_update(stream_is_first=stream_is_first)
        scaled = found.scaled(stream_is_first=stream_is_first)
        as_sum = ["sum", *found.without_gradient(stream_is_first=stream_is_first)]
        watched = self.differentiate and not (addition.inner and not self.measure)
        if watched:
            for column, operand in (("stream", stream), ("update", update)):
                if column not in as_sum:
                    self._take_gradient(operand, addition, column, in_place=found.in_place)
        if how is not None:
            factors = {one: found.alpha if one == scaled else 1 for one in ("stream", "update")}
            own = kept(stream, factors["stream"], copied=found.in_place)
            # An update whose parts are of one kind is one update.
            pieces = parts_of(update) if len(how.updates) > 1 else ((update, None),)
            updates = tuple(kept(one, factors["update"], copied=found.in_place).expand_as(stream) for one, _ in pieces)
        result: Tensor = func(*args, **kwargs)
        if how is not None:
            self._record(addition, how, own, (updates, update.dtype), result, number)
        if watched:
            for column in as_sum:
                self._take_gradient(result, addition, column, in_place=found.in_place)
        return result

    def _decide(self, found: Sum) -> Residual | None:
        first, second = signal_of(found.first), signal_of(found.second)
        if is_transformed(found.first) or is_transformed(found.second):
            if first is not None or second is not None:
                self._unobserved.setdefault(self._propagation.module or "", "it runs within a transform of torch.func")
            return None
        if (first is None) is not (second is None):
            return self._from_weights(found, first or second)
        if first is None or second is None:
            return None
        for one in (first, second):
            if one.node is not None and one.node.addition is not None:
                one.node.addition.touched = True
        parts = {
            trace: [part for _, part in parts_of(tensor)]
            for tensor, trace in ((found.first, first), (found.second, second))
            if parts_of(tensor)
        }
        how = residual(first, second, parts, self._block())
        if how is None:
            if found.alpha == 1 and not found.fused and counted_twice(first, second):
                self._doubled.append((first, self._propagation.steps, self._block(), self._propagation.module))
            return None
        if found.alpha < 0 and not how.stream_is_first:
            return None  # the stream is what is taken away
        stream, update = found.stream_and_update(stream_is_first=how.stream_is_first)
        return how if stream.dim() >= update.dim() and stream.numel() >= update.numel() else None

    def _from_weights(self, found: Sum, update: Trace | None) -> Residual | None:
        """Return the first addition to learned queries: to something computed from parameters alone, which the update read."""
        is_first = signal_of(found.first) is None
        stream = found.first if is_first else found.second
        known = trace_of(stream)
        if (
            update is None
            or known is None
            or known.kind != "weight"
            or stream.dim() < 3
            or found.first.shape != found.second.shape
        ):
            return None
        steps = path(update, None).steps
        if not update.product or not known.parameters & frozenset().union(*(step.parameters for step in steps)):
            return None
        begun = self._propagation.begin("root", parameters=known.parameters)
        mark(stream, begun)
        return Residual(is_first, begun, (update,), (begun, update) if is_first else (update, begun), None)

    def _block(self) -> int | None:
        """Return the number of the block that runs: of the unit, or of the innermost module in a block that is a list."""
        return self._modules[-1][2] if self.block is None and self._modules else self.block

    def _new(self, found: Sum, how: Residual) -> Addition:
        stream, _ = found.stream_and_update(stream_is_first=how.stream_is_first)
        trace = signal_of(stream)
        assert trace is not None
        if found.scaled(stream_is_first=how.stream_is_first) == "stream":
            trace = replace(trace, scalings=trace.scalings + 1)
        if how.before is not None:
            trace = how.before.stream
        self._sites = None
        channels = next((one.channels for one in how.operands if one.channels is not None), None)
        shape = tuple(channels_last(stream, channels).shape)
        # An update that is added where the next block begins is of the block that made it.
        made = {self._block_of.get(update.module or "") for update in how.updates}
        block = made.pop() if len(made) == 1 else None
        block = self._block() if block is None else block
        since = None if block is None else self._since.get(block)
        return Addition(block, trace, shape, stream.dtype, base=how.base, channels=channels, since=since)

    def _record(
        self,
        addition: Addition,
        how: Residual,
        stream: Tensor,
        update: tuple[tuple[Tensor, ...], torch.dtype],
        result: Tensor,
        number: int,
    ) -> None:
        """Measure an addition that happened, and mark its result."""
        updates, dtype = update
        this = _Kept(addition, (stream, version(stream)), tuple((one, version(one)) for one in updates))
        group = self._group(how.before) if how.before is not None else []
        if group:
            addition.before = how.before
        together = [*group, this]
        operands = [together[0].stream[0], result, *(one for member in together for one, _ in member.updates)]
        found, total, *values = (self.real(channels_last(one, addition.channels)) for one in operands)
        self.on_value(addition, "stream", 0, found)
        for part, value in enumerate(values[len(values) - len(updates) :]):
            self.on_value(addition, "update", part, value)
        if len(values) == 1:
            measured = [addition_statistics(found, values[0], total)]
        else:
            measured = joint_statistics(found, values, total)
        addition.updates = [
            Update(each, dtype, statistics)
            for each, statistics in zip(how.updates, measured[len(measured) - len(updates) :], strict=True)
        ]
        earlier = iter(measured)
        for member in group:
            for one in member.addition.updates:
                one.statistics = next(earlier)
        self._kept = together
        self._additions[number] = addition, how.stream_is_first
        operand = how.operands[0] if how.stream_is_first else how.operands[1]
        stream_node = operand.node
        assert stream_node is not None
        trace = self._propagation.begin(
            "sum",
            carries=(stream_node,),
            parents=how.operands,
            channels=addition.channels,
            product=max(one.product for one in how.operands),
        )
        assert trace.node is not None
        trace.node.addition = addition
        trace.node.update = how.operands[how.stream_is_first].node
        addition.node, addition.operand_node = trace.node, stream_node
        mark(result, trace)
        keep(result, ())

    def _group(self, before: Addition) -> list[_Kept]:
        """Return the operands of the additions of one stream, up to ``before``, if they are still what they were."""
        if not self._kept or self._kept[-1].addition is not before:
            return []
        tensors = [pair for member in self._kept for pair in (member.stream, *member.updates)]
        return self._kept if all(version(tensor) == seen for tensor, seen in tensors) else []

    def _take_gradient(self, tensor: Tensor, addition: Addition, column: str, *, in_place: bool) -> None:
        """Measure the gradient of ``tensor`` once, for every column that asks for it."""
        tensor = outermost(tensor) if column == "stream" else tensor
        geometry = None
        base = tensor._base if in_place and tensor._is_view() else None  # noqa: SLF001
        if base is not None:
            # What overwrites a view leads its gradient past the view, to the tensor below it.
            if not base.is_contiguous():
                return
            geometry = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()
            tensor = base
        if not tensor.requires_grad:
            return
        seen, slots = tensor.__dict__.get(_SLOTS, (None, []))
        if seen != version(tensor):  # a tensor that was changed in place is another one to autograd
            slots = []
            tensor.__dict__[_SLOTS] = (version(tensor), slots)

            def hook(gradient: Tensor | None) -> None:
                if gradient is None:  # nothing leads back to it: where all its readers are detached, autograd may still call
                    return
                norms: dict[Any, tuple[Tensor, Tensor]] = {}  # and what they are of
                for one, name, part in slots:
                    if not one.inner:
                        if part not in norms:
                            own = self.real(gradient if part is None else gradient.contiguous().as_strided(*part))
                            norms[part] = frobenius(own), own
                        one.gradients[name] = norms[part][0]
                        self.on_value(one, f"grad_{name}", 0, norms[part][1])

            tensor.register_hook(hook)
        slots.append((addition, column, geometry))


_SLOTS = "_propcheck_slots"
