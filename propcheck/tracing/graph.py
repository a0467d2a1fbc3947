"""What is known of tensors on their way through a model: a graph of the steps that made them.

A **node** is a value of its own: a look-up, a float input, the result of a product, of an addition, or of several nodes
together. What views, norms, casts, scalings, dropout and activations make of it is a copy of the same node: residual streams
are known by what they carry, not by how it is scaled. A **factor** is a reduction over the last dimension on its way to
normalise something: ``rsqrt(mean(x^2) + eps)``. A **weight** was computed from parameters alone, like the gain 1 + w.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.measure.attention import AttentionStatistics
    from propcheck.measure.statistics import AdditionStatistics, NormStatistics
    from propcheck.records import NormKind

_NAME = "_propcheck_trace"


@dataclass(eq=False, slots=True)
class Norm:
    """One normalisation that was met; what was measured is 0-d and still on the device. Its gain may follow it."""

    number: int
    kind: NormKind
    dtype: torch.dtype  # in which the statistic was computed
    width: int
    module: str | None
    eps: float | None
    statistics: NormStatistics | None  # None within a transform of torch.func, whose tensors stand for many
    late: bool = False  # it divides what was computed from what it measures
    output_mean_square: Tensor | None = None  # after the gain, where that came by itself
    parameter: str | None = None
    gain_mean_square: Tensor | None = None


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """A value of its own, whatever copies of it exist.

    ``carries`` are the nodes of which it is a sum or a collection: the stream before an addition, the parts of a
    concatenation.
    """

    order: int
    kind: Literal["root", "product", "sum", "merge"]
    carries: tuple[Node, ...] = ()
    update: Node | None = None  # of a sum: what was added to what it carries
    factors: tuple[Trace, ...] = ()  # of an elementwise product
    addition: Addition | None = None  # that made it, if it may be a residual one
    normed: bool = False  # a norm read it
    read: bool = False  # a product or a norm read it
    weighed: bool = False  # a product with weights read it
    mixed: bool = False  # of a product: of activations with each other


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
    exponential: bool = False  # an exponential made it, or was added to
    step_size: bool = False  # it passed a softplus, and no exponential or product since
    gate: bool = False  # it was bounded by a sigmoid or the like since its node
    channels: int | None = None  # which dimension the channels are, where that is not the last: after a convolution
    same_as: int | None = None  # the step whose value, element by element, it has: of a view, a cast, a clone
    promoted: str | None = None  # what gave it a wider dtype since its node, though nothing cast it
    attention: AttentionStatistics | None = None  # of this step
    reduced: tuple[str, torch.dtype] | None = None  # of a factor: the reduction that it began with, and its dtype
    of: Node | None = None  # of a factor: what was reduced
    eps: float | None = None  # of a factor: the number that was added to it
    gain: Tensor | None = None  # of a factor: what was computed from parameters and multiplied into it

    @property
    def value(self) -> int:
        """The step that gave it its value: those of two copies are equal where their elements are."""
        return self.order if self.same_as is None else self.same_as


@dataclass(slots=True)
class Update:
    """One update of an addition: what was added, and what was measured."""

    trace: Trace
    dtype: torch.dtype
    statistics: AdditionStatistics


@dataclass(slots=True, eq=False, repr=False)
class Addition:
    """One addition that may be residual; tensors are 0-d and still on the device."""

    block: int | None
    stream: Trace
    shape: tuple[int, ...]  # with the channels last
    stream_dtype: torch.dtype
    updates: list[Update] = field(default_factory=list)
    node: Node | None = None  # the sum
    operand_node: Node | None = None  # of the stream as it was added to
    gate: bool = False  # it was bounded by a sigmoid or the like since its node
    channels: int | None = None  # which dimension they are, if not the last
    base: Node | None = None  # what the branches read; None if that is not the stream
    since: int | None = None  # the last step before its block
    before: Addition | None = None  # in a parallel block, the addition of another update of the same stream
    enclosed: bool = False  # it lies on the way to another one's update
    touched: bool = False  # and was used after that
    inner: bool = False  # it is part of another one's branch, and no site:
    settled: bool = False  # that is known at the end
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by "stream", "update", "sum"

    @property
    def first(self) -> Addition:
        """The first addition of the same stream."""
        return self if self.before is None else self.before.first


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


def gated(node: Node) -> list[Node]:
    """Return the streams of which a node is an elementwise product with something else: x (1 - g)."""
    return [one.node for one in node.factors if one.node is not None and is_stream(one.node)]


def is_stream(node: Node | None) -> bool:
    """Whether a node is where a stream may begin, a sum, or a collection of these."""
    return node is not None and (node.kind in ("root", "sum") or any(map(is_stream, node.carries)))


def contained(node: Node, oldest: int = 0) -> list[Node]:
    """Return what ``carried`` does and the updates that were added on the way, back to the order ``oldest``."""
    found = {node.order: node}
    pending = [node]
    while pending:
        last = pending.pop()
        for one in (*last.carries, *([last.update] if last.update is not None else [])):
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


_DRAWN = "_propcheck_drawn"


def is_drawn(tensor: Tensor) -> bool:
    """Whether a tensor was drawn at random in the forward pass, and is no signal: a mask."""
    return getattr(tensor, _DRAWN, False)


def mark_drawn(tensor: Tensor) -> None:
    """Say that a tensor was drawn at random, or computed from one that was."""
    setattr(tensor, _DRAWN, True)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a transform of ``torch.func``: it stands for many, and has no value yet."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001


_OUTER = "_propcheck_outer"


def stands_for(inner: Tensor, outer: Tensor) -> None:
    """Say that ``inner`` is what ``outer``, which others may read too, is: within a unit, or in another dtype."""
    setattr(inner, _OUTER, (outer, inner._version, outer._version))  # noqa: SLF001


def outermost(tensor: Tensor) -> Tensor:
    """Return the tensor for which ``tensor`` stands, if neither was changed since; else itself."""
    known = getattr(tensor, _OUTER, None)
    if known is None:
        return tensor
    outer, *versions = known
    same = versions == [tensor._version, outer._version]  # noqa: SLF001
    return outermost(outer) if same else tensor


def signal_of(value: Any) -> Trace | None:
    """Return the trace of a tensor that carries a signal."""
    trace = trace_of(value)
    return trace if trace is not None and trace.kind == "signal" else None
