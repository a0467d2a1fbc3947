"""Decide whether an addition is residual, as it happens: which operand is the stream and which the update.

An addition is residual if one operand, the update, was computed from the other, the stream, through a product; or if it joins
a stream that had such additions with a product of something else. Additions that lead only to the update of another one (an
adapter before a mixer, the state of a recurrence) are inside its branch and are no sites. In a parallel block the updates of
one stream are added one after another, or summed first: each is a site, with the stream that it read and the joint sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.tracing.branches import branch, path
from propcheck.tracing.graph import Addition, Node, Trace, carried, carried_since_addition, contained, gated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from propcheck.tracing.branches import Branch, Path


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual addition: which operand is the stream, and the branches of the parts of its update."""

    stream_is_first: bool
    stream: Trace  # as the branches read it
    updates: tuple[Trace, ...]  # the update, or its parts
    operands: tuple[Trace, Trace]  # of the sum
    base: Node | None  # what the branches read; None if that is not the stream
    before: Addition | None = None  # an addition to the same stream


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pair of operands, tried as stream and update.

    ``parts`` are the traces of the parts of operands that are sums of updates of different kinds.
    """

    stream: Trace
    update: Trace
    stream_node: Node
    update_node: Node
    operands: tuple[Trace, Trace]
    parts: Mapping[Trace, Sequence[Trace]]
    block: int | None

    def shares_origin(self) -> bool:
        """Whether both are streams from one origin: a long skip, or the halves of a reversible model."""
        carried_by_update = carried(self.update_node)
        return len(carried_by_update) > 1 and bool(set(carried_by_update) & set(carried(self.stream_node)))

    def bases(self) -> Iterator[Node]:
        """Yield the nodes of the stream that the update may have been computed from."""
        for base in (*carried_since_addition(self.stream_node), *gated(self.stream_node)):
            if base not in contained(self.update_node, base.order):
                yield base

    def residual(self, base: Node, route: Path, *, before: Addition | None = None) -> Residual:
        """Return the residual addition whose update was computed from ``base`` by way of ``route``."""
        updates = tuple(self.parts.get(self.update, ()))
        stream = self.stream if before is None else before.first.stream
        branches = [branch(stream, update, path(update, base), base) for update in updates]
        if len({_family(part) for part in branches}) < 2:  # one update: experts and shared experts, a layer and its adapter
            updates, branches = (self.update,), [branch(stream, self.update, route, base)]
        _enclose(branches, self.block, before)
        return Residual(self.update is self.operands[1], stream, updates, self.operands, base, before)

    def joined(self) -> Residual | None:
        """Return the addition to a stream of an update that was computed from an older stream, or from something else."""
        last = last_addition(self.stream_node)
        if (
            last is None
            or not self.update.product
            or last_addition(self.update_node) is not None
            or self.update_node in carried(self.stream_node)
            or (last.updates and last.updates[-1].trace.product == self.update.product)  # a part of the last update
        ):
            return None
        base = last.first.base
        if base is not None and last.node is self.stream_node and not self.stream_node.read:
            route = path(self.update, base)
            if route.multiplies:
                return self.residual(base, route, before=last)
        updates = tuple(self.parts.get(self.update, (self.update,)))
        return Residual(self.stream is self.operands[0], self.stream, updates, self.operands, None)


def find_residual(first: Trace, second: Trace, parts: Mapping[Trace, Sequence[Trace]], block: int | None) -> Residual | None:
    """Return how the sum of two tensors is a residual addition; None if it is not.

    Parameters
    ----------
    first, second
        Traces of the operands.
    parts
        The traces of the parts of operands that are sums of updates of different kinds.
    block
        Number of the block that runs.
    """
    if first.node is None or second.node is None or first.node is second.node:
        return None
    operands = first, second
    candidates = [
        _Candidate(first, second, first.node, second.node, operands, parts, block),
        _Candidate(second, first, second.node, first.node, operands, parts, block),
    ]
    if second.node.order < first.node.order:  # the stream is the older one as a rule
        candidates.reverse()
    for candidate in candidates:
        if candidate.shares_origin():
            return None
        for base in candidate.bases():
            if (route := path(candidate.update, base)).multiplies:
                return candidate.residual(base, route)
    return next(filter(None, (candidate.joined() for candidate in candidates)), None)


def _enclose(branches: Sequence[Branch], block: int | None, before: Addition | None) -> None:
    """Note the additions inside of branches that lie in one block; what spans several is a stream within a longer skip."""
    for part in branches:
        if all(addition.block in (block, None) for addition in part.inner):
            for addition in part.inner - {before}:
                addition.enclosed, addition.touched = True, False


def counted_twice(first: Trace, second: Trace) -> bool:
    """Whether a sum counts a tensor twice: it is added to itself, or to a sum that it is already in."""
    if first.value == second.value:
        return True
    for stream, total in ((first, second), (second, first)):
        addition = None if total.node is None or total.value != total.node.order else total.node.addition
        if addition is not None and addition.stream.value == stream.value and not addition.stream.scalings > stream.scalings:
            return True
    return False


def different_kinds(first: Trace, second: Trace) -> bool:
    """Whether a sum may be of two updates: one mixes tokens and the other does not, or in another way."""
    if first.node is None or second.node is None or not (first.product and second.product):
        return False
    if last_addition(first.node) is not None or last_addition(second.node) is not None:
        return False
    families = [_family(branch(None, update, path(update, None), None)) for update in (first, second)]
    return families[0] != families[1]


def _family(part: Branch) -> str:
    kind = part.sublayer()
    return kind if kind in ("attention", "linear_attention", "ssm") else "position-wise"


def last_addition(node: Node | None, *, outer: bool = False) -> Addition | None:
    """Return the last addition whose sum a node carries; with ``outer``, the last that is in no other one's branch."""
    pending = [node] if node is not None else []
    additions: list[Addition] = []
    while pending:
        last = pending.pop()
        if last.addition is not None and not (outer and last.addition.inner):
            additions.append(last.addition)
        else:
            pending += last.carries
    return max(additions, key=lambda addition: addition.node.order if addition.node is not None else 0, default=None)
