"""Measure a target: build its model, run it forward and backward once per seed, and record what was seen."""

from __future__ import annotations

import dataclasses
import gc
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from propcheck.api.assemble import Measurement, assemble
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.errors import PropcheckError
from propcheck.execution.memory import free_memory, peak_rss_bytes
from propcheck.execution.passes import execute
from propcheck.measure.fp32_reference import with_shadow
from propcheck.measure.site_rows import site_records
from propcheck.records import EngineInfo
from propcheck.targets.from_probe import task_of
from propcheck.targets.user_errors import target_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from propcheck.api.requests import ScanRequest
    from propcheck.execution.single_pass import Pass
    from propcheck.progress import Progress
    from propcheck.records import Run, SiteRecord
    from propcheck.targets.target import Target, Task

# A model of fewer elements is not worth a collection of cycles between seeds.
_WORTH_COLLECTING = 1 << 24


def measure(request: ScanRequest) -> Run:
    """Measure the target of a request; the run has no findings and no path.

    Raises
    ------
    PropcheckError
        The target, the device or the inputs are missing, or the target's code raises; the message names the line.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        with _process_state_restored():
            task = (request.task or task_of)(request.probe)
            with task.around():
                return _measure(request, task)
    except PropcheckError:
        raise
    except (Exception, SystemExit) as error:  # code that exits the program says nothing about its model
        users_error = target_error(error, request.target)
        if users_error is None:
            raise
        raise users_error from error


@contextmanager
def _process_state_restored() -> Iterator[None]:
    """Restore what the target's code may change for the whole process."""
    directory, dtype = Path.cwd(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.chdir(directory)
        torch.set_default_dtype(dtype)


def _measure(request: ScanRequest, task: Task) -> Run:
    started, peak_before = time.perf_counter(), peak_rss_bytes()
    device, memory = _device(request.probe.scan.device), request.probe.scan.memory_bytes
    brings_batch = False

    def build() -> Target:
        nonlocal brings_batch
        target = task.build()
        brings_batch = target.batch is not None
        return target

    passes, sites = _run_seeds(request, dataclasses.replace(task, build=build), device)
    engine = EngineInfo(
        mode=passes[0].mode,
        wall_seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_rss_bytes(),
        threads=torch.get_num_threads(),
        device=str(device),
        memory_budget_bytes=memory or free_memory(),
    )
    return assemble(request, task, Measurement(passes, sites, engine, peak_before, brings_batch=brings_batch))


def _run_seeds(request: ScanRequest, task: Task, device: torch.device) -> tuple[tuple[Pass, ...], tuple[SiteRecord, ...]]:
    """Run one pass per seed; return the passes and the rows of ``sublayers.parquet``."""
    settings, progress = request.probe.scan, request.progress
    passes: list[Pass] = []
    sites: list[SiteRecord] = []
    if progress is not None:
        progress.start(float(len(settings.seeds)))
    try:
        with Workers(torch.get_num_threads()) as workers:
            for index, seed in enumerate(settings.seeds):
                result = execute(
                    task,
                    seed,
                    memory=settings.memory_bytes,
                    device=device,
                    workers=workers,
                    progress=_reporter(progress, index),
                    shadow=settings.shadow == "fp32",
                )
                sites += with_shadow(site_records(result.sites, seed, result.gradients), result.shadow)
                passes.append(result)
                # The model lies in reference cycles, and the memory budget of the next seed is for one model.
                if sum(entry.numel for entry in result.entries) >= _WORTH_COLLECTING:
                    gc.collect()
    finally:
        if progress is not None:
            progress.stop()
    return tuple(passes), tuple(sites)


def _reporter(progress: Progress | None, seeds_done: int) -> Callable[[str, int | None, int, float], None]:
    def report(phase: str, block: int | None, blocks: int, done: float) -> None:
        if progress is not None:
            progress.update(phase, block, blocks, seeds_done + done)

    return report


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise PropcheckError(f"scan.device = {name!r}: torch sees {torch.cuda.device_count()} CUDA devices here; use cpu")
    return device
