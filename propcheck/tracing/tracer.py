"""Trace the forward pass of any model: find its residual additions by following tensors, and send what happens as events.

``Tracer`` is a ``TorchFunctionMode``. It marks the result of every function with a step of the graph (``propagation``), and
asks ``additions`` whether a sum is a residual addition. Module names serve only to say where a site is. It measures nothing:
listeners do (``events``).
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from propcheck.records import Doubling
from propcheck.tracing.addition_calls import fused_sum, sum_of
from propcheck.tracing.branches import ancestors
from propcheck.tracing.events import AdditionValues, AngleCall, FunctionCall, Listeners
from propcheck.tracing.function_mode import FunctionMode, Recomputation
from propcheck.tracing.graph import Addition, Update, is_stream, mark, signal_of, trace_of
from propcheck.tracing.graph_builder import GraphBuilder
from propcheck.tracing.module_hooks import ModuleHooks
from propcheck.tracing.op_names import FUSED, SILENT, TRIGONOMETRIC
from propcheck.tracing.propagation import look_up, propagate, propagate_unknown
from propcheck.tracing.residual_calls import added_values, residual_call
from propcheck.tracing.sites import Site, settle, sites_of
from propcheck.tracing.tensors import channels_last, tensors_in, version
from propcheck.tracing.update_parts import carry_parts, parts_of_sum, set_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from propcheck.tracing.addition_calls import Sum
    from propcheck.tracing.additions import Residual
    from propcheck.tracing.events import Listener
    from propcheck.tracing.function_mode import Runner
    from propcheck.tracing.module_hooks import ModuleCall


@dataclass(frozen=True, slots=True)
class _Added:
    """What a residual addition added, and the versions of these tensors: one that was changed since cannot be measured."""

    addition: Addition
    stream: Tensor
    updates: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @property
    def is_current(self) -> bool:
        """Whether no tensor was changed since."""
        return self.versions == tuple(map(version, (self.stream, *self.updates)))


class Tracer(FunctionMode):
    """Traces one forward pass of one model.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    listeners
        Receive the events.
    runners
        By function name: what runs that function instead, so that it can measure the gradient of its weight.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        listeners: Sequence[Listener] = (),
        runners: Mapping[str, Runner] = MappingProxyType({}),
    ) -> None:
        subscribed = Listeners(tuple(listeners))
        self._graph = GraphBuilder(names, subscribed)
        super().__init__(names, subscribed, runners, ModuleHooks(self._graph))
        self.hooks.on_return = self._module_returned
        self._additions: dict[int, tuple[Addition, bool]] = {}  # by number, and whether the first operand is the stream
        self._group: list[_Added] = []  # the last residual addition, and those before it to the same stream
        self._sites: list[Site] | None = None

    # ------------------------------------------------------------------ what the pass showed

    @property
    def sites(self) -> list[Site]:
        """The residual additions, once the pass is over."""
        if self._sites is None:
            self._sites = sites_of(self._in_order())
        return self._sites

    @property
    def roles(self) -> dict[str, str]:
        """The role of each parameter that met a signal."""
        stepped = frozenset().union(*(site.branch.parameters for site in self.sites if "decayed" in site.branch.features))
        return self._graph.roles | dict.fromkeys(self._graph.step_biases & stepped, "step_bias")

    @property
    def doublings(self) -> tuple[Doubling, ...]:
        """The additions that count the stream twice, once the pass is over."""
        streams = {site.stream.node for site in self.sites}  # a value that an update replaced begins a stream too
        return tuple(
            Doubling(next((site.number for site in self.sites if site.order > double.step), None), double.block, double.module)
            for double in self._graph.doubles
            if is_stream(double.stream.node) or double.stream.node in streams
        )

    def block_of(self, module: str | None) -> int | None:
        """Return the number of the block that a module is in."""
        return self.hooks.block_of(module)

    # ------------------------------------------------------------------ the pass

    def watch(self, model: nn.Module, blocks: Mapping[str, int] = MappingProxyType({})) -> list[Any]:
        """Register hooks on every module, to know where an operation happens, and return their handles.

        ``blocks`` are the numbers of the blocks by their paths.
        """
        return self.hooks.register(model, blocks)

    def begin(self, batch: Any) -> None:
        """Mark the float tensors that the model is called with: they are signals."""
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                mark(tensor, self._graph.begin("root"))

    def end(self, loss: Tensor) -> None:
        """End the forward pass: decide which additions are sites."""
        trace = trace_of(loss)
        settle(self._in_order(), None if trace is None else ancestors(trace))  # None: the loss could not be followed
        self.hooks.on_return = None  # modules run again in the backward pass
        for listener in self.listeners:
            listener.pass_ended(loss)

    @contextmanager
    def segment(self, block: int | None, listeners: Sequence[Listener] | None = None) -> Iterator[None]:
        """Run a part of the model in the block with this number, with other listeners if they are given."""
        saved = self.block, self.listeners.subscribed
        self.block = block
        if listeners is not None:
            self.listeners.subscribed = tuple(listeners)
        try:
            yield
        finally:
            self.block, self.listeners.subscribed = saved

    def recomputation(self, block: int | None, first: int, listeners: Sequence[Listener]) -> Recomputation:
        """Return the mode under which a part of the model is computed again; ``first`` is the number of its first addition."""
        return Recomputation(self, Listeners(tuple(listeners)), self._additions, first=first, block=block)

    def _in_order(self) -> list[Addition]:
        return [self._additions[number][0] for number in sorted(self._additions)]

    def _module_returned(
        self, call: ModuleCall, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        for value in tensors_in((output,)):
            trace = trace_of(value)
            if trace is None and value.requires_grad and id(value) not in self.names:
                parameters = [*module.parameters()]
                trace = propagate_unknown(self._graph, FunctionCall(module, "", args, kwargs), value, parameters)
                if trace is not None:
                    self._send_not_followed(call.path, f"the computation of {type(module).__name__} cannot be followed")
            # The module that made the last product wrote the branch, or the outermost module around it in the block.
            made_product = trace is not None and trace.kind == "signal" and trace.product > call.products
            if trace is not None and made_product and not call.is_block:
                mark(value, replace(trace, module=call.path))

    def _send_not_followed(self, module: str, reason: str) -> None:
        for listener in self.listeners:
            listener.not_followed(module, reason)

    # ------------------------------------------------------------------ functions

    def _addition(self, call: FunctionCall) -> Sum | None:
        return sum_of(call) or fused_sum(call, self._graph)

    def _compute(self, call: FunctionCall) -> Any:
        if call.name in TRIGONOMETRIC:
            self._send_angles(call)
        result = super()._compute(call)
        if call.name == "embedding":
            look_up(self._graph, call, result)
        elif call.name not in SILENT:
            if call.name in FUSED and call.module is not None:
                self._send_not_followed(call.module, f"runs as one fused function ({call.name})")
            propagate(self._graph, call, result)
            carry_parts(call, result)
        return result

    def _send_angles(self, call: FunctionCall) -> None:
        angles = call.args[-1] if call.args else call.kwargs["input"]
        trace, name = trace_of(angles), self.names.get(id(angles))
        names = [name, *(sorted(trace.parameters) if trace is not None else ())]
        dtypes = self._graph.dtypes
        parameters = tuple((name, dtypes[name]) for name in names if name is not None and name in dtypes)
        for listener in self.listeners:
            listener.angles(AngleCall(angles, parameters, call.module))

    # ------------------------------------------------------------------ additions

    def _add(self, call: FunctionCall, addition: Sum, number: int) -> Tensor:
        residual = residual_call(self._graph, call, addition)
        result: Tensor
        if residual is None:
            parts = parts_of_sum(addition)
            result = call.run()
            propagate(self._graph, call, result)
            set_parts(result, parts)
            return result
        new = self._new_addition(call, addition, residual)
        operands = self._send_operands(new, addition, stream_is_first=residual.stream_is_first)
        stream, updates = added_values(addition, residual)
        result = call.run()
        added = _Added(new, stream, updates, tuple(map(version, (stream, *updates))))
        self._send_values(added, residual, result)
        new.updates = [Update(trace, operands.update.dtype) for trace in residual.updates]
        self._additions[number] = new, residual.stream_is_first
        self._mark_sum(new, residual, result)
        self._send_total(operands, result)
        return result

    def _new_addition(self, call: FunctionCall, addition: Sum, residual: Residual) -> Addition:
        stream, _ = addition.stream_and_update(stream_is_first=residual.stream_is_first)
        trace = signal_of(stream)
        assert trace is not None
        if addition.scaled(stream_is_first=residual.stream_is_first) == "stream":
            trace = replace(trace, scalings=trace.scalings + 1)
        if residual.before is not None:
            trace = residual.before.stream
        self._sites = None
        channels = next((operand.channels for operand in residual.operands if operand.channels is not None), None)
        # An update that is added where the next block begins belongs to the block that made it.
        blocks = {self.block_of(update.module) for update in residual.updates}
        block = blocks.pop() if len(blocks) == 1 else None
        block = call.block if block is None else block
        return Addition(
            block,
            trace,
            tuple(channels_last(stream, channels).shape),
            stream.dtype,
            base=residual.base,
            channels=channels,
            since=None if block is None else self.hooks.since.get(block),
        )

    def _send_values(self, added: _Added, residual: Residual, total: Tensor) -> None:
        earlier = self._group if residual.before is not None and self._is_open(residual.before) else []
        if earlier:
            added.addition.before = residual.before
        self._group = [*earlier, added]
        before = tuple((other.addition, other.updates) for other in earlier)
        values = AdditionValues(added.addition, self._group[0].stream, added.updates, total, before)
        for listener in self.listeners:
            listener.addition(values)

    def _is_open(self, before: Addition) -> bool:
        """Whether the operands of the additions to one stream, up to ``before``, are still what they were."""
        return bool(self._group) and self._group[-1].addition is before and all(other.is_current for other in self._group)

    def _mark_sum(self, addition: Addition, residual: Residual, result: Tensor) -> None:
        operands = residual.operands if residual.stream_is_first else residual.operands[::-1]
        stream_node = operands[0].node
        assert stream_node is not None
        trace = self._graph.begin(
            "sum",
            carries=(stream_node,),
            parents=residual.operands,
            channels=addition.channels,
            product=max(operand.product for operand in operands),
        )
        assert trace.node is not None
        trace.node.addition = addition
        trace.node.update = operands[1].node
        addition.node, addition.operand_node = trace.node, stream_node
        mark(result, trace)
        set_parts(result, ())
