"""PC208: a norm's eps outweighs its input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number, percent
from propcheck.rules.norm_groups import kinds, norms_of, place, site_of, sites, subject
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, ParameterRecord, Run

# Below this share of the output that a norm would have without eps, eps is larger than the statistic: sqrt(s / (s + eps)) at
# s = eps.
_OUTWEIGHED = math.sqrt(0.5)
# A convolution is named as a cause if it is drawn this many times smaller than by torch's default.
_SMALL_CONVOLUTION = 3.0

RULE = Rule(
    scope="run",
    id="PC208",
    name="epsilon-dominated",
    severity="warning",
    threshold=0.5,
    unit="fraction of the vectors whose statistic is below 10 eps",
    sees="A norm whose input is so small that its eps, not the signal, sets the scale of its output.",
    why="x / sqrt(mean(x^2) + eps) normalises only while the mean square is well above eps. Below that it divides by the "
    "constant sqrt(eps): its input keeps its own scale, vectors of different size stay different, and the branch after it "
    "writes less than its init was chosen for.",
    formula="epsilon_share of norms.parquet > threshold. The statistic is the mean square, the variance, or the sum of squares "
    "(for a normalisation to length 1) of each vector; heads count separately. In addition, the norm's output is less than "
    "sqrt(1/2) of what it would be without eps: the RMS of its gain (1 without a gain; times 1 / sqrt(width) for length 1), "
    "since every non-zero vector is brought to that. Input that is exactly zero is a note. One finding per kind of norm. Two "
    "causes are named: a convolution of the same branch drawn 3 times below torch's default, and, at the first norm, an "
    "embedding of the scale of the input. No other cause is claimed.",
    basis="At 10 eps the output is damped by 5 %. At eps itself it is damped to sqrt(1/2): there eps weighs as much as the "
    "signal. Half of the vectors is this tool's own choice; no published cut-off was found.",
    source="Zhang and Sennrich 2019, arXiv 1910.07467 (the scale invariance of RMSNorm, which eps ends); torch.nn.Conv1d "
    "(default init, uniform up to 1 / sqrt(fan_in)).",
    remedy="Raise the norm's input well above the root of its eps: draw the weights before it at their usual scale, a "
    "depthwise convolution by its own fan-in. Or lower eps.",
    example=Example(
        broken="nn.init.normal_(self.conv1d.weight, std=0.02)  # 4 taps; the norm after it reads RMS 1e-4, eps is 1e-6",
        repaired="self.conv1d.reset_parameters()  # torch's default: std 0.29 for 4 taps",
    ),
    caused_by=(("PC209", "any"), ("PC202", "touching"), ("PC203", "touching")),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Judge every norm by the share of its vectors near eps, and by how much eps damps its output."""
    low = [
        norm for norm in norms_of(run) if (norm.epsilon_share or 0.0) > threshold and norm.input_rms is not None and norm.eps
    ]
    return [_hit(group, profile, run) for group in kinds([norm for norm in low if _kept(norm) < _OUTWEIGHED])]


def _hit(group: Sequence[NormRecord], profile: Profile, run: Run) -> Hit:
    worst = min(group, key=_kept)
    return Hit(
        sites=sites(group),
        place=place(worst, profile),
        metric="epsilon_share",
        value=worst.epsilon_share,
        expected=0.0,
        message=f"{subject(group)} {'reads' if len(group) == 1 else 'read'} {_input(worst)}; for "
        f"{percent(worst.epsilon_share or 0.0)} of the vectors the {_STATISTICS[worst.kind]} is below 10 eps."
        f"{_output(worst)}{_update(worst, profile)}{_cause(worst, run)}",
        severity="note" if worst.input_rms == 0 else None,
    )


# ---------------------------------------------------------------------- how much eps damps

_STATISTICS = {"mean_square": "mean square", "variance": "variance", "length": "sum of squares"}


def _root(norm: NormRecord) -> float:
    """Return the root of the statistic that eps is added to, inferred from the RMS of the input."""
    return (norm.input_rms or 0.0) * (norm.width**0.5 if norm.kind == "length" else 1.0)


def _undamped(norm: NormRecord) -> float:
    """Return the output RMS without eps: every non-zero vector is brought to it."""
    return (1.0 if norm.gain is None else norm.gain) * (norm.width**-0.5 if norm.kind == "length" else 1.0)


def _kept(norm: NormRecord) -> float:
    """Return the norm's output RMS over the undamped one, NaN if unknown; computed from eps if it was not measured."""
    root, undamped = _root(norm), _undamped(norm)
    if norm.output_rms is not None and undamped > 0:
        return norm.output_rms / undamped
    if norm.eps is None or not math.isfinite(root):
        return math.nan
    return root / math.hypot(root, norm.eps**0.5)


# ---------------------------------------------------------------------- sentences


def _input(norm: NormRecord) -> str:
    quantity = "vectors of length" if norm.kind == "length" else "RMS"
    where = f" in block {norm.block}" if norm.block is not None else ""
    return f"{quantity} {number(_root(norm))}{where}, where the root of eps is {number((norm.eps or 0.0) ** 0.5)}"


def _output(norm: NormRecord) -> str:
    """Say what eps makes of the output, and what the output would be without it."""
    if norm.input_rms == 0:
        return " The input is exactly zero, and so is the output. Gradients pass it times 1 / root of eps."
    sentence = " So eps, not the signal, sets the scale of its output:"
    if norm.output_rms is None or _undamped(norm) == 0:
        return f"{sentence} about x{number(_kept(norm))} of what it would be without eps."
    reason = "it has no gain" if norm.gain is None else "the RMS of its gain"
    if norm.kind == "length":
        reason = "1 / root of the width" if norm.gain is None else "its gain / root of the width"
    return f"{sentence} RMS {number(norm.output_rms)}, where without eps it would be {number(_undamped(norm))} ({reason})."


def _update(norm: NormRecord, profile: Profile) -> str:
    site = site_of(norm, profile)
    if site is None or site.update_rms is None or norm.place not in ("read", "inside", "written"):
        return ""
    return f" The branch adds RMS {number(site.update_rms)} to a stream of RMS {number(site.stream_rms)}."


def _cause(norm: NormRecord, run: Run) -> str:
    """Name what made the input small, if the records show it."""
    if norm.input_rms == 0:
        return ""
    if norm.place in ("inside", "written"):
        return _convolution_cause(norm, run)
    is_first = norm.norm == min(other.norm for other in run.norms)
    return _embedding_cause(norm, run) if is_first else ""


def _convolution_cause(norm: NormRecord, run: Run) -> str:
    small = [p for p in run.parameters if p.site == norm.site and norm.site is not None and _is_small_convolution(p)]
    if not small:
        return ""
    smallest = min(small, key=lambda p: (p.std or 0.0) * (p.fan_in or 1) ** 0.5)
    usual = (3 * (smallest.fan_in or 1)) ** -0.5
    calls = f", {smallest.init_calls}" if smallest.init_calls else ""
    return (
        f" In the same branch the convolution {smallest.name} has std {number(smallest.std)}{calls}. torch's default for its "
        f"{count(smallest.fan_in or 1, 'input')}, uniform up to 1 / sqrt(fan_in), has {number(usual)}: its output is "
        f"x{number((smallest.std or 0.0) / usual)} of that."
    )


def _is_small_convolution(parameter: ParameterRecord) -> bool:
    if parameter.role != "convolution" or parameter.kind != "parameter" or not parameter.fan_in or not parameter.std:
        return False
    return parameter.std * _SMALL_CONVOLUTION * math.sqrt(3 * parameter.fan_in) < 1


def _embedding_cause(norm: NormRecord, run: Run) -> str:
    tables = [p for p in run.parameters if p.role == "embedding" and p.std is not None and p.mean is not None]
    largest = max(tables, key=_rms, default=None)
    if largest is None or not (norm.input_rms or 0.0) / 2 < _rms(largest) < (norm.input_rms or 0.0) * 2:
        return ""
    calls = f", {largest.init_calls}" if largest.init_calls else ""
    return f" That is the scale of the embedding {largest.name} (std {number(largest.std)}{calls})."


def _rms(parameter: ParameterRecord) -> float:
    return math.hypot(parameter.mean or 0.0, parameter.std or 0.0)
