"""Markdown summary of a baseline, which makes its changes readable in a diff."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.profile import profile
from propcheck.formatting import count, number
from propcheck.records.baseline import SUMMARY_TITLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Finding, Place, Run, SiteRecord


def baseline_summary(run: Run) -> str:
    """Summarise a run in Markdown that changes only if the run does: no time, no machine, three significant digits."""
    curve = profile(run)
    lines = [
        f"{SUMMARY_TITLE}{run.target}",
        "",
        "Written by `propcheck gate --update-baseline`. The Parquet file next to it is what the gate compares with.",
        "",
        *_facts(run),
        "",
        "## Depth",
        "",
        "RMS of the stream and of the updates, and gradient norms of the stream and of the parameters.",
        "",
        f"| {curve.noun} | sublayers | stream RMS | update RMS | stream gradient | parameter gradient |",
        "|---|---|---|---|---|---|",
        *(_row(run, curve.noun, unit) for unit in curve.units),
    ]
    if curve.sites:
        last = curve.sites[-1]
        lines.append(f"| after | | {number(last.sum_rms)} | | {number(last.grad_sum_norm)} | |")
    if curve.noun == "block":
        lines.append(f"| outside the blocks | | | | | {number(_parameter_gradient(run, None))} |")
    findings = [_finding_line(finding) for finding in run.findings] or ["None."]
    return "\n".join([*lines, "", "## Findings", "", *findings]) + "\n"


def _facts(run: Run) -> list[str]:
    model, inputs = run.model, run.inputs
    versions = [f"{name} {run.versions[name]}" for name in ("propcheck", "torch") if name in run.versions]
    return [
        f"- model: {model.class_name}, {count(model.parameters, 'parameter')}, width {model.width}",
        f"- depth: {count(model.blocks, 'block')}, {count(model.sites, 'site')}, placement {model.placement}",
        f"- precision: {run.precision}",
        f"- inputs: batch {inputs.batch}, {count(inputs.tokens, 'token')}, {inputs.source}",
        f"- seeds: {', '.join(map(str, run.seeds))}",
        f"- configuration: {run.config_hash[:12]}",
        f"- versions: {', '.join(versions)}",
        f"- first loss: {number(run.loss.value)}; a uniform guess gives {number(run.loss.uniform)}",
    ]


def _row(run: Run, noun: str, unit: Sequence[SiteRecord]) -> str:
    first = unit[0]
    outside = first.block is None
    cells = (
        f"site {first.site}" if outside and noun == "block" else str(first.site if outside else first.block),
        ", ".join(record.sublayer for record in unit),
        number(first.stream_rms),
        ", ".join(number(record.update_rms) for record in unit),
        number(first.grad_stream_norm),
        number(first.param_grad_norm if outside else _parameter_gradient(run, first.block)),
    )
    return f"| {' | '.join(cells)} |"


def _parameter_gradient(run: Run, block: int | None) -> float | None:
    """Return the gradient norm of all parameters of a block, or of those outside the blocks."""
    norms = [record.grad_norm for record in run.parameters if record.block == block and record.grad_norm is not None]
    return math.hypot(*norms) if norms else None


def _finding_line(finding: Finding) -> str:
    place = "" if finding.site is None else _place(finding.site)
    return f"- {finding.severity} {finding.rule} {finding.name}{place}: {' '.join(finding.message.split())}"


def _place(place: Place) -> str:
    parts = [
        "" if place.site is None else f"site {place.site}",
        "" if place.block is None else f"block {place.block}",
        place.parameter or place.module or "",
    ]
    return f" ({', '.join(part for part in parts if part)})" if any(parts) else ""
