"""What cannot be cut into units: how it shows, and how such a model runs whole.

Units are differentiated one at a time, so a tensor that has a gradient may go from one to another only as argument and
output, and what is computed again must come out the same. Where a model does otherwise, nothing of the pass can be trusted:
it starts again, built anew, with the plain autograd graph of all its weights, if they fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError
from propcheck.execution.plan import working_bytes
from propcheck.measure.gradients import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from propcheck.deferred_init.record import Entry
    from propcheck.execution.plan import Unit
    from propcheck.measure.gradients import Factors
    from propcheck.tracing.tracer import Tracer


class IsolationError(Exception):
    """The pass is void: a unit does what needs an uncut graph. The text is a sentence that begins with the unit's path."""


ANOTHER = (
    "for the backward pass gives another output, so it reads something that changed (a cache, a counter, a random source of "
    "its own)"
)


class LateLedger(Ledger):
    """Takes what the backward pass of the loss says, and not what the model's own ``torch.autograd.grad`` leads to before."""

    def __init__(self) -> None:
        super().__init__()
        self.open = False

    def add(self, name: str, factors: Factors) -> None:
        """Note one use of the weight ``name``."""
        if self.open:
            super().add(name, factors)


def require_room(reason: str, units: Sequence[Unit], entries: Sequence[Entry], available: int, tokens: int) -> None:
    """Refuse a model whose weights, gradients and activations together are estimated not to fit ``available`` bytes."""
    weights = sum(entry.nbytes for entry in entries)
    gradients = sum(entry.nbytes for entry in entries if entry.requires_grad)
    needed = weights + gradients + sum(working_bytes(unit, tokens) for unit in units)
    if needed > available:
        raise PropcheckError(
            f"{reason}; so it cannot be computed unit by unit, and the whole of it needs about {needed / 2**30:.3g} GiB, where "
            f"{max(available, 0) / 2**30:.3g} GiB are left; raise --memory, or change that"
        )


def numbered(tracer: Tracer, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``unit.module.forward`` that says in which block it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with tracer.segment(unit.block):
            return forward(*args, **kwargs)

    return call


def sources(outputs: Iterable[Tensor], stop: Callable[[Any], bool]) -> Iterable[Any]:
    """Yield the leaves of the graph above ``outputs``, and the nodes at which ``stop`` says that another graph begins."""
    pending = [output.grad_fn for output in outputs]
    yield from (output for output in outputs if output.requires_grad and output.grad_fn is None)
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if stop(node):
            yield node
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        pending += [following for following, _ in node.next_functions]
