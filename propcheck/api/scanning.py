"""A whole scan: probe in, run out."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from propcheck import __version__
from propcheck.analysis.fan import fans
from propcheck.analysis.idle_experts import idle_experts
from propcheck.analysis.name_patterns import pattern
from propcheck.analysis.theory import predict
from propcheck.config.probe import TOKEN_SOURCES, config_hash
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.errors import PropcheckError
from propcheck.execution.memory import free_memory, peak_rss_bytes
from propcheck.execution.passes import execute
from propcheck.measure.fp32_reference import with_shadow
from propcheck.measure.site_rows import site_records
from propcheck.records import EngineInfo, GradState, InputInfo, LossInfo, ModelInfo, ParameterRecord, Run
from propcheck.targets.from_probe import task_of
from propcheck.targets.precision import described
from propcheck.targets.user_errors import target_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from propcheck.config.probe import Probe
    from propcheck.execution.single_pass import Pass
    from propcheck.progress import Progress
    from propcheck.records import NormRecord, SiteRecord
    from propcheck.targets.target import Target, Task
    from propcheck.tracing.sites import Site


_WORTH_COLLECTING = 1 << 24  # elements


def scan(
    probe: Probe,
    *,
    target: str,
    task: Callable[[Probe], Task] | None = None,
    progress: Progress | None = None,
    command: str | None = None,
    threads: int | None = None,
) -> Run:
    """Build the model of ``probe``, run it forward and backward once for each seed, and return all that was seen.

    Parameters
    ----------
    probe
        What to scan.
    target
        How the user named it.
    task
        Returns what runs; by default what the probe names.
    progress
        Told how far the scan is.
    command
        The command line, kept in the run.
    threads
        For torch and for filling weights; by default as many as torch takes.

    Returns
    -------
    Run
        Without findings and without a path.

    Raises
    ------
    PropcheckError
        If the target, the device or the inputs are not there, or the target's code raises; that one's place is named.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with _restored():
            chosen = (task or task_of)(probe)
            with chosen.around():
                return _scan(probe, chosen, target, progress, command)
    except PropcheckError:
        raise
    except (Exception, SystemExit) as error:  # code that ends the program says nothing about its model
        theirs = target_error(error, target)
        if theirs is None:
            raise
        raise theirs from error


@contextmanager
def _restored() -> Iterator[None]:
    """Put back what the target's code may change for the whole process."""
    directory, dtype = Path.cwd(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.chdir(directory)
        torch.set_default_dtype(dtype)


def _scan(probe: Probe, task: Task, target: str, progress: Progress | None, command: str | None) -> Run:
    started = time.perf_counter()
    peak_before = peak_rss_bytes()
    device = _device(probe.scan.device)
    memory = probe.scan.memory_bytes
    brings_batch = False

    def build() -> Target:
        nonlocal brings_batch
        target = task.build()
        brings_batch = target.batch is not None
        return target

    watched = dataclasses.replace(task, build=build)
    seeds = probe.scan.seeds
    passes: list[Pass] = []
    rows: list[SiteRecord] = []
    norms: list[NormRecord] = []
    if progress is not None:
        progress.start(float(len(seeds)))
    try:
        with Workers(torch.get_num_threads()) as workers:
            for index, seed in enumerate(seeds):

                def report(phase: str, block: int | None, blocks: int, done: float, index: int = index) -> None:
                    if progress is not None:
                        progress.update(phase, block, blocks, index + done)

                one = execute(
                    watched,
                    seed,
                    memory=memory,
                    device=device,
                    workers=workers,
                    progress=report,
                    shadow=probe.scan.shadow == "fp32",
                )
                rows += with_shadow(site_records(one.sites, seed, one.gradients), one.shadow)
                norms += one.norms
                passes.append(one)
                # It lies in cycles, and the budget of the next seed or scan is for one model. Small ones are not worth it.
                if sum(entry.numel for entry in one.entries) >= _WORTH_COLLECTING:
                    gc.collect()
    finally:
        if progress is not None:
            progress.stop()
    first = passes[0]
    peak = peak_rss_bytes()
    own = [row for row in rows if row.seed == seeds[0]]
    run = Run(
        path=None,
        target=target,
        model=_model_info(first, own),
        precision=task.precision or described(entry.dtype for entry in first.entries if entry.kind == "parameter"),
        inputs=_input_info(first, "target" if brings_batch else task.source),
        seeds=tuple(seeds),
        engine=EngineInfo(
            mode=first.mode,
            wall_seconds=time.perf_counter() - started,
            peak_rss_bytes=peak,
            threads=torch.get_num_threads(),
            device=str(device),
            memory_budget_bytes=memory or free_memory(),
        ),
        versions={
            "propcheck": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            **({"transformers": sys.modules["transformers"].__version__} if probe.kind == "huggingface" else {}),
        },
        loss=_loss_info(passes),
        config_hash=config_hash(probe),
        command=command,
        settings=probe.model_dump(mode="json"),
        sites=tuple(rows),
        parameters=_parameters(first, passes),
        norms=tuple(norms),
        doublings=first.doublings,
        angles=first.angles,
        origins=tuple(origin for one in passes for origin in one.origins),
        unobserved=first.unobserved,
        notes=(
            *task.notes,
            *first.notes,
            *_unused_inputs(probe, brings_batch=brings_batch),
            *(_over_budget(first, peak, memory) if memory is not None and peak_before < peak else ()),
        ),
    )
    return dataclasses.replace(run, sites=predict(run), notes=(*run.notes, *idle_experts(run)))


def _loss_info(passes: list[Pass]) -> LossInfo:
    """Return means over the seeds; of the largest logit, the largest."""
    losses = [one.loss for one in passes]
    logits = [one.logits for one in passes if one.logits is not None]
    return LossInfo(
        value=sum(losses) / len(losses),
        uniform=passes[0].uniform_loss,
        logit_std=sum(one.std for one in logits) / len(logits) if logits else None,
        logit_absmax=max(one.absmax for one in logits) if logits else None,
        lowest=min(losses) if len(losses) > 1 else None,
        highest=max(losses) if len(losses) > 1 else None,
        by_seed=tuple(losses),
    )


def _input_info(one: Pass, source: str) -> InputInfo:
    """Say what was fed; for anything but token ids, tokens are the positions of the stream."""
    batch, tokens = one.inputs
    shape = one.sites[0].shape if one.sites else ()
    if source in TOKEN_SOURCES or len(shape) < 3 or shape[0] != batch:
        return InputInfo(batch, tokens, source)
    return InputInfo(batch, math.prod(shape[1:-1]), source)


def _unused_inputs(probe: Probe, *, brings_batch: bool) -> tuple[str, ...]:
    given = sorted(probe.inputs.model_fields_set)
    if not brings_batch or not given:
        return ()
    return (f"The target brings its own batch: inputs.{', inputs.'.join(given)} had no use.",)


def _over_budget(one: Pass, peak: int, budget: int) -> tuple[str, ...]:
    if peak <= budget:
        return ()
    path, size = one.largest_unit
    note = (
        f"The peak of {peak / 2**30:.3g} GiB is above the budget of {budget / 2**30:.3g} GiB: a scan cannot use less than its "
        f"libraries (about 0.5 GiB), the activations, and the largest part of the model, {path} ({size / 2**30:.3g} GiB)."
    )
    return (note,)


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise PropcheckError(f"scan.device = {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu")
    return device


def _model_info(one: Pass, rows: list[SiteRecord]) -> ModelInfo:
    kinds = list(dict.fromkeys(row.placement for row in rows if row.placement is not None))
    return ModelInfo(
        class_name=one.class_name,
        parameters=sum(entry.numel for entry in one.entries if entry.kind == "parameter"),
        blocks=one.blocks,
        sites=len(rows),
        width=one.sites[0].shape[-1] if one.sites else 0,
        placement=kinds[0] if len(kinds) == 1 else "mixed" if kinds else "none",
    )


_WRITING = ("linear", "convolution")


def _parameters(one: Pass, passes: Sequence[Pass]) -> tuple[ParameterRecord, ...]:
    """Return the rows of ``parameters.parquet``: those of the first seed, and how far the gradients of all seeds spread."""
    owners: dict[str, Site] = {}
    branches = Counter(name for site in one.sites for name in site.branch.parameters)
    writers: set[tuple[str, int]] = set()  # pattern and site: experts are written by each other's like
    for site in one.sites:
        writers |= {(pattern(name), site.number) for name in site.branch.output}
        for name in site.branch.parameters:
            owners.setdefault(name, site)
    records = []
    for entry in one.entries:
        counted = one.census.get(entry.name)
        gradient = one.gradients.get(entry.name)
        role = one.roles.get(entry.name)
        fan_in, fan_out = fans(entry.shape, role)
        owner = owners.get(entry.name)
        records.append(
            ParameterRecord(
                name=" = ".join(entry.names),
                role=role,
                block=one.block_of.get(entry.name),
                sublayer=None if owner is None else owner.branch.sublayer(),
                kind="buffer" if entry.kind == "buffer" else "parameter",
                shape=entry.shape,
                dtype=str(entry.dtype).removeprefix("torch."),
                numel=entry.numel,
                site=None if owner is None else owner.number,
                branches=branches[entry.name] or None,
                writes=None if owner is None else role in _WRITING and (pattern(entry.name), owner.number) in writers,
                fan_in=fan_in,
                fan_out=fan_out,
                init_calls=one.init_calls[entry.name],
                **({} if counted is None else dataclasses.asdict(counted)),
                fp64_error=one.fp64_errors[entry.name],
                requires_grad=entry.requires_grad,
                grad_state=_grad_state(gradient) if entry.kind == "parameter" else None,
                grad_norm=gradient,
                grad_spread=_spread([seed.gradients.get(entry.name) for seed in passes]),
                used=any(name in one.used for name in entry.names),
            )
        )
    return tuple(records)


def _spread(norms: Sequence[float | None]) -> float | None:
    """Return the standard deviation of the logarithms, or None where there is one seed or a logarithm is not finite."""
    logs = [math.log(norm) for norm in norms if norm is not None and 0 < norm < math.inf]
    return statistics.stdev(logs) if 1 < len(logs) == len(norms) else None


def _grad_state(norm: float | None) -> GradState:
    if norm is None:
        return "none"
    if norm != norm or norm == float("inf"):  # noqa: PLR0124 - NaN
        return "nonfinite"
    return "norm" if norm else "zero"
