"""What is known of tensors on their way through a model: a graph of the steps that made them.

A **node** is a value of its own: a look-up, a float input, the result of a product, of an addition, or of several nodes
together. What views, norms, casts, scalings, dropout and activations make of it is a copy of the same node: residual streams
are known by what they carry, not by how it is scaled. A **factor** is a reduction over the last dimension on its way to
normalise something: ``rsqrt(mean(x^2) + eps)``. A **weight** was computed from parameters alone, like the gain 1 + w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from propcheck.observe.additions import Addition
    from propcheck.records import Sublayer

_NAME = "_propcheck_trace"


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation that was met: its number, and the mean square of what it read (None when not measured)."""

    number: int
    input_mean_square: Tensor | None


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A value of its own, whatever copies of it exist.

    ``carries`` are the nodes of which it is a sum or a collection: the stream before an addition, the parts of a
    concatenation.
    """

    order: int
    kind: Literal["root", "product", "sum", "merge"]
    carries: tuple[Node, ...] = ()
    addition: Addition | None = None  # that made it, if it may be a residual one
    normed: bool = False  # a norm read it
    read: bool = False  # a product or a norm read it
    weighed: bool = False  # a product with weights read it


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Trace:
    """One step: the copy of a node that a tensor is, the steps that it came from, and what was met in this one."""

    kind: Literal["signal", "factor", "weight"]
    order: int
    node: Node | None = None  # of a signal
    parents: tuple[Trace, ...] = ()
    parameters: frozenset[str] = frozenset()  # met in this step; of a factor or weight: all that it came from
    features: frozenset[str] = frozenset()  # of this step: what tells the kinds of sublayer apart
    # Since the node:
    norm: Norm | None = None  # the last one
    scalings: int = 0  # by numbers
    ungained: bool = False  # it passed a norm whose gain, if there is one, is still to come
    # On the way to the node and since:
    product: int = 0  # number of the last product
    module: str | None = None  # the outermost module below the block that made it
    rooted: bool = False  # a factor passed a root, so it is a scale and not a mean
    routed: bool = False  # it came from a choice of experts, and met no product since
    step_size: bool = False  # it passed a softplus, and no exponential or product since
    channels: int | None = None  # which dimension the channels are, where that is not the last: after a convolution


@dataclass(frozen=True, slots=True)
class Branch:
    """What lies between the stream as a branch read it and the update that it wrote."""

    features: frozenset[str]
    parameters: frozenset[str]
    read_norm: Norm | None
    read_scalings: int
    written_norm: bool
    module: str | None
    inner: frozenset[Addition]  # additions on the way

    def sublayer(self) -> Sublayer:
        """Tell what kind of sublayer it is, from what it computed.

        softmax over products of activations: attention; a step size, softplus of something, that scales the input and whose
        exponential is the decay: a state-space model; products of activations without either: linear attention (the delta rule, kernel attention); a
        recurrence, convolution or other mixing of tokens without such products: a state-space model; a choice of experts:
        mixture of experts; else position-wise.
        """
        features = self.features
        if "softmax" in features and "mixed" in features:
            return "attention"
        if {"stepped", "decayed"} <= features:
            return "ssm"
        if "mixed" in features:
            return "linear_attention"
        if "routed" in features:
            return "moe"
        if "convolved" in features or "scanned" in features:
            return "ssm"
        return "mlp" if "weighed" in features else "other"


def trace_of(value: object) -> Trace | None:
    """Return what is known of a tensor, None if nothing is."""
    return getattr(value, _NAME, None)


def mark(tensor: Tensor, trace: Trace | None) -> None:
    """Say what is known of a tensor."""
    setattr(tensor, _NAME, trace)


def carried(node: Node, oldest: int = 0) -> list[Node]:
    """Return the nodes of which ``node`` is a sum or a collection, itself first, back to the order ``oldest``."""
    found = {node.order: node}
    pending = [node]
    while pending:
        for one in pending.pop().carries:
            if one.order >= oldest and one.order not in found:
                found[one.order] = one
                pending.append(one)
    return list(found.values())


def carried_since_addition(node: Node | None) -> list[Node]:
    """Return ``node`` and the nodes that were collected in it since an addition made them, newest first."""
    found: list[Node] = []
    pending = [node] if node is not None else []
    while pending:
        one = pending.pop()
        if one not in found:
            found.append(one)
            if one.addition is None:
                pending += one.carries
    return sorted(found, key=lambda one: -one.order)


@dataclass(frozen=True, slots=True)
class Path:
    """The steps between a node and an update, in order."""

    steps: list[Trace]  # all that were made for the update since the node
    through: list[Trace]  # those of them that were computed from the node

    @property
    def multiplies(self) -> bool:
        """Whether a product lies on the way from the node."""
        return any("product" in step.features for step in self.through)


def path(trace: Trace, base: Node | None) -> Path:
    """Return what lies between ``base`` and ``trace``, without the steps that made ``base`` itself.

    What was computed beside (keys of another stream, a table of biases) counts from the additions or look-ups on, and so does
    what came through an addition that is settled to be a site of its own (of the other half of a reversible stream). Without
    a base: the steps since the look-ups, inputs and sums that ``trace`` comes from.
    """

    def newer(one: Trace) -> list[Trace]:
        return [parent for parent in one.parents if base is None or parent.order > base.order or parent.node is base]

    reached: set[int] = set()
    if base is not None:
        for one in _walk(trace, newer):
            if one.node is base or any(parent.order in reached for parent in one.parents):
                reached.add(one.order)

    def until_others(one: Trace) -> list[Trace]:
        node = one.node
        if node is None or node.kind != "sum" or node.order != one.order or node is base:
            return newer(one)
        settled = node.addition is not None and node.addition.settled and not node.addition.inner
        return [] if settled or one.order not in reached else newer(one)

    steps = [one for one in _walk(trace, until_others) if base is None or one.order != base.order]
    return Path(steps, steps if base is None else [one for one in steps if one.order in reached])


def _walk(trace: Trace, onward: Callable[[Trace], list[Trace]]) -> list[Trace]:
    """Return ``trace`` and what ``onward`` leads to from it, in order."""
    found: dict[int, Trace] = {}
    pending = [trace]
    while pending:
        one = pending.pop()
        if one.order not in found:
            found[one.order] = one
            pending += onward(one)
    return [found[order] for order in sorted(found)]


def ancestors(trace: Trace) -> set[Node]:
    """Return every node from which ``trace`` was computed."""
    return {one.node for one in _walk(trace, lambda step: list(step.parents)) if one.node is not None}


def lineage(trace: Trace) -> set[int]:
    """Return the orders of the steps from a node to this copy of it."""
    own = _walk(trace, lambda step: [parent for parent in step.parents if parent.node is trace.node])
    return {one.order for one in own}


def branch(stream: Trace | None, update: Trace, found: Path, base: Node | None) -> Branch:
    """Describe the branch whose update is ``update``, from its path; ``stream`` is the stream's copy at the addition.

    ``base`` is the node of the stream that the branch read.

    What the stream itself passed before the addition (a norm after the last sum, positions) is not part of it.
    """
    own = lineage(stream) if stream is not None else set()
    inside = [step for step in found.steps if step.order not in own]
    readings = [
        parent
        for step in inside
        for parent in step.parents
        if base is not None and step.kind == "signal" and step.node is not base and parent.node is base
    ]
    return Branch(
        features=frozenset().union(*(step.features for step in inside)),
        parameters=frozenset().union(*(step.parameters for step in inside)),
        read_norm=next((one.norm for one in readings if one.norm is not None), None),
        read_scalings=max((one.scalings for one in readings), default=0),
        written_norm=update.norm is not None,
        module=update.module,
        inner=frozenset(step.node.addition for step in found.through if step.node not in (None, base) and step.node.addition),
    )


def signal_of(value: Any) -> Trace | None:
    """Return the trace of a tensor that carries a signal."""
    trace = trace_of(value)
    return trace if trace is not None and trace.kind == "signal" else None
