"""What is known of a tensor on its way from one residual addition to the next.

A **stream** tensor is the residual stream or a copy of it that saw only norms, scaling, casts, dropout and views. A
**branch** tensor has passed a product (with a weight or with another activation) since the stream was read. A **factor**
is a reduction over the last dimension of either, on its way to normalise something: ``rsqrt(mean(x^2) + eps)``. A
**weight** was computed from parameters alone, like the gain 1 + w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.records import Sublayer

_NAME = "_propcheck_trace"

Kind = Literal["stream", "branch", "factor", "weight"]


@dataclass(frozen=True, slots=True)
class Norm:
    """One normalisation that was met: its number, and the mean square of what it read (None when not measured)."""

    number: int
    input_mean_square: Tensor | None


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one tensor since the last residual addition on its way."""

    kind: Kind
    roots: frozenset[int] = frozenset()  # numbers of the look-ups that it comes from, however many additions ago
    norm: Norm | None = None  # the last norm that a stream passed since the addition
    read_norm: Norm | None = None  # the norm that a branch read the stream through
    written_norm: bool = False  # a branch passed a norm after its last product
    ungained: bool = False  # it passed a norm whose gain, if there is one, is still to come
    scalings: int = 0  # how many numbers a stream was multiplied by
    read_scalings: int = 0  # how many of those a branch saw
    rooted: bool = False  # a factor passed a root, so it is a scale and not a mean
    parameters: frozenset[str] = frozenset()  # on the way since the addition
    features: frozenset[str] = frozenset()  # what tells the kinds of sublayer apart
    product: int = 0  # number of the last product on the way
    module: str | None = None  # the outermost module below the block that made it

    def sublayer(self) -> Sublayer:
        """Tell what kind of sublayer wrote this branch, from what it computed.

        softmax over products of activations: attention; products of activations without it: linear attention (the delta
        rule, kernel attention); a recurrence or convolution over tokens without such products: a state-space model; a
        choice of experts: mixture of experts; else position-wise.
        """
        features = self.features
        if "softmax" in features and "mixed" in features:
            return "attention"
        if "mixed" in features:
            return "linear_attention"
        if "routed" in features:
            return "moe"
        if "convolved" in features or "scanned" in features:
            return "ssm"
        return "mlp" if "weighed" in features else "other"


def trace_of(value: object) -> Trace | None:
    """Return what is known of a tensor, None if it is neither stream nor branch."""
    return getattr(value, _NAME, None)


def mark(tensor: Tensor, trace: Trace | None) -> None:
    """Say what is known of a tensor."""
    setattr(tensor, _NAME, trace)


def merged(traces: list[Trace]) -> Trace:
    """Return what is known of a tensor computed from several: a branch if any is one, with the history of all."""
    if len(traces) == 1:
        return traces[0]
    branches = [trace for trace in traces if trace.kind == "branch"]
    lead = max(branches or [trace for trace in traces if trace.kind == "stream"] or traces, key=lambda trace: trace.product)
    return replace(
        lead,
        roots=frozenset().union(*(trace.roots for trace in traces)),
        parameters=frozenset().union(*(trace.parameters for trace in traces)),
        features=frozenset().union(*(trace.features for trace in traces)),
        read_norm=next((trace.read_norm for trace in branches if trace.read_norm is not None), lead.read_norm),
    )
