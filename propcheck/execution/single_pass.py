"""Run and measure one forward and one backward pass of a target within a memory budget."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from propcheck.errors import PropcheckError
from propcheck.execution.build import batch_of, build, loss_of, positions_of, shape_of
from propcheck.execution.checkpointing import plain_checkpoints
from propcheck.execution.fp32_model import wide_batch, widen_in_memory, widened
from propcheck.execution.memory import resident_bytes
from propcheck.execution.pass_state import PassState
from propcheck.execution.plan import Plan, divide, plan
from propcheck.execution.recompute import is_segment, isolated_forward
from propcheck.execution.rng import seeded
from propcheck.execution.weights import Weights
from propcheck.execution.whole_model import LateLedger, numbered, require_room
from propcheck.measure.measured_pass import PassMeasurers
from propcheck.measure.nonfinite import NonfiniteSearch
from propcheck.measure.nonfinite_gradients import GradientSearch
from propcheck.measure.padding import padding_masks, real_positions
from propcheck.measure.parameters import census as take_census
from propcheck.measure.site_rows import norm_records
from propcheck.measure.statistics import Logits, logit_statistics
from propcheck.measure.weight_calls import weight_runners
from propcheck.targets.target import call
from propcheck.tracing.tracer import Tracer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.deferred_init.record import Entry
    from propcheck.execution.build import BuiltTarget
    from propcheck.execution.plan import Unit
    from propcheck.measure.fp32_reference import Casts, Deviation, Draws, Spool
    from propcheck.measure.measured_pass import MeasuredSite
    from propcheck.measure.parameters import Census
    from propcheck.records import Angle, Doubling, NormRecord, Origin
    from propcheck.targets.losses import Loss
    from propcheck.targets.target import Task

    Progress = Callable[[str, int | None, int, float], None]


@dataclass(frozen=True, slots=True)
class Pass:
    """Result of one pass over one seed."""

    class_name: str
    mode: str
    largest_unit: tuple[str, int]  # path, and bytes of its parameters
    blocks: int
    entries: tuple[Entry, ...]
    block_of: dict[str, int | None]  # by parameter
    init_calls: dict[str, str | None]
    census: dict[str, Census]
    fp64_errors: dict[str, float | None]  # as ``Materializer.fp64_error``
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
class Resources:
    """What a pass runs on.

    Attributes
    ----------
    budget
        Bytes for the whole process.
    device
        Where the model runs.
    workers
        Threads for filling weights.
    """

    budget: int
    device: torch.device
    workers: Workers


@dataclass(frozen=True, slots=True)
class PassSettings:
    """How a pass is run.

    Attributes
    ----------
    watched
        Check every result, to find what makes non-finite numbers.
    wide
        Widen weights and inputs to fp32, and run without autocast.
    spool
        Where the values of the additions are kept.
    noted
        Records some of the functions that the forward pass calls.
    whole_model_reason
        Why the model cannot run unit by unit; None: it runs unit by unit.
    progress
        Called with phase, block, number of blocks, and the fraction of the work that is done.
    """

    watched: bool = False
    wide: bool = False
    spool: Spool | None = None
    noted: Draws | Casts | None = None
    whole_model_reason: str | None = None
    progress: Progress | None = None

    @property
    def is_main(self) -> bool:
        """Whether it is the pass whose weights are reported, and not one that accompanies it."""
        return not (self.watched or self.wide)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A model that is ready to run, with all that observes it."""

    task: Task
    seed: int
    settings: PassSettings
    built: BuiltTarget
    batch: Any
    masks: tuple[Tensor, ...]
    units: list[Unit]
    blocks: dict[str, int]
    planned: Plan
    measurers: PassMeasurers
    search: NonfiniteSearch | None
    state: PassState
    census: dict[str, Census]


def run_pass(task: Task, seed: int, resources: Resources, settings: PassSettings) -> Pass:
    """Run one forward and one backward pass of ``task``.

    Raises
    ------
    IsolationError
        If the model cannot run unit by unit, and ``settings`` give no reason to run it whole.
    PropcheckError
        If the target is none that can be scanned, or does not fit the memory budget.
    """
    prepared = _prepare(task, seed, resources, settings)
    loss = _forward_and_backward(prepared, resources.device)
    return _collect(prepared, loss)


def _prepare(  # noqa: PLR0914 - it puts together what a pass consists of
    task: Task, seed: int, resources: Resources, settings: PassSettings
) -> _Prepared:
    """Build the model, plan what stays in memory, and attach what observes it."""
    device, workers = resources.device, resources.workers
    built = build(task, seed, budget=resources.budget, device=device, workers=workers)
    if settings.wide:
        task = dataclasses.replace(task, autocast=None, loss_scale=1.0)
        built = widened(built, seed=seed, device=device, workers=workers)
    units, permanent, blocks = divide(built.recording.model, built.recording.entries, built.target.blocks)
    batch = batch_of(task, built, seed)
    if settings.wide:
        batch = wide_batch(batch)
        widen_in_memory(built, resources.budget - resident_bytes())
    available = resources.budget - resident_bytes() + built.held
    planned = _plan(built, units, permanent, available, batch, settings)
    census: dict[str, Census] = {}
    weights = Weights(
        built.recording,
        partial(built.materializer.materialize, seed=seed),
        units,
        device=device,
        census=_census_taker(census, workers) if settings.is_main else lambda _entry, _value: None,
    )
    staying = permanent if settings.whole_model_reason is None else built.recording.entries
    weights.bring_permanently(staying)
    built.outside_tensors.stand_in({id(built.recording.tensors[name]): tensor for name, tensor in weights.tensors.items()})
    masks = padding_masks(batch)
    measurers = PassMeasurers(masks, settings.spool)
    search = None
    if settings.watched:
        gradient_search = GradientSearch(seed, shape_of(batch), is_segment)
        search = NonfiniteSearch(measurers.additions, gradient_search, shape=shape_of(batch), blocks=blocks)
    names = {id(tensor): name for name, tensor in weights.tensors.items()}
    ledger = LateLedger()
    state = PassState(
        tracer=Tracer(names, runners=weight_runners(names, ledger)),
        ledger=ledger,
        weights=weights,
        outside_tensors=built.outside_tensors,
        seed=seed,
        resident=planned.resident,
        progress=_meter(units, len(blocks), settings.progress),
        entries={entry.name: entry for entry in built.recording.entries},
        names=names,
        units=units,
        room=None if planned.mode == "resident" else available - sum(entry.nbytes for entry in permanent),
        budget=resources.budget,
        occupied=resident_bytes,
    )
    state.outside.update((entry.name, entry) for entry in staying)
    state.listeners = measurers.listeners(state, *(() if search is None else (search,)))
    state.tracer.listeners.subscribed = state.listeners.forward
    if settings.spool is not None:
        settings.spool.restart(masks)
    return _Prepared(task, seed, settings, built, batch, masks, units, blocks, planned, measurers, search, state, census)


def _forward_and_backward(prepared: _Prepared, device: torch.device) -> Loss:
    """Run the model and differentiate its loss."""
    task, state, built, tracer = prepared.task, prepared.state, prepared.built, prepared.state.tracer
    model, is_whole = built.recording.model, prepared.settings.whole_model_reason is not None
    with ExitStack() as stack:
        stack.enter_context(plain_checkpoints())
        for handle in tracer.watch(model, prepared.blocks):
            stack.callback(handle.remove)
        for unit in prepared.units:
            forward = unit.module.forward
            stack.callback(_restore, unit, unit.module.__dict__.get("forward"))
            unit.module.forward = numbered(tracer, unit, forward) if is_whole else isolated_forward(state, unit, forward)
        stack.enter_context(seeded("outside", prepared.seed))
        tracer.begin(prepared.batch)
        with (
            prepared.settings.noted or nullcontext(),
            tracer,
            state.guard,
            built.outside_tensors,
            _autocast(task, device),
        ):
            output = call(model, prepared.batch)
            loss = loss_of(built.target, output, prepared.batch)
        tracer.end(loss.value)
        state.check_loss(loss.value)
        if loss.value.requires_grad:  # else no parameter has a gradient
            state.in_backward = state.ledger.open = True
            (loss.value * task.loss_scale).backward()
        state.check()
    state.settle_all()
    return loss


def _collect(prepared: _Prepared, loss: Loss) -> Pass:
    """Gather what a pass showed."""
    built, units, state, measurers = prepared.built, prepared.units, prepared.state, prepared.measurers
    entries, tracer, scale, is_main = (
        built.recording.entries,
        state.tracer,
        prepared.task.loss_scale,
        prepared.settings.is_main,
    )
    norms = state.ledger.norms
    gradients = _to_floats(list(norms.values()))
    reason = prepared.settings.whole_model_reason
    return Pass(
        class_name=type(built.recording.model).__name__,
        mode=prepared.planned.mode if state.resident == prepared.planned.resident else _mode(units, state.resident),
        largest_unit=max(((unit.path, unit.nbytes) for unit in units), key=lambda unit: unit[1], default=("", 0)),
        blocks=len(prepared.blocks),
        entries=entries,
        block_of={entry.name: unit.block for unit in units for entry in unit.entries},
        init_calls={entry.name: built.materializer.init_calls(entry) for entry in entries},
        census=prepared.census,
        fp64_errors={entry.name: built.materializer.fp64_error(entry, prepared.seed) for entry in entries} if is_main else {},
        roles=tracer.roles,
        sites=measurers.sites(tracer.sites, scale),
        gradients={name: norm / scale for name, norm in zip(norms, gradients, strict=True)},
        loss=float(loss.value.detach()),
        uniform_loss=loss.uniform,
        inputs=shape_of(prepared.batch),
        unobserved=measurers.unobserved.sentences,
        norms=norm_records(measurers.norms.measured, tracer.sites, prepared.seed, tracer.block_of),
        doublings=tracer.doublings,
        angles=measurers.angles.records(tracer.block_of),
        logits=logit_statistics(real_positions(loss.logits, prepared.masks)) if is_main and loss.logits is not None else None,
        used=frozenset(state.used),
        notes=(*built.notes, *(() if reason is None else (f"{reason}; so the whole model was run at once, in memory.",))),
        origins=() if prepared.search is None else prepared.search.origins,
    )


def _census_taker(census: dict[str, Census], workers: Workers) -> Callable[[Entry, Tensor], None]:
    """Return what fills ``census`` as entries come into memory."""

    def take(entry: Entry, value: Tensor) -> None:
        census[entry.name] = take_census(_dense(value), workers)

    return take


def _mode(units: Sequence[Unit], resident: frozenset[str]) -> str:
    """Return the mode of a run whose graphs turned out larger than planned."""
    return "partly resident" if any(unit.path in resident for unit in units if unit.block is not None) else "streamed"


def _plan(  # noqa: PLR0913 - each is another fact that decides what fits
    built: BuiltTarget, units: Sequence[Unit], permanent: Sequence[Entry], available: int, batch: Any, settings: PassSettings
) -> Plan:
    """Choose what stays in memory; refuse a model that must stay as a whole and does not fit."""
    tokens, reason = positions_of(batch), settings.whole_model_reason
    if reason is not None:
        require_room(reason, units, built.recording.entries, available, tokens)
        return Plan(frozenset(unit.path for unit in units), "resident")
    planned = plan(units, available - sum(entry.nbytes for entry in permanent), tokens)
    if not built.recording.recorded and planned.mode != "resident":
        raise PropcheckError(
            f"{built.notes[0].partition('; so')[0]}; so all of it is in memory ({built.held / 2**30:.3g} GiB), which "
            "with its activations does not fit the memory budget; raise --memory, or change that line"
        )
    return planned


def _autocast(task: Task, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, dtype=task.autocast, enabled=task.autocast is not None)


def _dense(value: Tensor) -> Tensor:
    """Return a sparse or quantised tensor as a dense one; only a model that was not recorded has such tensors."""
    value = value.dequantize() if value.is_quantized else value
    return value if value.layout == torch.strided else value.to_dense()


def _to_floats(tensors: list[Tensor]) -> list[float]:
    return torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else []


def _restore(unit: Unit, replaced: object) -> None:
    """Remove the replacement of a unit's forward; ``replaced`` is the attribute that the module itself had there."""
    if replaced is None:
        unit.module.__dict__.pop("forward", None)
    else:
        unit.module.__dict__["forward"] = replaced


def _meter(units: list[Unit], blocks: int, progress: Progress | None) -> Callable[[str, Unit], None]:
    """Return the callback of the units' calls; work is counted in parameters, a backward pass as two forward passes."""
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
