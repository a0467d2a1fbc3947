"""Run the passes of one seed: the main pass, an fp32 pass if asked for, and a watched pass if a number is not finite."""

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
from propcheck.execution.single_pass import PassSettings, Resources, run_pass
from propcheck.execution.whole_model import IsolationError
from propcheck.measure.fp32_reference import Casts, Draws, KeptPass, Spool, compare
from propcheck.tracing.tensors import is_narrow, is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.execution.single_pass import Pass, Progress
    from propcheck.targets.target import Task


def execute(  # noqa: PLR0913 - one keyword per setting of a scan
    task: Task,
    seed: int,
    *,
    memory: int | None,
    device: torch.device,
    workers: Workers,
    progress: Progress | None = None,
    shadow: bool = False,
) -> Pass:
    """Run the main pass, the fp32 pass if ``shadow`` is set, and a watched pass if a number is not finite.

    A model that cannot run unit by unit is built again and runs whole.

    Parameters
    ----------
    task
        What to run.
    seed
        Seed of weights, inputs and random calls in the forward pass.
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
    resources = Resources(free_memory() if memory is None else memory, device, workers)
    attempt = partial(_run_by_units_or_whole, task, seed, resources)
    # Whatever the caller's own code has switched off.
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        result = _with_shadow(attempt, task, device, progress) if shadow else attempt(PassSettings(progress=progress))
        return result if _is_finite(result) else _with_origins(result, attempt, progress)


def _with_origins(result: Pass, attempt: Callable[[PassSettings], Pass], progress: Progress | None) -> Pass:
    """Run a pass that is not finite again, watched, and add the operations that made it so."""
    gc.collect()  # the first one's model and graph
    try:
        watched = attempt(PassSettings(watched=True, progress=_stage(progress, "looking", 1.0, 0.0)))
    except Exception as error:  # noqa: BLE001 - the result of the first pass stands without it
        what = str(error).partition("\n")[0]
        note = f"Could not locate the source of the NaN or infinity: the second pass ended with {type(error).__name__}: {what}."
        return dataclasses.replace(result, notes=(*result.notes, note))
    return dataclasses.replace(result, origins=watched.origins)


def _with_shadow(attempt: Callable[[PassSettings], Pass], task: Task, device: torch.device, progress: Progress | None) -> Pass:
    """Run a pass, and the same in fp32, and compare them."""
    with Spool() as kept, Spool() as wide_spool:
        draws, casts = Draws(device), Casts()
        result = attempt(PassSettings(spool=kept, noted=draws, progress=_stage(progress, None, 0.0, 0.5)))
        if not has_narrow(result.entries) and task.autocast is None:
            note = "No fp32 pass was run: all parameters are fp32 or wider, and without autocast it would be identical."
            return dataclasses.replace(result, notes=(*result.notes, note))
        gc.collect()
        try:
            fp32 = attempt(PassSettings(wide=True, spool=wide_spool, noted=casts, progress=_stage(progress, "fp32", 0.5, 0.5)))
        except PropcheckError:
            raise
        except Exception as error:  # in training precision it ran
            what = str(error).partition("\n")[0]
            raise PropcheckError(
                f"scan.shadow: the model does not run in fp32 ({type(error).__name__}: {what}); its code may name a dtype; "
                "scan without --shadow"
            ) from error
        deviations = compare(KeptPass(kept, result.sites, task.loss_scale), KeptPass(wide_spool, fp32.sites))
    return dataclasses.replace(result, shadow=deviations, notes=(*result.notes, *_shadow_notes(result, fp32, draws, casts)))


def _shadow_notes(result: Pass, fp32: Pass, draws: Draws, casts: Casts) -> tuple[str, ...]:
    """Note where the fp32 pass shows more or less than the rounding of the main pass."""
    notes = [f"Of the fp32 pass: {note}" for note in fp32.notes if note not in result.notes]
    if draws.found:
        notes.append(
            f"The forward pass draws random numbers in half precision ({', '.join(sorted(draws.found))}). The fp32 pass may "
            "draw others, so its differences are not rounding alone."
        )
    narrow = sum(is_narrow(site.stream_dtype) or is_narrow(site.update_dtype) for site in fp32.sites)
    if narrow:
        notes.append(
            f"At {narrow} of {len(fp32.sites)} sites the fp32 pass also adds in half precision, because the model's code casts "
            "to it. The comparison does not show that rounding."
        )
    elif casts.found:
        notes.append(
            f"Between additions, the fp32 pass also computes in half precision, because the model's code casts to it "
            f"({', '.join(sorted(casts.found))}). The comparison does not show that rounding."
        )
    return tuple(notes)


def _stage(progress: Progress | None, name: str | None, start: float, share: float) -> Progress | None:
    """Return the progress callback for a part of the work."""
    if progress is None:
        return None
    return lambda phase, block, blocks, done: progress(phase if name is None else name, block, blocks, start + share * done)


def _is_finite(result: Pass) -> bool:
    """Return whether sums, updates, loss and gradients of a pass are all finite."""
    if not all(map(math.isfinite, (result.loss, *result.gradients.values()))):
        return False
    measured = [
        tensor
        for site in result.sites
        for tensor in (site.statistics.update.mean_square, site.statistics.total.mean_square, *site.gradients.values())
        if not is_transformed(tensor)  # of one example of a vmap: unreadable
    ]
    return all(bool(torch.isfinite(tensor)) for tensor in measured)


def _run_by_units_or_whole(task: Task, seed: int, resources: Resources, settings: PassSettings) -> Pass:
    try:
        return run_pass(task, seed, resources, settings)
    except IsolationError as error:
        reason = str(error)
    gc.collect()  # the first attempt's model and graph
    return run_pass(task, seed, resources, dataclasses.replace(settings, whole_model_reason=reason))
