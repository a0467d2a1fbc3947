"""Assemble the record of a run from the passes of its seeds."""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from propcheck import __version__
from propcheck.analysis.fan import fans
from propcheck.analysis.growth import with_growth
from propcheck.analysis.idle_experts import idle_experts
from propcheck.analysis.name_patterns import pattern
from propcheck.analysis.theory import predict
from propcheck.config.fingerprint import config_hash
from propcheck.config.probe import TOKEN_SOURCES
from propcheck.records import GradState, InputInfo, LossInfo, ModelInfo, ParameterRecord, Run
from propcheck.targets.precision import precision_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.api.requests import ScanRequest
    from propcheck.config.probe import Probe
    from propcheck.execution.single_pass import Pass
    from propcheck.records import EngineInfo, SiteRecord
    from propcheck.targets.target import Task
    from propcheck.tracing.sites import Site

# Roles whose parameters write the output of a branch.
_WRITING = ("linear", "convolution")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What the passes measured."""

    passes: tuple[Pass, ...]  # one per seed, at least one
    sites: tuple[SiteRecord, ...]
    engine: EngineInfo
    peak_before: int  # peak memory of the process before the passes, in bytes
    brings_batch: bool  # the target supplies its own batch


def assemble(request: ScanRequest, task: Task, measured: Measurement) -> Run:
    """Return the run, without findings and without a path."""
    probe, passes = request.probe, measured.passes
    first, seeds = passes[0], probe.scan.seeds
    run = Run(
        path=None,
        target=request.target,
        model=_model_info(first, [row for row in measured.sites if row.seed == seeds[0]]),
        precision=task.precision or precision_of(entry.dtype for entry in first.entries if entry.kind == "parameter"),
        inputs=_input_info(first, "target" if measured.brings_batch else task.source),
        seeds=tuple(seeds),
        engine=measured.engine,
        versions=_versions(probe),
        loss=_loss_info(passes),
        config_hash=config_hash(probe),
        command=request.command,
        settings=probe.model_dump(mode="json"),
        sites=measured.sites,
        parameters=_parameters(first, passes),
        norms=tuple(norm for seed in passes for norm in seed.norms),
        doublings=first.doublings,
        angles=first.angles,
        origins=tuple(origin for seed in passes for origin in seed.origins),
        unobserved=first.unobserved,
        notes=(*task.notes, *first.notes, *_ignored_inputs(probe, measured), *_over_budget(probe, measured)),
    )
    return with_growth(dataclasses.replace(run, sites=predict(run), notes=(*run.notes, *idle_experts(run))))


def _versions(probe: Probe) -> dict[str, str]:
    versions = {
        "propcheck": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    return {**versions, "transformers": sys.modules["transformers"].__version__} if probe.kind == "huggingface" else versions


def _loss_info(passes: Sequence[Pass]) -> LossInfo:
    """Return means over the seeds, and the largest logit of all."""
    losses = [seed.loss for seed in passes]
    logits = [seed.logits for seed in passes if seed.logits is not None]
    return LossInfo(
        value=sum(losses) / len(losses),
        uniform=passes[0].uniform_loss,
        logit_std=sum(seed.std for seed in logits) / len(logits) if logits else None,
        logit_absmax=max(seed.absmax for seed in logits) if logits else None,
        lowest=min(losses) if len(losses) > 1 else None,
        highest=max(losses) if len(losses) > 1 else None,
        by_seed=tuple(losses),
    )


def _input_info(first: Pass, source: str) -> InputInfo:
    """Describe the inputs; for anything but token ids, tokens are the positions of the stream."""
    batch, tokens = first.inputs
    shape = first.sites[0].shape if first.sites else ()
    if source in TOKEN_SOURCES or len(shape) < 3 or shape[0] != batch:
        return InputInfo(batch, tokens, source)
    return InputInfo(batch, math.prod(shape[1:-1]), source)


def _ignored_inputs(probe: Probe, measured: Measurement) -> tuple[str, ...]:
    ignored = [f"inputs.{key}" for key in sorted(probe.inputs.model_fields_set)]
    if not measured.brings_batch or not ignored:
        return ()
    return (f"The target supplies its own batch; ignored: {', '.join(ignored)}.",)


def _over_budget(probe: Probe, measured: Measurement) -> tuple[str, ...]:
    peak, budget = measured.engine.peak_rss_bytes, probe.scan.memory_bytes
    if budget is None or not measured.peak_before < peak or peak <= budget:
        return ()
    path, size = measured.passes[0].largest_unit
    note = (
        f"Peak memory was {peak / 2**30:.3g} GiB, above the budget of {budget / 2**30:.3g} GiB: a scan needs at least its "
        f"libraries (about 0.5 GiB), the activations, and the largest part of the model, {path} ({size / 2**30:.3g} GiB)."
    )
    return (note,)


def _model_info(first: Pass, rows: Sequence[SiteRecord]) -> ModelInfo:
    kinds = list(dict.fromkeys(row.placement for row in rows if row.placement is not None))
    return ModelInfo(
        class_name=first.class_name,
        parameters=sum(entry.numel for entry in first.entries if entry.kind == "parameter"),
        blocks=first.blocks,
        sites=len(rows),
        width=first.sites[0].shape[-1] if first.sites else 0,
        placement=kinds[0] if len(kinds) == 1 else "mixed" if kinds else "none",
    )


def _parameters(first: Pass, passes: Sequence[Pass]) -> tuple[ParameterRecord, ...]:
    """Return the rows of ``parameters.parquet``: those of the first seed, with the spread of the gradients over all seeds."""
    owners: dict[str, Site] = {}
    branches = Counter(name for site in first.sites for name in site.branch.parameters)
    writers: set[tuple[str, int]] = set()  # pattern and site: any expert of a mixture may have been traced as the writer
    for site in first.sites:
        writers |= {(pattern(name), site.number) for name in site.branch.output}
        for name in site.branch.parameters:
            owners.setdefault(name, site)
    records = []
    for entry in first.entries:
        values = first.census.get(entry.name)
        gradient = first.gradients.get(entry.name)
        role = first.roles.get(entry.name)
        fan_in, fan_out = fans(entry.shape, role)
        owner = owners.get(entry.name)
        records.append(
            ParameterRecord(
                name=" = ".join(entry.names),
                role=role,
                block=first.block_of.get(entry.name),
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
                init_calls=first.init_calls[entry.name],
                **({} if values is None else dataclasses.asdict(values)),
                fp64_error=first.fp64_errors[entry.name],
                requires_grad=entry.requires_grad,
                grad_state=_grad_state(gradient) if entry.kind == "parameter" else None,
                grad_norm=gradient,
                grad_spread=_spread([seed.gradients.get(entry.name) for seed in passes]),
                used=any(name in first.used for name in entry.names),
            )
        )
    return tuple(records)


def _spread(norms: Sequence[float | None]) -> float | None:
    """Return the standard deviation of the logarithms; None with one seed or if a logarithm is not finite."""
    logs = [math.log(norm) for norm in norms if norm is not None and 0 < norm < math.inf]
    return statistics.stdev(logs) if 1 < len(logs) == len(norms) else None


def _grad_state(norm: float | None) -> GradState:
    if norm is None:
        return "none"
    if math.isnan(norm) or norm == math.inf:
        return "nonfinite"
    return "norm" if norm else "zero"
