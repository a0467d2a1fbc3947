"""One forward and one backward pass of a target, observed, within a memory budget."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from propcheck.errors import PropcheckError
from propcheck.execution.build import batch_of, build, loss_of, positions_of, shape_of
from propcheck.execution.checkpointing import plain_checkpoints
from propcheck.execution.fp32_model import wide_batch, widen_in_memory, widened
from propcheck.execution.memory import resident_bytes
from propcheck.execution.pass_state import Conductor
from propcheck.execution.plan import Plan, divide, plan
from propcheck.execution.recompute import is_segment, segmented
from propcheck.execution.rng import determined
from propcheck.execution.weights import Weights
from propcheck.execution.whole_model import LateLedger, numbered, require_room
from propcheck.measure.measured_pass import PassMeasurers
from propcheck.measure.nonfinite import NonfiniteSearch
from propcheck.measure.nonfinite_gradients import GradientSearch
from propcheck.measure.padding import padding_masks, real_positions
from propcheck.measure.parameters import Census, census
from propcheck.measure.site_rows import norm_records
from propcheck.measure.statistics import Logits, logit_statistics
from propcheck.measure.weight_calls import weight_runners
from propcheck.targets.target import call
from propcheck.tracing.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.deferred_init.record import Entry
    from propcheck.execution.build import Built
    from propcheck.execution.plan import Unit
    from propcheck.measure.fp32_reference import Casts, Deviation, Draws, Spool
    from propcheck.measure.measured_pass import MeasuredSite
    from propcheck.records import Angle, Doubling, NormRecord, Origin
    from propcheck.targets.target import Task

    Progress = Callable[[str, int | None, int, float], None]


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
    fp64_errors: dict[str, float | None]  # as ``Replay.fp64_error``
    roles: dict[str, str]
    sites: tuple[MeasuredSite, ...]
    gradients: dict[str, float]
    loss: float
    uniform_loss: float | None
    inputs: tuple[int, int]  # sequences, tokens of each
    unobserved: tuple[str, ...]  # a sentence for each place that could not be followed
    norms: tuple[NormRecord, ...]
    doublings: tuple[Doubling, ...]
    angles: tuple[Angle, ...]
    logits: Logits | None
    used: frozenset[str]  # the parameters and buffers that some operation of the forward pass used
    notes: tuple[str, ...]  # sentences: how the model was built and run, where that was not the usual way
    origins: tuple[Origin, ...] = ()  # of what was not finite, each direction's first
    shadow: tuple[Deviation, ...] = ()  # by site, where an fp32 pass was run beside this one


@dataclass(frozen=True, slots=True)
class Manner:
    """How a pass is run.

    Attributes
    ----------
    watched
        Every result is looked at, to find what makes numbers that are not finite.
    wide
        Weights and inputs are widened to fp32, and there is no autocast.
    spool
        Where what the additions add is kept.
    noted
        Notes something of the functions that the forward pass calls.
    """

    watched: bool = False
    wide: bool = False
    spool: Spool | None = None
    noted: Draws | Casts | None = None

    @property
    def own(self) -> bool:
        """Whether it is the pass whose weights are told of, and not one beside it."""
        return not (self.watched or self.wide)


def run_once(
    task: Task,
    seed: int,
    budget: int,
    device: torch.device,
    workers: Workers,
    progress: Progress | None,
    manner: Manner,
    *,
    uncut: str | None,
) -> Pass:
    """Run ``task`` in units, or uncut for the reason that is given."""
    built = build(task, seed, budget=budget, device=device, workers=workers)
    if manner.wide:
        task = dataclasses.replace(task, autocast=None, loss_scale=1.0)
        built = widened(built, seed=seed, device=device, workers=workers)
    recording, model = built.recording, built.recording.model
    units, permanent, blocks = divide(model, recording.entries, built.target.blocks)
    batch = batch_of(task, built, seed)
    if manner.wide:
        batch = wide_batch(batch)
        widen_in_memory(built, budget - resident_bytes())
    available = budget - resident_bytes() + built.held
    chosen = _plan(built, units, permanent, available, positions_of(batch), uncut)
    counted: dict[str, Census] = {}

    def count(entry: Entry, value: Tensor) -> None:
        if manner.own:
            counted[entry.name] = census(_dense(value), workers)

    weights = Weights(recording, built.replay, units, seed=seed, device=device, census=count)
    weights.bring_permanently(permanent if uncut is None else recording.entries)
    built.realiser.stand_in({id(recording.tensors[name]): tensor for name, tensor in weights.tensors.items()})
    names = {id(tensor): name for name, tensor in weights.tensors.items()}
    ledger = LateLedger()
    masks = padding_masks(batch)
    measurers = PassMeasurers(masks, manner.spool)
    search = None
    if manner.watched:
        gradient_search = GradientSearch(seed, shape_of(batch), is_segment)
        search = NonfiniteSearch(measurers.additions, gradient_search, shape=shape_of(batch), blocks=blocks)
    tracer = Tracer(names, runners=weight_runners(names, ledger))
    room = None if chosen.mode == "resident" else available - sum(entry.nbytes for entry in permanent)
    entries = {entry.name: entry for entry in recording.entries}
    conductor = Conductor(
        tracer=tracer,
        ledger=ledger,
        weights=weights,
        realiser=built.realiser,
        seed=seed,
        resident=chosen.resident,
        progress=_meter(units, len(blocks), progress),
        entries=entries,
        names=names,
        units=units,
        room=room,
        budget=budget,
        occupied=resident_bytes,
    )
    conductor.outside.update((entry.name, entry) for entry in (permanent if uncut is None else recording.entries))
    conductor.listeners = measurers.listeners(conductor, *(() if search is None else (search,)))
    tracer.listeners.subscribed = conductor.listeners.forward
    if manner.spool is not None:
        manner.spool.restart(masks)
    with ExitStack() as stack:
        stack.enter_context(plain_checkpoints())
        for handle in tracer.watch(model, blocks):
            stack.callback(handle.remove)
        for unit in units:
            forward = unit.module.forward
            stack.callback(_restore, unit, unit.module.__dict__.get("forward"))
            unit.module.forward = segmented(conductor, unit, forward) if uncut is None else numbered(tracer, unit, forward)
        stack.enter_context(determined("outside", seed))
        tracer.begin(batch)
        with manner.noted or nullcontext(), tracer, conductor.guard, built.realiser, _autocast(task, device):
            output = call(model, batch)
            loss = loss_of(built.target, output, batch)
        tracer.end(loss.value)
        conductor.check_loss(loss.value)
        if loss.value.requires_grad:  # else no parameter has a gradient
            conductor.in_backward = ledger.open = True
            (loss.value * task.loss_scale).backward()
        conductor.check()
    conductor.settle_all()
    norms = ledger.norms
    gradients = _to_floats(list(norms.values()))
    return Pass(
        class_name=type(model).__name__,
        mode=chosen.mode if conductor.resident == chosen.resident else _mode(units, conductor.resident),
        largest_unit=max(((unit.path, unit.nbytes) for unit in units), key=lambda unit: unit[1], default=("", 0)),
        blocks=len(blocks),
        entries=recording.entries,
        block_of={entry.name: unit.block for unit in units for entry in unit.entries},
        init_calls={entry.name: built.replay.init_calls(entry) for entry in recording.entries},
        census=counted,
        fp64_errors={entry.name: built.replay.fp64_error(entry, seed) for entry in recording.entries} if manner.own else {},
        roles=tracer.roles,
        sites=measurers.sites(tracer.sites, task.loss_scale),
        gradients={name: norm / task.loss_scale for name, norm in zip(norms, gradients, strict=True)},
        loss=float(loss.value.detach()),
        uniform_loss=loss.uniform,
        inputs=shape_of(batch),
        unobserved=measurers.unobserved.sentences,
        norms=norm_records(measurers.norms.measured, tracer.sites, seed, tracer.block_of),
        doublings=tracer.doublings,
        angles=measurers.angles.records(tracer.block_of),
        logits=logit_statistics(real_positions(loss.logits, masks)) if manner.own and loss.logits is not None else None,
        used=frozenset(conductor.used),
        notes=(*built.notes, *(() if uncut is None else (f"{uncut}; so the model was run whole, with all of it in memory.",))),
        origins=() if search is None else search.origins,
    )


def _mode(units: Sequence[Unit], resident: frozenset[str]) -> str:
    """Name the way of a run whose graphs turned out to be larger than planned."""
    return "partly resident" if any(unit.path in resident for unit in units if unit.block is not None) else "streamed"


def _plan(
    built: Built, units: Sequence[Unit], permanent: Sequence[Entry], available: int, tokens: int, uncut: str | None
) -> Plan:
    """Choose what stays in memory; refuse what would have to and does not fit."""
    entries = built.recording.entries
    if uncut is not None:
        require_room(uncut, units, entries, available, tokens)
        return Plan(frozenset(unit.path for unit in units), "resident")
    chosen = plan(units, available - sum(entry.nbytes for entry in permanent), tokens)
    if not built.recording.recorded and chosen.mode != "resident":
        raise PropcheckError(
            f"{built.notes[0].partition('; so')[0]}; so it is in memory as a whole, {built.held / 2**30:.3g} GiB, and with "
            "its activations that does not fit the memory budget; raise --memory, or change that line"
        )
    return chosen


def _autocast(task: Task, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None)


def _dense(value: Tensor) -> Tensor:
    """Return the numbers of a sparse or quantised tensor, which only a model that was not recorded has."""
    value = value.dequantize() if value.is_quantized else value
    return value if value.layout == torch.strided else value.to_dense()


def _to_floats(tensors: list[Tensor]) -> list[float]:
    return torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []


def _restore(unit: Unit, own: object) -> None:
    """Take the replacement of a unit's forward away; ``own`` is what the module had in its place, beside its class's."""
    if own is None:
        unit.module.__dict__.pop("forward", None)
    else:
        unit.module.__dict__["forward"] = own


def _meter(units: list[Unit], blocks: int, progress: Progress | None) -> Callable[[str, Unit], None]:
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
