"""Branches: the steps of the graph between the stream that a sublayer reads and the update that it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from propcheck.records import Sublayer
    from propcheck.tracing.graph import Addition, Node, Norm, Trace


@dataclass(frozen=True, slots=True)
class Branch:
    """What lies between the stream as a branch read it and the update."""

    features: frozenset[str]
    parameters: frozenset[str]
    read_norm: Norm | None
    reads_bare: bool  # a product also reads the stream without that norm
    read_scalings: int
    written_norm: Norm | None
    norms: tuple[Norm, ...]  # all of them, in order
    attentions: tuple[int, ...]  # the steps that are attentions
    output: frozenset[str]  # the parameters of the product that wrote the update
    module: str | None
    inner: frozenset[Addition]  # additions on the way

    def sublayer(self) -> Sublayer:
        """Infer the kind of sublayer from its features.

        attention: a softmax over products of activations. ssm: a step size (a softplus) that scales the input and whose
        exponential is the decay; or a recurrence or convolution along the tokens. linear_attention: products of activations
        without either (the delta rule, kernel attention). moe: a choice of experts. other: a convolution over pixels. mlp: any
        other product with weights.
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

    steps: list[Trace]  # all steps made for the update since the node
    through: list[Trace]  # those that were computed from the node

    @property
    def multiplies(self) -> bool:
        """Whether a product lies on the way from the node."""
        return any("product" in step.features for step in self.through)


def path(trace: Trace, base: Node | None, since: int | None = None) -> Path:
    """Return the steps between ``base`` and ``trace``, without those that made ``base`` itself.

    Inputs computed beside the stream (keys of another stream, a table of biases, a condition) count from the additions or
    lookups on, and after the step ``since``, where a block began, or after ``base``. So does an input through an addition that
    is settled to be another site (of the other half of a reversible stream). Without a base, the steps since the lookups,
    inputs and sums that ``trace`` comes from are returned.
    """
    beside = -1 if base is None else base.order if since is None else since
    oldest = beside if base is None else min(beside, base.order)

    def newer(step: Trace) -> list[Trace]:
        if base is not None and step.order == base.order:
            return []
        return [parent for parent in step.parents if parent.order > oldest or parent.node is base]

    reached: set[int] = set()
    if base is not None:
        for step in walk([trace], newer):
            if step.node is base or any(parent.order in reached for parent in step.parents):
                reached.add(step.order)

    def until_others(step: Trace) -> list[Trace]:
        node = step.node
        if node is None or node.kind != "sum" or node.order != step.order or node is base:
            return newer(step)
        return [] if _is_site(node) or step.order not in reached else newer(step)

    steps = [
        step
        for step in walk([trace], until_others)
        if base is None or (step.order != base.order and (step.order in reached or step.order > beside))
    ]
    return Path(steps, steps if base is None else [step for step in steps if step.order in reached])


def walk(ends: Iterable[Trace], onward: Callable[[Trace], Iterable[Trace]] = lambda step: step.parents) -> list[Trace]:
    """Return ``ends`` and the steps that ``onward`` leads to from them, in order."""
    steps: dict[int, Trace] = {}
    pending = list(ends)
    while pending:
        step = pending.pop()
        if step.order not in steps:
            steps[step.order] = step
            pending += onward(step)
    return [steps[order] for order in sorted(steps)]


def ancestors(trace: Trace) -> set[Node]:
    """Return every node from which ``trace`` was computed."""
    return {step.node for step in walk([trace]) if step.node is not None}


def _lineage(trace: Trace) -> set[int]:
    """Return the orders of the steps from a node to this copy of it."""
    copies = walk([trace], lambda step: [parent for parent in step.parents if parent.node is trace.node])
    return {step.order for step in copies}


def branch(stream: Trace | None, update: Trace, route: Path, base: Node | None) -> Branch:
    """Describe a branch from its path.

    Parameters
    ----------
    stream
        The stream's copy at the addition. The steps that made it (a norm after the last sum, positions) are not part of the
        branch.
    update
        What the branch computed.
    route
        The steps from ``base`` to the update.
    base
        The node of the stream that the branch read.
    """
    of_stream = _lineage(stream) if stream is not None else set()
    inside = [step for step in route.steps if step.order not in of_stream]
    entering = [(step, parent) for step in inside for parent in step.parents if base is not None and step.kind == "signal"]
    reads = [parent for step, parent in entering if step.node is not base and parent.node is base]
    if not any(read.norm is not None for read in reads):  # it may read the other half of a reversible stream
        reads += [parent for step, parent in entering if step.node is not parent.node and _is_site(parent.node)]
    has_late_norm = any(step.norm is not None and step.norm.late for step in inside)
    return Branch(
        features=frozenset().union(*(step.features for step in inside)),
        parameters=frozenset().union(*(step.parameters for step in inside)),
        read_norm=next((read.norm for read in reads if read.norm is not None), None),
        read_scalings=max((read.scalings for read in reads), default=0),
        reads_bare=not has_late_norm
        and any(parent.norm is None and "product" in step.features for step, parent in entering if parent.node is base),
        written_norm=update.norm,
        norms=tuple(sorted({step.norm for step in inside if step.norm is not None}, key=lambda norm: norm.number)),
        attentions=tuple(step.order for step in inside if step.is_attention),
        output=next(
            (step.parameters for step in reversed(inside) if "weighed" in step.features and step.product == update.product),
            frozenset(),
        ),
        module=update.module,
        inner=frozenset(step.node.addition for step in route.through if step.node not in (None, base) and step.node.addition),
    )
