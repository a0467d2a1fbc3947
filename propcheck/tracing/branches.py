"""What lies between the stream as a branch read it and the update that it wrote: the steps of the graph on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from propcheck.measure.attention import AttentionStatistics
    from propcheck.records import Sublayer
    from propcheck.tracing.graph import Addition, Node, Norm, Trace


@dataclass(frozen=True, slots=True)
class Branch:
    """What lies between the stream as a branch read it and the update that it wrote."""

    features: frozenset[str]
    parameters: frozenset[str]
    read_norm: Norm | None
    reads_bare: bool  # a product reads the stream without that norm too
    read_scalings: int
    written_norm: Norm | None
    norms: tuple[Norm, ...]  # all of them, in order
    attentions: tuple[AttentionStatistics, ...]
    output: frozenset[str]  # the parameters of the product that wrote the update
    module: str | None
    inner: frozenset[Addition]  # additions on the way

    def sublayer(self) -> Sublayer:
        """Tell what kind of sublayer it is, from what it computed.

        softmax over products of activations: attention; a step size, softplus of something, that scales the input and whose
        exponential is the decay: a state-space model; products of activations without either: linear attention (the delta
        rule, kernel attention); a choice of experts: mixture of experts; a recurrence or a convolution along the tokens: a
        state-space model; a convolution over pixels: other; else position-wise.
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
        return "mlp" if "weighed" in features and "spread" not in features else "other"


def _is_site(node: Node | None) -> bool:
    return node is not None and node.addition is not None and node.addition.settled and not node.addition.inner


@dataclass(frozen=True, slots=True)
class Path:
    """The steps between a node and an update, in order."""

    steps: list[Trace]  # all that were made for the update since the node
    through: list[Trace]  # those of them that were computed from the node

    @property
    def multiplies(self) -> bool:
        """Whether a product lies on the way from the node."""
        return any("product" in step.features for step in self.through)


def path(trace: Trace, base: Node | None, since: int | None = None) -> Path:
    """Return what lies between ``base`` and ``trace``, without the steps that made ``base`` itself.

    What was computed beside (keys of another stream, a table of biases, a condition) counts from the additions or look-ups on,
    and after the step ``since``, where a block began, or after ``base``; so does what came through an addition that is settled
    to be a site of its own (of the other half of a reversible stream). Without a base: the steps since the look-ups, inputs and
    sums that ``trace`` comes from.
    """
    beside = -1 if base is None else base.order if since is None else since
    oldest = beside if base is None else min(beside, base.order)

    def newer(one: Trace) -> list[Trace]:
        if base is not None and one.order == base.order:
            return []
        return [parent for parent in one.parents if parent.order > oldest or parent.node is base]

    reached: set[int] = set()
    if base is not None:
        for one in walk([trace], newer):
            if one.node is base or any(parent.order in reached for parent in one.parents):
                reached.add(one.order)

    def until_others(one: Trace) -> list[Trace]:
        node = one.node
        if node is None or node.kind != "sum" or node.order != one.order or node is base:
            return newer(one)
        return [] if _is_site(node) or one.order not in reached else newer(one)

    steps = [
        one
        for one in walk([trace], until_others)
        if base is None or (one.order != base.order and (one.order in reached or one.order > beside))
    ]
    return Path(steps, steps if base is None else [one for one in steps if one.order in reached])


def walk(ends: Iterable[Trace], onward: Callable[[Trace], Iterable[Trace]] = lambda step: step.parents) -> list[Trace]:
    """Return ``ends`` and what ``onward`` leads to from them, in order."""
    found: dict[int, Trace] = {}
    pending = list(ends)
    while pending:
        one = pending.pop()
        if one.order not in found:
            found[one.order] = one
            pending += onward(one)
    return [found[order] for order in sorted(found)]


def ancestors(trace: Trace) -> set[Node]:
    """Return every node from which ``trace`` was computed."""
    return {one.node for one in walk([trace]) if one.node is not None}


def lineage(trace: Trace) -> set[int]:
    """Return the orders of the steps from a node to this copy of it."""
    own = walk([trace], lambda step: [parent for parent in step.parents if parent.node is trace.node])
    return {one.order for one in own}


def branch(stream: Trace | None, update: Trace, found: Path, base: Node | None) -> Branch:
    """Describe the branch whose update is ``update``, from its path; ``stream`` is the stream's copy at the addition.

    ``base`` is the node of the stream that the branch read.

    What the stream itself passed before the addition (a norm after the last sum, positions) is not part of it.
    """
    own = lineage(stream) if stream is not None else set()
    inside = [step for step in found.steps if step.order not in own]
    entering = [(step, parent) for step in inside for parent in step.parents if base is not None and step.kind == "signal"]
    readings = [parent for step, parent in entering if step.node is not base and parent.node is base]
    if not any(one.norm is not None for one in readings):  # the other half of a reversible stream may be what it reads
        readings += [parent for step, parent in entering if step.node is not parent.node and _is_site(parent.node)]
    return Branch(
        features=frozenset().union(*(step.features for step in inside)),
        parameters=frozenset().union(*(step.parameters for step in inside)),
        read_norm=next((one.norm for one in readings if one.norm is not None), None),
        read_scalings=max((one.scalings for one in readings), default=0),
        reads_bare=not any(one.norm is not None and one.norm.late for one in inside)
        and any(parent.norm is None and "product" in step.features for step, parent in entering if parent.node is base),
        written_norm=update.norm,
        norms=tuple(sorted({one.norm for one in inside if one.norm is not None}, key=lambda norm: norm.number)),
        attentions=tuple(one.attention for one in inside if one.attention is not None),
        output=next(
            (one.parameters for one in reversed(inside) if "weighed" in one.features and one.product == update.product),
            frozenset(),
        ),
        module=update.module,
        inner=frozenset(step.node.addition for step in found.through if step.node not in (None, base) and step.node.addition),
    )
