"""One forward and one backward pass of a target, observed, within a memory budget."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

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

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.build.random import Workers
    from propcheck.build.record import Entry
    from propcheck.engine.units import Unit
    from propcheck.targets.target import Target


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


def execute(
    target: Target,
    seed: int,
    *,
    memory: int | None,
    device: torch.device,
    workers: Workers,
    progress: Callable[[str, int | None, int, float], None] | None = None,
) -> Pass:
    """Run ``target`` once.

    Parameters
    ----------
    target
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
    recording = record(target.build)
    replay = Replay(recording, workers)
    model = recording.model
    units, permanent = divide(model, recording.entries)
    blocks = sum(unit.block is not None for unit in units)
    budget = free_memory() if memory is None else memory
    chosen = plan(units, budget - resident_bytes() - sum(entry.nbytes for entry in permanent), target.tokens)
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
        inputs = tuple(tensor.to(device) for tensor in target.batch(seed))
        with follower, torch.autocast(device.type, dtype=target.autocast, enabled=target.autocast is not None):
            loss = target.loss(model(*inputs), inputs)
        (loss * target.loss_scale).backward()
        conductor.check()
    ledger.settle(
        {name: weights.tensors[name] for name, entry in conductor.outside.items() if entry.kind == "parameter"}  # type: ignore[misc]
    )
    gradients = _to_floats(list(ledger.norms.values()))
    for site in follower.sites:
        site.gradients = {name: norm / target.loss_scale for name, norm in site.gradients.items()}
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
        gradients={name: norm / target.loss_scale for name, norm in zip(ledger.norms, gradients, strict=True)},
        loss=float(loss.detach()),
    )


def _to_floats(tensors: list[Tensor]) -> list[float]:
    return torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []


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
