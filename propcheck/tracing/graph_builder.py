"""Make the steps and nodes of the graph, numbered in the order in which they are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from propcheck.tracing.graph import Double, Node, Trace, carried_since_addition, touch, trace_of
from propcheck.tracing.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from propcheck.tracing.events import FunctionCall, Listeners


@dataclass(frozen=True, slots=True)
class Operation:
    """A function call with what its operands carry.

    Attributes
    ----------
    signals
        The operands that carry a signal, without indices and masks where others are left.
    factors
        The traces of operands that normalise.
    weights
        Operands that are parameters, or were computed from parameters alone, with the names of these.
    parents
        The traces of all signals and factors.
    """

    call: FunctionCall
    result: Any
    signals: tuple[tuple[Tensor, Trace], ...]
    factors: tuple[Trace, ...] = ()
    weights: tuple[tuple[Tensor, frozenset[str]], ...] = ()
    parents: tuple[Trace, ...] = ()

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.call.name

    @property
    def parameters(self) -> frozenset[str]:
        """Names of all parameters among the weights."""
        return frozenset().union(*(names for _, names in self.weights))

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The traces of the signals."""
        return tuple(trace for _, trace in self.signals)

    @property
    def latest(self) -> tuple[Tensor, Trace]:
        """The signal that passed the last product."""
        return max(self.signals, key=lambda signal: signal[1].product)

    @property
    def spans_nodes(self) -> bool:
        """Whether the signals are of more than one node."""
        return len({id(trace.node) for trace in self.traces}) > 1

    @property
    def ungained(self) -> bool:
        """Whether a signal passed a norm whose gain is still to come."""
        return any(trace.ungained for trace in self.traces)


class GraphBuilder:
    """Numbers steps and products, and keeps what the graph shows about parameters and norms.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    listeners
        Receive norms and attentions.

    Attributes
    ----------
    module
        The innermost module that runs.
    roles
        The role of each parameter that met a signal.
    step_biases
        Parameters that were added before a softplus.
    dtypes
        Of the parameters and buffers that were used.
    doubles
        The additions that may count the stream twice.
    """

    def __init__(self, names: Mapping[int, str], listeners: Listeners) -> None:
        self.names, self.listeners = names, listeners
        self.module: str | None = None
        self.steps = 0
        self.products = 0
        self.norms = 0
        self.roles: dict[str, str] = {}
        self.step_biases: set[str] = set()
        self.dtypes: dict[str, torch.dtype] = {}
        self.doubles: list[Double] = []

    def begin(
        self,
        kind: Literal["root", "product", "sum", "merge"],
        *,
        carries: tuple[Node, ...] = (),
        factors: tuple[Trace, ...] = (),
        **fields: Any,
    ) -> Trace:
        """Return the first step of a new node."""
        self.steps += 1
        return Trace("signal", self.steps, Node(self.steps, kind, carries, factors=factors), **fields)

    def copy(self, operation: Operation, features: frozenset[str] = frozenset(), **changes: Any) -> Trace:
        """Return a step that copies the node of its operand."""
        _, trace = operation.latest
        self.steps += 1
        fields: dict[str, Any] = {
            "node": trace.node,
            "parents": operation.parents,
            "parameters": operation.parameters,
            "features": features,
            "norm": next((signal.norm for signal in operation.traces if signal.norm is not None), None),
            "scalings": trace.scalings,
            "ungained": operation.ungained,
            "product": trace.product,
            "module": trace.module,
            "routed": trace.routed,
            "gate": trace.gate,
            "step_size": trace.step_size,
            "promoted": trace.promoted if isinstance(operation.result, Tensor) else None,
        }
        return Trace("signal", self.steps, **fields | changes)

    def factor(self, operation: Operation, **fields: Any) -> Trace:
        """Return a step of a factor."""
        self.steps += 1
        return Trace("factor", self.steps, parents=operation.parents, parameters=operation.parameters, **fields)

    def merge(
        self,
        operation: Operation,
        features: frozenset[str] = frozenset(),
        *,
        carries: Iterable[Trace] = (),
        factors: tuple[Trace, ...] = (),
        keeps_routing: bool = True,
    ) -> Trace:
        """Return a node made of several: ``carries`` if it is a sum or collection of them, ``factors`` if their product."""
        traces = operation.traces
        # A gate did not write the branch.
        last = max([trace for trace in traces if not trace.gate] or traces, key=lambda trace: trace.product)
        return self.begin(
            "merge",
            carries=tuple({id(trace.node): trace.node for trace in carries if trace.node is not None}.values()),
            factors=factors,
            parents=operation.parents,
            parameters=operation.parameters,
            features=features,
            product=last.product,
            module=last.module,
            routed=keeps_routing and any(trace.routed for trace in traces),
        )

    def product(self, operation: Operation, *kinds: str) -> Trace:
        """Return the result of a matrix product, an attention, a convolution or a recurrence, with its ``kinds``."""
        self.products += 1
        weighed = bool(operation.parameters)
        for trace in operation.traces:
            for node in _nodes_read(trace):
                node.read = True
                node.weighed |= weighed
        features = {"product", *kinds}
        if weighed:
            features.add("weighed")
        if len(operation.signals) > 1 and not features & {"scanned", "softmax"}:
            # A product with a choice of experts sends tokens to them; it does not mix tokens.
            features.add("routed" if any(trace.routed for trace in operation.traces) else "mixed")
        made = self.begin(
            "product",
            parents=operation.parents,
            parameters=operation.parameters,
            features=frozenset(features),
            product=self.products,
            module=self.module,
        )
        assert made.node is not None
        made.node.mixed = "mixed" in features
        return made

    def operation(self, call: FunctionCall, result: Any, operands: Iterable[Tensor]) -> Operation:
        """Sort the operands of a call by what they carry."""
        signals: list[tuple[Tensor, Trace]] = []
        factors: list[Trace] = []
        weights: list[tuple[Tensor, frozenset[str]]] = []
        for operand in operands:
            trace = trace_of(operand)
            parameter = self.names.get(id(operand))
            if parameter is not None:
                weights.append((operand, frozenset({parameter})))
                self.dtypes[parameter] = operand.dtype
            elif trace is not None and trace.kind == "signal":
                signals.append((operand, trace))
            elif trace is not None:
                weights.append((operand, trace.parameters))
                if trace.kind == "factor":
                    factors.append(trace)
        parents = (*(trace for _, trace in signals), *factors)
        touch(trace for _, trace in signals)
        # Indices and masks say where, not what.
        floating = [signal for signal in signals if signal[0].is_floating_point()]
        return Operation(call, result, tuple(floating or signals), tuple(factors), tuple(weights), parents)

    def recent_biases(self, trace: Trace) -> frozenset[str]:
        """Return the biases that were added last: since the node of ``trace``, or in the product that made it."""
        while True:
            biases = frozenset(name for name in trace.parameters if self.roles.get(name) == "bias")
            before = [parent for parent in trace.parents if parent.node is trace.node and trace.node is not None]
            if biases or not before:
                return biases
            trace = before[0]

    def source_of(self, tensor: Tensor) -> str:
        """Name the parameters that a tensor is or was computed from, for a message."""
        trace = trace_of(tensor)
        origin = ", ".join(sorted(trace.parameters)) if trace is not None and trace.kind == "weight" else ""
        return self.names.get(id(tensor)) or origin or "a tensor"


def operands_of(call: FunctionCall) -> list[Tensor]:
    """Return the tensors among the arguments of a call."""
    return tensors_in((*call.args, *call.kwargs.values()))


def _nodes_read(trace: Trace) -> list[Node]:
    """Return the nodes that a product reads: its operand's, what that collects, and what that is a product of."""
    nodes: list[Node] = []
    pending = [trace]
    while pending:
        last = pending.pop()
        if last.node is None or last.node in nodes:
            continue
        nodes += [node for node in carried_since_addition(last.node) if node not in nodes]
        if last.node.kind == "merge":
            pending += last.node.factors
    return nodes
