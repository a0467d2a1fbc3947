"""Build a target, recorded if that can be done, and make what it is called with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from propcheck.deferred_init.eager import MemoryLimit, build_ordinarily
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import NotRecordedError, Recording, record
from propcheck.errors import PropcheckError
from propcheck.execution.memory import resident_bytes
from propcheck.execution.outside_tensors import OutsideTensors
from propcheck.execution.rng import seeded
from propcheck.targets.losses import Loss, default_loss
from propcheck.targets.target import call

if TYPE_CHECKING:
    from torch import nn

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.targets.target import Batch, Target, Task


@dataclass(frozen=True, slots=True)
class BuiltTarget:
    """A target with how its tensors get their values.

    Attributes
    ----------
    target
        Its model's tensors are fake, or real where nothing was recorded.
    held
        Bytes of the model that are in memory already.
    notes
        What the user should know of how it was built.
    """

    target: Target
    recording: Recording
    materializer: Materializer
    outside_tensors: OutsideTensors
    held: int
    notes: tuple[str, ...]


def build(task: Task, seed: int, *, budget: int, device: torch.device, workers: Workers) -> BuiltTarget:
    """Build the target of ``task``: recorded, or where that fails as any program would, within ``budget`` bytes."""
    built: list[Target] = []

    def factory() -> nn.Module:
        built[:] = [task.build()]
        return built[0].model

    def first_use(model: nn.Module) -> None:
        call(model, _batch(task, built[0], seed))

    notes: tuple[str, ...] = ()
    try:
        recording = record(factory)
    except NotRecordedError as error:
        reason = error.reason
        notes = (f"{reason}; so it was built as a whole, in memory, and init_calls cannot say what gave its values.",)
    else:
        reason = ""
    if reason:
        recording = build_ordinarily(factory, first_use, seed=seed, limit=MemoryLimit(budget, resident_bytes, reason))
    materializer = Materializer(recording, workers)
    held = sum(entry.nbytes for entry in recording.entries) if not recording.recorded else 0
    return BuiltTarget(built[0], recording, materializer, OutsideTensors(materializer, seed, device), held, notes)


def batch_of(task: Task, built: BuiltTarget, seed: int) -> Batch:
    """Return what the model is called with, on its device."""
    with built.outside_tensors:
        batch = _batch(task, built.target, seed)
    named: Batch = built.outside_tensors.named(dict(batch) if isinstance(batch, Mapping) else batch, "batch")
    return named


def _batch(task: Task, target: Target, seed: int) -> Batch:
    if target.batch is None:
        return task.batch(target.model, seed)
    if not callable(target.batch):
        return target.batch
    with seeded("batch", seed):
        return target.batch(seed) if signature(target.batch).parameters else target.batch()


def loss_of(target: Target, output: Any, batch: Batch) -> Loss:
    """Return the loss, a tensor with one element."""
    if target.loss is None:
        loss = default_loss(output, batch)
    else:
        _check_takes_both(target.loss, output, batch)
        value = target.loss(output, batch)
        if not isinstance(value, Tensor):
            raise PropcheckError(f"the target's loss function must return a tensor, it returned a {type(value).__name__}")
        loss = Loss(value, None)
    if loss.value.numel() != 1:
        raise PropcheckError(f"the loss must be a scalar, it has the shape {list(loss.value.shape)}")
    return loss


def _check_takes_both(loss: Callable[..., Any], output: Any, batch: Batch) -> None:
    try:
        signature(loss).bind(output, batch)
    except ValueError:  # written in C, it does not say what it takes
        return
    except TypeError as error:
        raise PropcheckError(f"the target's loss does not take loss(output, batch), which it is called with: {error}") from None


def shape_of(batch: Batch) -> tuple[int, int]:
    """Return sequences and tokens of each: the first two dimensions of the first tensor that has them."""
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    first = next((shape for shape in shapes if len(shape) > 1), torch.Size((1, 1)))
    return first[0], first[1]


# Images are cut into patches; the models that keep most positions begin with patches of 4 x 4.
_PATCH = 16


def positions_of(batch: Batch) -> int:
    """Return an upper estimate of how many positions the stream has, over the batch."""
    most = 1
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 1:
            inner = leaf.shape[1:]
            most = max(most, leaf.shape[0] * (inner[-2:].numel() // _PATCH if len(inner) > 2 else max(inner)))
    return most
