"""The passes of one seed: the one that is asked for, the same in fp32 beside it, and a watched one where it is not finite."""

from __future__ import annotations

import dataclasses
import gc
import math
from functools import partial
from typing import TYPE_CHECKING

import torch

from propcheck.errors import PropcheckError
from propcheck.execution.fp32_model import has_narrow
from propcheck.execution.memory import free_memory
from propcheck.execution.single_pass import Manner, run_once
from propcheck.execution.whole_model import CannotCutError
from propcheck.measure.fp32_reference import Casts, Draws, KeptPass, Spool, compare
from propcheck.tracing.tensors import is_narrow, is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.execution.single_pass import Pass, Progress
    from propcheck.targets.target import Task


def execute(
    task: Task,
    seed: int,
    *,
    memory: int | None,
    device: torch.device,
    workers: Workers,
    progress: Progress | None = None,
    shadow: bool = False,
) -> Pass:
    """Run ``task`` once; once more beside it in fp32 if a shadow is asked for, and once more watched if it is not finite.

    A model that cannot be cut into units is built and run again, whole.

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
    shadow
        Whether to compare the pass with one of the same weights in fp32.

    Raises
    ------
    PropcheckError
        If the target is none that can be scanned, or can be scanned only whole and is too large for that.
    """
    budget = free_memory() if memory is None else memory
    attempt = partial(_cut_or_whole, task, seed, budget, device, workers)
    # Whatever the caller's own code has switched off.
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        one = _with_shadow(attempt, task, device, progress) if shadow else attempt(progress, Manner())
        return one if _is_finite(one) else _with_origins(one, attempt, progress)


def _with_origins(one: Pass, attempt: Callable[[Progress | None, Manner], Pass], progress: Progress | None) -> Pass:
    """Run a pass that is not finite again, and return it with what made it so."""
    gc.collect()  # the first one's model and graph
    try:
        watched = attempt(_stage(progress, "looking", 1.0, 0.0), Manner(watched=True))
    except Exception as error:  # noqa: BLE001 - what the first pass showed counts without it
        what = str(error).partition("\n")[0]
        note = f"What made the pass not finite was not found: run again, it ends with {type(error).__name__}: {what}."
        return dataclasses.replace(one, notes=(*one.notes, note))
    return dataclasses.replace(one, origins=watched.origins)


def _with_shadow(
    attempt: Callable[[Progress | None, Manner], Pass], task: Task, device: torch.device, progress: Progress | None
) -> Pass:
    """Run a pass, and the same in fp32, and compare them."""
    with Spool() as kept, Spool() as beside:
        draws, casts = Draws(device), Casts()
        one = attempt(_stage(progress, None, 0.0, 0.5), Manner(spool=kept, noted=draws))
        if not has_narrow(one.entries) and task.autocast is None:
            note = (
                "No shadow was run: every parameter has fp32 or more and nothing runs under autocast, so it would be this very "
                "pass."
            )
            return dataclasses.replace(one, notes=(*one.notes, note))
        gc.collect()
        try:
            other = attempt(_stage(progress, "fp32", 0.5, 0.5), Manner(wide=True, spool=beside, noted=casts))
        except PropcheckError:
            raise
        except Exception as error:  # in training precision it ran
            what = str(error).partition("\n")[0]
            raise PropcheckError(
                f"scan.shadow: the model does not run in fp32 ({type(error).__name__}: {what}); its code may ask for a dtype "
                "by name; scan without a shadow"
            ) from error
        deviations = compare(KeptPass(kept, one.sites, task.loss_scale), KeptPass(beside, other.sites))
    return dataclasses.replace(one, shadow=deviations, notes=(*one.notes, *_shadow_notes(one, other, draws, casts)))


def _shadow_notes(one: Pass, other: Pass, draws: Draws, casts: Casts) -> tuple[str, ...]:
    """Say where a shadow shows something else than rounding, or less than all of it."""
    notes = [f"Of the fp32 pass: {note}" for note in other.notes if note not in one.notes]
    if draws.found:
        notes.append(
            f"The forward pass draws random numbers in half precision ({', '.join(sorted(draws.found))}), and the shadow may "
            "draw others in fp32: its differences show that too, not rounding alone."
        )
    narrow = sum(is_narrow(site.stream_dtype) or is_narrow(site.update_dtype) for site in other.sites)
    if narrow:
        notes.append(
            f"At {narrow} of {len(other.sites)} sites the shadow adds in half precision too, since the model's own code casts "
            "to it: of that rounding it shows nothing."
        )
    elif casts.found:
        notes.append(
            f"Between its additions the shadow computes in half precision too, since the model's own code casts to it "
            f"({', '.join(sorted(casts.found))}): of that rounding it shows nothing."
        )
    return tuple(notes)


def _stage(progress: Progress | None, name: str | None, start: float, share: float) -> Progress | None:
    """Return what a part of the work reports to."""
    if progress is None:
        return None
    return lambda phase, block, blocks, done: progress(phase if name is None else name, block, blocks, start + share * done)


def _is_finite(one: Pass) -> bool:
    """Whether everything that a pass showed is finite: sums, updates, loss and gradients."""
    if not all(map(math.isfinite, (one.loss, *one.gradients.values()))):
        return False
    measured = [
        tensor
        for site in one.sites
        for tensor in (site.statistics.update.mean_square, site.statistics.total.mean_square, *site.gradients.values())
        if not is_transformed(tensor)  # of one example of a vmap: unreadable
    ]
    return all(bool(torch.isfinite(tensor)) for tensor in measured)


def _cut_or_whole(
    task: Task,
    seed: int,
    budget: int,
    device: torch.device,
    workers: Workers,
    progress: Progress | None,
    manner: Manner,
) -> Pass:
    try:
        return run_once(task, seed, budget, device, workers, progress, manner, uncut=None)
    except CannotCutError as error:
        reason = str(error)
    gc.collect()  # the first attempt's model and graph
    return run_once(task, seed, budget, device, workers, progress, manner, uncut=reason)
