"""Decide at the end of a pass which additions are sites, and describe each one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.tracing.additions import last_addition
from propcheck.tracing.branches import Branch, branch, path, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from propcheck.tracing.graph import Addition, Node, Trace


@dataclass(slots=True)
class Site:
    """One update of a residual addition."""

    number: int
    addition: Addition
    part: int  # which of the updates of the addition
    last: Addition  # the last addition to the same stream: this one, or a later one of a parallel block
    block: int | None
    branch: Branch
    stream: Trace
    shape: tuple[int, ...]
    stream_dtype: torch.dtype
    update_dtype: torch.dtype
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
        The nodes that the loss was computed from; None if unknown.
    """
    following: dict[Addition, list[Addition]] = {}
    for addition in additions:
        previous = _continued(addition)
        if previous is not None:
            following.setdefault(previous, []).append(addition)
    for addition in reversed(additions):
        after = following.get(addition, [])
        # The addition that encloses it used it last; or what used it later is inside a branch itself: a state handed from
        # layer to layer beside the stream.
        used_inside = not addition.touched or (bool(after) and all(other.inner for other in after))
        addition.inner = addition.enclosed and used_inside
    # A stream is read through weights; the keys of an attention, on the way to another update, are not.
    unweighed = [chain for chain in _chains(additions) if _is_read(chain) and not _is_read(chain, weighed=True)]
    for addition in _passed_on(unweighed, additions):
        addition.inner = True
    for addition in additions:
        addition.settled = True
        if used is not None and addition.node not in used:  # the last state of a recurrence
            assert addition.node is not None
            earlier = _continued(addition)
            addition.inner |= not addition.node.read or (earlier is not None and earlier.inner)


def _continued(addition: Addition) -> Addition | None:
    """Return the addition whose sum is the stream operand; of a gated stream, that of the stream before its gate."""
    return last_addition(addition.operand_node) or last_addition(addition.base)


def _is_read(chain: Sequence[Addition], *, weighed: bool = False) -> bool:
    nodes = [addition.node for addition in chain if addition.node is not None]
    return any(node.weighed if weighed else node.read for node in nodes)


def _passed_on(chains: Sequence[Sequence[Addition]], additions: Sequence[Addition]) -> list[Addition]:
    """Return the additions of those chains from which the update of an addition outside of the chain was computed."""
    bits = {addition.node: 1 << index for index, chain in enumerate(chains) for addition in chain if addition.node is not None}
    if not bits:
        return []
    from_chains: dict[int, int] = {}  # by step: the bits of the chains that it was computed from
    for step in walk([update.trace for addition in additions for update in addition.updates]):
        origins = bits.get(step.node, 0) if step.node is not None else 0
        for parent in step.parents:
            origins |= from_chains.get(parent.order, 0)
        from_chains[step.order] = origins
    reached = 0
    for addition in additions:
        bit = bits.get(addition.node, 0) if addition.node is not None else 0
        for update in addition.updates:
            reached |= from_chains.get(update.trace.order, 0) & ~bit
    return [addition for index, chain in enumerate(chains) if reached >> index & 1 for addition in chain]


def _chains(additions: Sequence[Addition]) -> list[list[Addition]]:
    """Group the additions by stream."""
    chains: dict[Addition, list[Addition]] = {}
    for addition in additions:
        previous = _continued(addition)
        chain = chains[previous] if previous is not None else []
        chain.append(addition)
        chains[addition] = chain
    return list({id(chain): chain for chain in chains.values()}.values())


def sites_of(additions: Sequence[Addition]) -> list[Site]:
    """Return the sites among ``additions``, numbered in order."""
    outer = [addition for addition in additions if not addition.inner]
    last = {addition.first: addition for addition in outer}  # of a parallel block
    previous = {addition: _previous(addition.first) for addition in outer}
    following: dict[Addition, list[Addition]] = {}
    for addition, before in previous.items():
        if before is not None:
            following.setdefault(before, []).append(addition)
    sites: list[Site] = []
    numbers: dict[Addition, int] = {}  # of the last site of each addition
    for addition in outer:
        total, before = last[addition.first], previous[addition]
        after = following.get(total, [])
        base = addition.base
        for part, update in enumerate(addition.updates):
            site = Site(
                number=len(sites),
                addition=addition,
                part=part,
                last=total,
                block=addition.block,
                branch=branch(addition.stream if base else None, update.trace, path(update.trace, base, addition.since), base),
                stream=addition.stream,
                shape=addition.shape,
                stream_dtype=addition.stream_dtype,
                update_dtype=update.dtype,
                continues=None if before is None else numbers.get(before),
                followed=bool(after),
                normed=_is_normed(total, after),
                order=addition.node.order if addition.node is not None else 0,
            )
            sites.append(site)
        numbers[addition] = len(sites) - 1
    return sites


def _is_normed(total: Addition, after: Sequence[Addition]) -> bool:
    if after:
        return any(addition.stream.norm is not None for addition in after)
    return total.node is not None and total.node.normed


def _previous(addition: Addition) -> Addition | None:
    """Return the outer addition whose sum an addition continues."""
    return last_addition(addition.stream.node, outer=True) or last_addition(addition.base, outer=True)
