"""Which additions are residual: what is the stream and what the update, decided as they happen and settled at the end.

An addition is residual if one operand, the update, was computed from the other, the stream, by way of a product; or if it
joins a stream that has had such additions with a product of something else. Where an addition closes over others that led
only to its update (an adapter before a mixer, the state of a recurrence), those are inside its branch and no sites. In a
parallel block the updates of one stream are added one after another, or summed first: each is a site, with the stream that
it read and the joint sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.tracing.branches import Branch, Path, branch, path, walk
from propcheck.tracing.graph import Addition, Node, Trace, carried, carried_since_addition, contained, gated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from propcheck.measure.statistics import AdditionStatistics


@dataclass(frozen=True, slots=True)
class Residual:
    """How an addition is residual: which operand is the stream, and the branches of the update's parts."""

    stream_is_first: bool
    stream: Trace  # as the branches found it
    updates: tuple[Trace, ...]  # the update, or its parts
    operands: tuple[Trace, Trace]  # of the sum
    base: Node | None  # what the branches read; None if that is not the stream
    before: Addition | None = None  # with which it shares the stream


def residual(first: Trace, second: Trace, parts: Mapping[Trace, Sequence[Trace]], block: int | None) -> Residual | None:
    """Tell whether the sum of two tensors of one shape is a residual addition, and how.

    Parameters
    ----------
    first, second
        Traces of the operands.
    parts
        Of operands that are sums of updates of different kinds: the traces of those.
    block
        Where it happens.
    """
    if first.node is None or second.node is None or first.node is second.node:
        return None
    pairs = [(first, second), (second, first)]
    if second.node.order < first.node.order:
        pairs.reverse()
    # A stream, the older one as a rule, and something that was computed from it.
    for stream, update in pairs:
        own = carried(_node(update))
        if len(own) > 1 and set(own) & set(carried(_node(stream))):
            return None  # two streams from one origin: a long skip, the halves of a reversible one
        for base in (*carried_since_addition(stream.node), *gated(_node(stream))):
            if base not in contained(_node(update), base.order) and (found := path(update, base)).multiplies:
                return _closed(stream, update, base, (first, second), found, parts, block)
    # A stream, and something that was computed from what it was before its last additions, or from something else.
    for stream, update in pairs:
        last = last_addition(stream.node)
        if (
            last is None
            or not update.product
            or last_addition(update.node) is not None
            or update.node in carried(_node(stream))
        ):
            continue
        if last.updates and last.updates[-1].trace.product == update.product:
            continue  # another part of the update that was added last
        before = last.first
        if before.base is not None and last.node is stream.node and not _node(stream).read:
            found = path(update, before.base)
            if found.multiplies:
                return _closed(before.stream, update, before.base, (first, second), found, parts, block, before=last)
        return Residual(stream is first, stream, tuple(parts.get(update, (update,))), (first, second), None)
    return None


def _node(trace: Trace) -> Node:
    assert trace.node is not None
    return trace.node


def _closed(
    stream: Trace,
    update: Trace,
    base: Node,
    operands: tuple[Trace, Trace],
    found: Path,
    parts: Mapping[Trace, Sequence[Trace]],
    block: int | None,
    *,
    before: Addition | None = None,
) -> Residual:
    updates = tuple(parts.get(update, ()))
    branches = [branch(stream, one, path(one, base), base) for one in updates]
    if len({_family(one) for one in branches}) < 2:  # one update: experts and shared experts, a layer and its adapter
        updates, branches = (update,), [branch(stream, update, found, base)]
    for one in branches:
        # A branch lies in one block; what spans several is a stream of its own, within a longer skip.
        if all(inner.block in (block, None) for inner in one.inner):
            for inner in one.inner - {before}:
                inner.enclosed, inner.touched = True, False
    return Residual(update is operands[1], stream, updates, operands, base, before)


def counted_twice(first: Trace, second: Trace) -> bool:
    """Whether the sum of two tensors counts one twice: it is added to itself, or again to a sum that it is in."""
    if first.value == second.value:
        return True
    for stream, whole in ((first, second), (second, first)):
        addition = None if whole.node is None or whole.value != whole.node.order else whole.node.addition
        if addition is not None and addition.stream.value == stream.value and not addition.stream.scalings > stream.scalings:
            return True
    return False


def different_kinds(first: Trace, second: Trace) -> bool:
    """Whether the sum of two tensors may be of two updates: one mixes tokens and the other does not, or in another way."""
    if first.node is None or second.node is None or not (first.product and second.product):
        return False
    if last_addition(first.node) is not None or last_addition(second.node) is not None:
        return False
    kinds = [_family(branch(None, one, path(one, None), None)) for one in (first, second)]
    return kinds[0] != kinds[1]


def _family(one: Branch) -> str:
    kind = one.sublayer()
    return kind if kind in ("attention", "linear_attention", "ssm") else "position-wise"


def last_addition(node: Node | None, *, kept: bool = False) -> Addition | None:
    """Return the last addition whose sum a node carries; if ``kept``, the last that is in no other one's branch."""
    pending = [node] if node is not None else []
    found: list[Addition] = []
    while pending:
        one = pending.pop()
        if one.addition is not None and not (kept and one.addition.inner):
            found.append(one.addition)
        else:
            pending += one.carries
    return max(found, key=lambda one: one.node.order if one.node is not None else 0, default=None)


@dataclass(slots=True)
class Site:
    """What was seen of one update at a residual addition."""

    number: int
    block: int | None
    branch: Branch
    stream: Trace
    shape: tuple[int, ...]
    stream_dtype: torch.dtype
    update_dtype: torch.dtype
    statistics: AdditionStatistics
    gradients: dict[str, Tensor]
    continues: int | None  # the site whose sum the stream is; None where the stream begins
    followed: bool  # another addition continues the stream
    normed: bool  # the sum passed a norm before the stream was read again
    order: int  # of the step that made the sum


def settle(additions: Sequence[Addition], used: set[Node] | None) -> None:
    """Decide which additions are inside another one's branch.

    Parameters
    ----------
    additions
        In order.
    used
        What the loss was computed from; None where that is not known.
    """
    following: dict[Addition, list[Addition]] = {}
    for one in additions:
        previous = _continued(one)
        if previous is not None:
            following.setdefault(previous, []).append(one)
    for one in reversed(additions):
        after = following.get(one, [])
        assert one.node is not None
        # What encloses it used it last; or what used it after that is inside a branch itself: a state handed from layer to
        # layer beside the stream.
        one.inner = one.enclosed and (not one.touched or (bool(after) and all(other.inner for other in after)))
    # A stream is read through weights; the keys of an attention, on the way to another update, are not.
    unweighed = [chain for chain in _chains(additions) if _is_read(chain) and not _is_read(chain, weighed=True)]
    for one in _passed_on(unweighed, additions):
        one.inner = True
    for one in additions:
        one.settled = True
        if used is not None and one.node not in used:  # the last state of a recurrence
            assert one.node is not None
            earlier = _continued(one)
            one.inner |= not one.node.read or (earlier is not None and earlier.inner)


def _continued(one: Addition) -> Addition | None:
    """Return the last addition whose sum an addition was made to; of a gated stream, that of the stream before its gate."""
    return last_addition(one.operand_node) or last_addition(one.base)


def _is_read(chain: Sequence[Addition], *, weighed: bool = False) -> bool:
    nodes = [one.node for one in chain if one.node is not None]
    return any(node.weighed if weighed else node.read for node in nodes)


def _passed_on(chains: Sequence[Sequence[Addition]], additions: Sequence[Addition]) -> list[Addition]:
    """Return the additions of those chains from which the update of an addition beside them was computed."""
    bits = {one.node: 1 << index for index, chain in enumerate(chains) for one in chain if one.node is not None}
    if not bits:
        return []
    from_chains: dict[int, int] = {}  # by step: of which chains
    for step in walk([update.trace for one in additions for update in one.updates]):
        found = bits.get(step.node, 0) if step.node is not None else 0
        for parent in step.parents:
            found |= from_chains.get(parent.order, 0)
        from_chains[step.order] = found
    reached = 0
    for one in additions:
        own = bits.get(one.node, 0) if one.node is not None else 0
        for update in one.updates:
            reached |= from_chains.get(update.trace.order, 0) & ~own
    return [one for index, chain in enumerate(chains) if reached >> index & 1 for one in chain]


def _chains(additions: Sequence[Addition]) -> list[list[Addition]]:
    """Return the additions of each stream together."""
    chains: dict[Addition, list[Addition]] = {}
    for one in additions:
        previous = _continued(one)
        chain = chains[previous] if previous is not None else []
        chain.append(one)
        chains[one] = chain
    return list({id(chain): chain for chain in chains.values()}.values())


def sites(additions: Sequence[Addition]) -> list[Site]:
    """Return the sites among ``additions``, numbered in order."""
    found: list[Site] = []
    kept = [one for one in additions if not one.inner]
    last: dict[Addition, Addition] = {one.first: one for one in kept}  # of a parallel block
    numbers: dict[Addition, int] = {}  # of the last site of each
    before: dict[Addition, Addition | None] = {one: _previous(one.first) for one in kept}
    following: dict[Addition, list[Addition]] = {}
    for one, previous in before.items():
        if previous is not None:
            following.setdefault(previous, []).append(one)
    for one in kept:
        whole, previous = last[one.first], before[one]
        after = following.get(whole, [])
        normed = (
            any(other.stream.norm is not None for other in after) if after else whole.node is not None and whole.node.normed
        )
        gradients = one.gradients
        if one.before is not None or whole is not one:
            gradients = {**gradients, **{key: value for key, value in _shared(one.first, whole).items() if value is not None}}
        base = one.base
        for update in one.updates:
            found.append(
                Site(
                    number=len(found),
                    block=one.block,
                    branch=branch(one.stream if base else None, update.trace, path(update.trace, base, one.since), base),
                    stream=one.stream,
                    shape=one.shape,
                    stream_dtype=one.stream_dtype,
                    update_dtype=update.dtype,
                    statistics=update.statistics,
                    gradients=dict(gradients),
                    continues=None if previous is None else numbers.get(previous),
                    followed=bool(after),
                    normed=normed,
                    order=one.node.order if one.node is not None else 0,
                )
            )
        numbers[one] = len(found) - 1
    return found


def _previous(one: Addition) -> Addition | None:
    """Return the addition whose sum an addition continues."""
    found = last_addition(one.stream.node, kept=True)
    return found if found is not None or one.base is None else last_addition(one.base, kept=True)


def _shared(first: Addition, last: Addition) -> dict[str, Tensor | None]:
    """Return the gradients that all updates of one stream have in common."""
    return {"stream": first.gradients.get("stream"), "sum": last.gradients.get("sum")}
