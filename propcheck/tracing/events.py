"""The events of a traced pass, and the listeners that receive them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor

    from propcheck.tracing.graph import Addition, Norm

Operand = Literal["stream", "update"]
GradientOf = Literal["stream", "update", "sum"]


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a torch function."""

    function: Any
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    module: str | None = None  # the innermost module that runs
    block: int | None = None

    def run(self) -> Any:
        """Call the function."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class AdditionOperands:
    """The operands of a residual addition, as the model has them; autograd hooks may be registered on them.

    Attributes
    ----------
    gradients_at_sum
        The gradients that have to be taken at the sum: its own, and those of operands that are no tensor of the model.
    """

    addition: Addition
    stream: Tensor
    update: Tensor
    in_place: bool
    gradients_at_sum: tuple[GradientOf, ...]


@dataclass(frozen=True, slots=True)
class AdditionValues:
    """The values of a residual addition: detached, and copied where the addition overwrote them.

    Attributes
    ----------
    stream
        Before the first of the ``earlier`` additions, or before this one.
    updates
        What this addition adds: several if its operand is a sum of updates of different kinds.
    total
        The sum.
    earlier
        In a parallel block: the previous additions to the same stream, with their updates.
    """

    addition: Addition
    stream: Tensor
    updates: tuple[Tensor, ...]
    total: Tensor
    earlier: tuple[tuple[Addition, tuple[Tensor, ...]], ...]


@dataclass(frozen=True, slots=True)
class NormCall:
    """A normalisation that ran; ``output`` is None where its vectors do not lie along the last dimension of ``source``."""

    norm: Norm
    source: Tensor
    output: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A fused attention; ``step`` is its step in the graph, the rest are the arguments of ``scaled_dot_product_attention``."""

    step: int
    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@dataclass(frozen=True, slots=True)
class AngleCall:
    """A sine or cosine that is about to be taken of ``angles``.

    ``parameters`` are the parameters and buffers that the angles were computed from, with their dtypes.
    """

    angles: Tensor
    parameters: tuple[tuple[str, torch.dtype], ...]
    module: str | None


class Listener:
    """Receives the events of a pass; a subclass overrides those that it needs."""

    def function_called(self, call: FunctionCall) -> None:
        """Receive any function before it runs."""

    def function_returned(self, call: FunctionCall, result: Any) -> None:
        """Receive the result of any function, after every other event of that call."""

    def parameter_used(self, parameter: str, function: str) -> None:
        """Receive the name of a parameter or buffer before ``function`` reads it."""

    def before_addition(self, operands: AdditionOperands) -> None:
        """Receive the operands of a residual addition before it runs."""

    def after_addition(self, operands: AdditionOperands, total: Tensor) -> None:
        """Receive the sum of a residual addition, as the model has it."""

    def addition(self, values: AdditionValues) -> None:
        """Receive the values of a residual addition; a part of the model that is computed again sends none."""

    def norm(self, call: NormCall) -> None:
        """Receive a normalisation."""

    def norm_gain(self, norm: Norm, gain: Tensor) -> None:
        """Receive the gain of a norm."""

    def norm_output(self, norm: Norm, output: Tensor) -> None:
        """Receive the result of a norm after its gain, where the gain is a multiplication of its own."""

    def fused_attention(self, call: AttentionCall) -> None:
        """Receive an attention that does not show its logits."""

    def softmax_attention(self, step: int, logits: Tensor, weights: Tensor) -> None:
        """Receive the softmax of an attention, [..., queries, keys]."""

    def angles(self, call: AngleCall) -> None:
        """Receive the argument of a sine or cosine before it is taken."""

    def not_followed(self, module: str, reason: str) -> None:
        """Receive a module whose computation the tracer cannot follow."""

    def pass_ended(self, loss: Tensor) -> None:
        """Receive the loss at the end of the forward pass."""


class Listeners:
    """The listeners that are subscribed at the moment; iterate over it to send an event."""

    def __init__(self, subscribed: tuple[Listener, ...] = ()) -> None:
        self.subscribed = subscribed

    def __iter__(self) -> Iterator[Listener]:
        return iter(self.subscribed)


@dataclass(frozen=True, slots=True)
class PassListeners:
    """The listeners of one pass, by what they need.

    Attributes
    ----------
    everywhere
        Listen to every part of the pass.
    values
        Measure values of the forward pass.
    gradients
        Measure gradients: they listen where the graph that is built will be differentiated.
    """

    everywhere: tuple[Listener, ...] = ()
    values: tuple[Listener, ...] = ()
    gradients: tuple[Listener, ...] = ()

    @property
    def forward(self) -> tuple[Listener, ...]:
        """Of a forward pass whose graph is kept."""
        return (*self.everywhere, *self.values, *self.gradients)

    @property
    def forward_without_graph(self) -> tuple[Listener, ...]:
        """Of a forward pass whose graph is dropped."""
        return (*self.everywhere, *self.values)

    @property
    def recomputation(self) -> tuple[Listener, ...]:
        """Of a part that is computed again for the backward pass."""
        return (*self.everywhere, *self.gradients)
