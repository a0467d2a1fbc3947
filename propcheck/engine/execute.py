"""One forward and one backward pass of a target, observed, within a memory budget."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from propcheck.build.random import generator_for
from propcheck.build.record import record
from propcheck.build.replay import Replay
from propcheck.engine.memory import free_memory, resident_bytes
from propcheck.engine.segment import Conductor, segmented
from propcheck.engine.units import divide, plan
from propcheck.engine.weights import Weights
from propcheck.observe.census import Census, census
from propcheck.observe.follow import Follower, Site
from propcheck.observe.gradients import Ledger
from propcheck.targets.losses import Loss, default_loss
from propcheck.targets.target import call

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from propcheck.build.random import Workers
    from propcheck.build.record import Entry
    from propcheck.engine.units import Unit
    from propcheck.targets.target import Batch, Target, Task


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass over one seed showed."""

    class_name: str
    mode: str
    largest_unit: tuple[str, int]  # path, and bytes of its parameters
    blocks: int
    entries: tuple[Entry, ...]
    block_of: dict[str, int | None]  # by parameter
    init_calls: dict[str, str | None]
    census: dict[str, Census]
    roles: dict[str, str]
    sites: tuple[Site, ...]
    last_normed: bool
    gradients: dict[str, float]
    loss: float
    uniform_loss: float | None
    inputs: tuple[int, int]  # sequences, tokens of each


def execute(
    task: Task,
    seed: int,
    *,
    memory: int | None,
    device: torch.device,
    workers: Workers,
    progress: Callable[[str, int | None, int, float], None] | None = None,
) -> Pass:
    """Run ``task`` once.

    Parameters
    ----------
    task
        What to run.
    seed
        Of weights, inputs and random calls in the forward pass.
    memory
        Budget in bytes for the whole process; None: what the machine has free, less a margin.
    device
        Where the model runs.
    workers
        Threads for filling weights.
    progress
        Called with phase, block, number of blocks, and the fraction of the work that is done.
    """
    built: list[Target] = []

    def build() -> nn.Module:
        built.append(task.build())
        return built[0].model

    recording = record(build)
    (target,) = built
    replay = Replay(recording, workers)
    model = recording.model
    units, permanent = divide(model, recording.entries)
    blocks = sum(unit.block is not None for unit in units)
    budget = free_memory() if memory is None else memory
    batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), _batch(task, target, seed))
    sequences, tokens = _shape(batch)
    chosen = plan(units, budget - resident_bytes() - sum(entry.nbytes for entry in permanent), sequences * tokens)
    counted: dict[str, Census] = {}

    def count(entry: Entry, value: Tensor) -> None:
        counted[entry.name] = census(value, workers)

    weights = Weights(recording, replay, units, seed=seed, device=device, census=count)
    weights.bring_permanently(permanent)
    ledger = Ledger()
    follower = Follower({id(tensor): name for name, tensor in weights.tensors.items()}, ledger)
    entries = {entry.name: entry for entry in recording.entries}
    conductor = Conductor(follower, weights, seed, chosen.resident, _meter(units, blocks, progress), entries)
    conductor.outside.update((entry.name, entry) for entry in permanent)
    follower.on_use = conductor.use
    with ExitStack() as stack:
        for handle in follower.watch(model):
            stack.callback(handle.remove)
        for unit in units:
            stack.callback(_restore, unit)
            unit.module.forward = segmented(conductor, unit, unit.module.forward)
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        torch.manual_seed(generator_for("outside", seed).initial_seed())
        with follower, torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None):
            output = call(model, batch)
            loss = default_loss(output, batch) if target.loss is None else Loss(target.loss(output, batch), None)
        (loss.value * task.loss_scale).backward()
        conductor.check()
    ledger.settle(
        {name: weights.tensors[name] for name, entry in conductor.outside.items() if entry.kind == "parameter"}  # type: ignore[misc]
    )
    gradients = _to_floats(list(ledger.norms.values()))
    for site in follower.sites:
        site.gradients = {name: norm / task.loss_scale for name, norm in site.gradients.items()}
    return Pass(
        class_name=type(model).__name__,
        mode=chosen.mode,
        largest_unit=max(((unit.path, unit.nbytes) for unit in units), key=lambda unit: unit[1], default=("", 0)),
        blocks=blocks,
        entries=recording.entries,
        block_of={entry.name: unit.block for unit in units for entry in unit.entries},
        init_calls={entry.name: replay.init_calls(entry) for entry in recording.entries},
        census=counted,
        roles=follower.roles,
        sites=tuple(follower.sites),
        last_normed=follower.last_normed,
        gradients={name: norm / task.loss_scale for name, norm in zip(ledger.norms, gradients, strict=True)},
        loss=float(loss.value.detach()),
        uniform_loss=loss.uniform,
        inputs=_shape(batch),
    )


def _to_floats(tensors: list[Tensor]) -> list[float]:
    return torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []


def _batch(task: Task, target: Target, seed: int) -> Batch:
    """Return what the model is called with, for ``seed``."""
    if target.batch is None:
        return task.batch(target.model, seed)
    if not callable(target.batch):
        return target.batch
    torch.manual_seed(generator_for("batch", seed).initial_seed())
    return target.batch(seed) if signature(target.batch).parameters else target.batch()


def _shape(batch: Batch) -> tuple[int, int]:
    """Return sequences and tokens of each: the first two dimensions of the first tensor that has them."""
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    first = next((shape for shape in shapes if len(shape) > 1), torch.Size((1, 1)))
    return first[0], first[1]


def _restore(unit: Unit) -> None:
    unit.module.__dict__.pop("forward", None)


def _meter(
    units: list[Unit], blocks: int, progress: Callable[[str, int | None, int, float], None] | None
) -> Callable[[str, Unit], None]:
    """Return what the calls report to; work is counted in parameters, a backward as twice a forward."""
    total = 3 * sum(unit.nbytes for unit in units) or 1
    done = 0
    ahead = 0  # of the unit that is running

    def report(phase: str, unit: Unit) -> None:
        nonlocal done, ahead
        done += ahead
        ahead = unit.nbytes * (1 if phase == "forward" else 2)
        if progress is not None:
            progress(phase, unit.block, blocks, min(1.0, done / total))

    return report
