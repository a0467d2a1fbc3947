"""Summary of a run in sentences, and its title line: shared by the table, Markdown and the machine-readable formats."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.growth import describe, factor, growths
from propcheck.analysis.profile import NORM_ON_STREAM, profile, streams
from propcheck.formatting import count, number, percent
from propcheck.records import SEVERITIES, SiteRecord
from propcheck.records.columns import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Finding, Growth, Run, StreamGrowth

# Inputs that are not token ids of the probe.
_OTHER_SOURCES = {"target": "from the target", "normal": "drawn from N(0, 1)"}
# Exponents of a stream to which all updates add the same RMS; without a norm on the stream.
_STREAM_REFERENCE = "equal updates give 0.5"
_GRADIENT_REFERENCE = "equal updates give -0.5, gated branches -1"


def title(run: Run) -> str:
    """Describe the scanned model in one line: target, class, size, placement, precision."""
    model = run.model
    # A run that was loaded from its sites alone has no parameters.
    size = f"{model.class_name}, {_abbreviated(model.parameters)} parameters" if model.parameters else "sites only"
    return (
        f"{run.target}: {size}, {count(model.blocks, 'block')}, "
        f"{count(model.sites, 'site')}, width {model.width}, placement {model.placement}, {run.precision}"
    )


def _abbreviated(value: int) -> str:
    for unit, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{number(value / unit)}{suffix}"
    return str(value)


def finding_counts(findings: Sequence[Finding]) -> str:
    """Return ``1 error, 0 warnings, 3 notes``."""
    return ", ".join(count(sum(finding.severity == severity for finding in findings), severity) for severity in SEVERITIES)


def summary_lines(run: Run) -> list[str]:
    """Summarise a run: growth over the depth, loss, logits, error against fp32, spread of the seeds, engine, findings, notes.

    Returns
    -------
    list of str
        One or two sentences per line.
    """
    lines = [
        *_growth_lines(run),
        _loss_line(run),
        _logits_line(run),
        shadow_line(run),
        _seeds_line(run),
        _engine_line(run),
        f"Findings: {finding_counts(run.findings)}.",
        *run.notes,
        "" if run.path is None else f"Files: {run.path}",
    ]
    return [line for line in lines if line]


def _growth_lines(run: Run) -> list[str]:
    """Describe the growth of the only stream, or of every stream with enough blocks."""
    pairs = list(zip(streams(run), growths(run), strict=True))
    if not pairs:
        return ["Stream RMS and gradient: no site observed."]
    if len(pairs) > 1:
        pairs = [(stream, growth) for stream, growth in pairs if growth.stream is not None]
    return [line for stream, growth in pairs for line in _lines_of_stream(stream, growth)]


def _lines_of_stream(stream: Profile, growth: StreamGrowth) -> tuple[str, str]:
    normed = any(record.placement in NORM_ON_STREAM for record in stream.sites)
    forward = _growth_text(growth.stream, stream.noun, "after", "" if normed else _STREAM_REFERENCE)
    backward = _growth_text(growth.gradient, stream.noun, "before", "" if normed else _GRADIENT_REFERENCE)
    return f"Stream RMS{forward}", f"Gradient norm{backward}"


def _growth_text(growth: Growth | None, noun: str, side: str, reference: str) -> str:
    if growth is None:
        return f": too few {noun}s observed for a factor per {noun}."
    law = f", {describe(growth, noun)}" if growth.law is not None else ""
    if reference and growth.law == "power" and growth.offset is not None:
        law += f" ({reference})"
    return (
        f" {number(growth.start)} {side} {noun} {growth.first}, {number(growth.end)} {side} {noun} {growth.last}: "
        f"x{factor(growth.factor)} per {noun}{' backward' if side == 'before' else ''}, x{number(growth.total)} over "
        f"{count(growth.steps, noun)}{law}; growth exponent {number(growth.growth_exponent)}."
    )


def _loss_line(run: Run) -> str:
    loss = run.loss
    if loss.value is None:
        return "First loss: not observed."
    text = f"First loss {_loss(loss.value)}"
    if loss.lowest is not None and loss.highest is not None:
        text += f" ({_loss(loss.lowest)} to {_loss(loss.highest)} over the seeds)"
    if loss.uniform is not None:
        text += f"; a uniform guess gives ln({round(math.exp(loss.uniform))}) = {_loss(loss.uniform)}"
    return f"{text}."


def _loss(value: float) -> str:
    return f"{value:.3f}" if 0.01 < abs(value) < 1000 else number(value)


def _logits_line(run: Run) -> str:
    """Describe the scale of the logits, and the gradients of the token embedding and of the head."""
    loss = run.loss
    if loss.logit_std is None or loss.uniform is None:
        return ""
    vocabulary = round(math.exp(loss.uniform))
    matrices = {
        record.role: record
        for record in reversed(run.parameters)  # the first of each role
        if record.block is None and record.shape[:1] == (vocabulary,) and len(record.shape) == 2
    }
    gradients = [
        f"{name} {number(matrices[role].grad_norm)}"
        for name, role in (("embedding", "embedding"), ("head", "linear"))
        if role in matrices and matrices[role].grad_norm is not None
    ]
    tied = " (tied to the head)" if len(gradients) == 1 and any(" = " in record.name for record in matrices.values()) else ""
    text = f"Logits: std {number(loss.logit_std)} over the vocabulary, largest magnitude {number(loss.logit_absmax)}."
    return f"{text} Gradient norm: {', '.join(gradients)}{tied}." if gradients else text


def shadow_line(run: Run) -> str:
    """Describe the error against the fp32 pass, the worst of all seeds; empty without such a pass."""
    last = max((record.site for record in run.sites), default=None)
    stream = _worst((record.shadow_stream_error, record.site) for record in run.sites if record.site == last)
    update = _worst((record.shadow_update_error, record.site) for record in run.sites)
    gradient = _worst(
        (value, record.site)
        for record in run.sites
        for value in (record.shadow_grad_stream_error, record.shadow_grad_update_error)
    )
    parts = [
        None if stream is None else f"the stream differs by {_share(stream[0])} at the last site",
        None if update is None else f"updates by at most {_share(update[0])} (site {update[1]})",
        None if gradient is None else f"gradients by at most {_share(gradient[0])} (site {gradient[1]})",
    ]
    observed = [part for part in parts if part is not None]
    return f"Compared with fp32: {', '.join(observed)}." if observed else ""


def _worst(errors: Iterable[tuple[float | None, int]]) -> tuple[float, int] | None:
    """Return the largest error with its site; NaN is larger than any number."""
    observed = [(error, site) for error, site in errors if error is not None]
    return max(observed, key=lambda pair: (math.isnan(pair[0]), pair[0]), default=None)


def _share(value: float) -> str:
    return percent(value) if math.isfinite(value) else number(value)


def _seeds_line(run: Run) -> str:
    """Describe how far the seeds differ: the largest highest / lowest over the sites, for the sum and for the gradient."""
    seeds = len({record.seed for record in run.sites})
    if seeds < 2:
        return ""
    parts = [
        f"{columns_of(SiteRecord)[name].label} x{number(ratio)} (site {site})"
        for name in ("sum_rms", "grad_stream_norm")
        if (widest := _widest(run, name)) is not None
        for site, ratio in [widest]
    ]
    spread = f" Largest ratio between two seeds: {', '.join(parts)}." if parts else ""
    return f"Values are medians over {count(seeds, 'seed')}.{spread}"


def _widest(run: Run, name: str) -> tuple[int, float] | None:
    values: dict[int, list[float]] = {record.site: [] for record in profile(run).sites}
    for record in run.sites:
        value = getattr(record, name)
        if value is not None and 0 < value < math.inf:
            values[record.site].append(value)
    ratios = {site: max(of_seeds) / min(of_seeds) for site, of_seeds in values.items() if len(of_seeds) > 1}
    return max(ratios.items(), key=lambda item: item[1]) if ratios else None


def _engine_line(run: Run) -> str:
    engine, inputs = run.engine, run.inputs
    batch = f"{count(inputs.batch, 'sequence')} of {count(inputs.tokens, 'token')} ({inputs.source})"
    if inputs.source in _OTHER_SOURCES:
        batch = f"batch of {inputs.batch} with {count(inputs.tokens, 'position')} each ({_OTHER_SOURCES[inputs.source]})"
    return (
        f"{engine.mode.capitalize()}, {batch}, "
        f"{count(len(run.seeds), 'seed')}: {number(engine.wall_seconds)} s on {engine.device} with "
        f"{count(engine.threads, 'thread')}, peak {number(engine.peak_rss_bytes / 2**30)} GiB."
    )
