"""The graph that the tracer records: what each tensor of the forward pass was computed from.

A **node** is a new value: a lookup, a float input, the result of a matrix product or an addition, or several nodes combined.
Views, norms, casts, scalings, dropout and activations give a copy of the same node, so a residual stream is recognised by what
it carries, however it is scaled. A **factor** is a reduction over the last dimension that will normalise something:
``rsqrt(mean(x^2) + eps)``. A **weight** was computed from parameters alone, for example the gain 1 + w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor

    from propcheck.records import NormKind

_TRACE = "_propcheck_trace"


@dataclass(eq=False, slots=True)
class Norm:
    """One normalisation, as recognised. Its gain may be applied later."""

    number: int
    kind: NormKind
    dtype: torch.dtype  # in which the statistic was computed
    width: int
    module: str | None
    eps: float | None
    late: bool = False  # it divides a value computed from the tensor whose statistic it takes: linear(x) / rms(x)
    parameter: str | None = None  # its gain


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A value, whatever copies of it exist.

    ``carries`` are the nodes of which it is a sum or a collection: the stream before an addition, the parts of a
    concatenation.
    """

    order: int
    kind: Literal["root", "product", "sum", "merge"]
    carries: tuple[Node, ...] = ()
    update: Node | None = None  # of a sum: what was added to the nodes it carries
    factors: tuple[Trace, ...] = ()  # of an elementwise product
    addition: Addition | None = None  # the addition that made it, if that may be residual
    normed: bool = False  # a norm read it
    read: bool = False  # a product or a norm read it
    weighed: bool = False  # a product with weights read it
    mixed: bool = False  # of a product: both operands are activations


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Trace:
    """One step: the node that a tensor is a copy of, the steps it came from, and what happened in this step."""

    kind: Literal["signal", "factor", "weight"]
    order: int
    node: Node | None = None  # of a signal
    parents: tuple[Trace, ...] = ()
    parameters: frozenset[str] = frozenset()  # used in this step; of a factor or weight: all that it came from
    features: frozenset[str] = frozenset()  # of this step: they identify the kind of sublayer
    is_attention: bool = False  # this step is an attention whose logits can be measured
    # Since the node:
    norm: Norm | None = None  # the last one
    scalings: int = 0  # multiplications by a number
    ungained: bool = False  # it passed a norm whose gain, if there is one, is still to come
    # On the way to the node and since:
    product: int = 0  # number of the last product
    module: str | None = None  # the outermost module below the block that made that product
    rooted: bool = False  # a factor passed a root, so it is a scale and not a mean
    routed: bool = False  # it came from a choice of experts and passed no product since
    exponential: bool = False  # an exponential made it, or was added to
    step_size: bool = False  # it passed a softplus, and no exponential or product since
    gate: bool = False  # it was bounded by a sigmoid or similar since its node
    channels: int | None = None  # the dimension of the channels if that is not the last: after a convolution
    same_as: int | None = None  # the step with the same elements: of a view, a cast, a clone
    promoted: str | None = None  # what gave it a wider dtype since its node, without a cast
    reduced: tuple[str, torch.dtype] | None = None  # of a factor: the reduction that it began with, and its dtype
    of: Node | None = None  # of a factor: the node that was reduced
    eps: float | None = None  # of a factor: the number that was added to it
    gain: Tensor | None = None  # of a factor: the tensor computed from parameters that it was multiplied with

    @property
    def value(self) -> int:
        """The step that gave it its value; two copies with the same step have equal elements."""
        return self.order if self.same_as is None else self.same_as


@dataclass(slots=True)
class Update:
    """One update of an addition."""

    trace: Trace
    dtype: torch.dtype


@dataclass(slots=True, eq=False, repr=False)
class Addition:
    """One addition that may be residual."""

    block: int | None
    stream: Trace
    shape: tuple[int, ...]  # with the channels last
    stream_dtype: torch.dtype
    updates: list[Update] = field(default_factory=list)
    node: Node | None = None  # the sum
    operand_node: Node | None = None  # of the stream operand
    channels: int | None = None  # the dimension of the channels, if not the last
    base: Node | None = None  # what the branches read; None if that is not the stream
    since: int | None = None  # the last step before its block
    before: Addition | None = None  # in a parallel block: the previous addition to the same stream
    enclosed: bool = False  # its sum leads to the update of another addition
    touched: bool = False  # its sum was used after that
    inner: bool = False  # it is part of another addition's branch, so it is no site
    settled: bool = False  # ``inner`` is final

    @property
    def first(self) -> Addition:
        """The first addition to the same stream."""
        return self if self.before is None else self.before.first


@dataclass(frozen=True, slots=True)
class Double:
    """An addition that may count the stream twice; ``step`` is the last one before it."""

    stream: Trace
    step: int
    block: int | None
    module: str | None


def trace_of(value: object) -> Trace | None:
    """Return the trace of a tensor, None if it has none."""
    return getattr(value, _TRACE, None)


def signal_of(value: Any) -> Trace | None:
    """Return the trace of a tensor that carries a signal, None for any other."""
    trace = trace_of(value)
    return trace if trace is not None and trace.kind == "signal" else None


def mark(tensor: Tensor, trace: Trace | None) -> None:
    """Attach a trace to a tensor."""
    setattr(tensor, _TRACE, trace)


def touch(traces: Iterable[Trace]) -> None:
    """Note that values are used: one used after an addition that seemed to enclose it continues outside of that branch."""
    for trace in traces:
        if trace.node is not None and trace.node.addition is not None:
            trace.node.addition.touched = True


def carried(node: Node, oldest: int = 0) -> list[Node]:
    """Return ``node`` and the nodes of which it is a sum or a collection, back to the order ``oldest``."""
    nodes = {node.order: node}
    pending = [node]
    while pending:
        for parent in pending.pop().carries:
            if parent.order >= oldest and parent.order not in nodes:
                nodes[parent.order] = parent
                pending.append(parent)
    return list(nodes.values())


def gated(node: Node) -> list[Node]:
    """Return the streams of which a node is an elementwise product with something else: x (1 - g)."""
    return [factor.node for factor in node.factors if factor.node is not None and is_stream(factor.node)]


def is_stream(node: Node | None) -> bool:
    """Whether a stream may begin at a node: it is a lookup or input, a sum, or a collection of these."""
    return node is not None and (node.kind in ("root", "sum") or any(map(is_stream, node.carries)))


def contained(node: Node, oldest: int = 0) -> list[Node]:
    """Return the nodes that ``carried`` returns and the updates that were added to them, back to the order ``oldest``."""
    nodes = {node.order: node}
    pending = [node]
    while pending:
        last = pending.pop()
        for parent in (*last.carries, *([last.update] if last.update is not None else [])):
            if parent.order >= oldest and parent.order not in nodes:
                nodes[parent.order] = parent
                pending.append(parent)
    return list(nodes.values())


def carried_since_addition(node: Node | None) -> list[Node]:
    """Return ``node`` and the nodes collected in it since the last additions, newest first."""
    nodes: list[Node] = []
    pending = [node] if node is not None else []
    while pending:
        last = pending.pop()
        if last not in nodes:
            nodes.append(last)
            if last.addition is None:
                pending += last.carries
    return sorted(nodes, key=lambda parent: -parent.order)


_DRAWN = "_propcheck_drawn"


def is_drawn(tensor: Tensor) -> bool:
    """Whether a tensor was drawn at random in the forward pass and is no signal: a mask."""
    return getattr(tensor, _DRAWN, False)


def mark_drawn(tensor: Tensor) -> None:
    """Mark a tensor as drawn at random, or as computed from one that was."""
    setattr(tensor, _DRAWN, True)


_ORIGINAL = "_propcheck_original"


def stands_for(tensor: Tensor, original: Tensor) -> None:
    """Note that ``tensor`` is ``original`` inside a unit or in another dtype; other code may read ``original`` too."""
    setattr(tensor, _ORIGINAL, (original, tensor._version, original._version))  # noqa: SLF001


def outermost(tensor: Tensor) -> Tensor:
    """Return the original that ``tensor`` stands for, if neither was changed since; else ``tensor`` itself."""
    link = getattr(tensor, _ORIGINAL, None)
    if link is None:
        return tensor
    original, *versions = link
    unchanged = versions == [tensor._version, original._version]  # noqa: SLF001
    return outermost(original) if unchanged else tensor
