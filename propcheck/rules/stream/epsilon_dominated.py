"""Norms whose eps outweighs their input: PC208."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import count, number, percent
from propcheck.rules.norm_groups import kinds, norms_of, place, site_of, sites, subject
from propcheck.rules.rule import Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, ParameterRecord, Run

# Below this share of what a norm would give without eps, eps is more than the statistic: sqrt(s / (s + eps)) at s = eps.
_OUTWEIGHED = math.sqrt(0.5)
# A convolution is named as a cause if it is drawn this many times smaller than by torch's default.
_SMALL = 3.0


def _epsilon_dominated(curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    low = [norm for norm in norms_of(run) if (norm.epsilon_share or 0.0) > limit and norm.input_rms is not None and norm.eps]
    hits = []
    for group in kinds([norm for norm in low if _kept(norm) < _OUTWEIGHED]):
        worst = min(group, key=_kept)
        hits.append(
            Hit(
                sites=sites(group),
                place=place(worst, curve),
                metric="epsilon_share",
                value=worst.epsilon_share,
                expected=0.0,
                message=f"{subject(group)} {'reads' if len(group) == 1 else 'read'} {_input(worst)}; for "
                f"{percent(worst.epsilon_share or 0.0)} of the vectors the {_statistic_name(worst)} is below 10 eps."
                f"{_output(worst)}{_writes(worst, curve)}{_cause(worst, run)}",
                severity="note" if worst.input_rms == 0 else None,
            )
        )
    return hits


def _root(norm: NormRecord) -> float:
    """Give the root of the statistic that eps is added to, as far as the RMS of the input tells it."""
    return (norm.input_rms or 0.0) * (norm.width**0.5 if norm.kind == "length" else 1.0)


def _undamped(norm: NormRecord) -> float:
    """Give the RMS that the norm would give without eps: every vector that is not zero is brought to it."""
    return (1.0 if norm.gain is None else norm.gain) * (norm.width**-0.5 if norm.kind == "length" else 1.0)


def _kept(norm: NormRecord) -> float:
    """Give the share of its undamped output that a norm gives, NaN if unknown; where it was not measured, by its law."""
    root, undamped = _root(norm), _undamped(norm)
    if norm.output_rms is not None and undamped > 0:
        return norm.output_rms / undamped
    if norm.eps is None or not math.isfinite(root):
        return math.nan
    return root / math.hypot(root, norm.eps**0.5)


def _statistic_name(norm: NormRecord) -> str:
    return {"mean_square": "mean square", "variance": "variance", "length": "sum of squares"}[norm.kind]


def _input(norm: NormRecord) -> str:
    what = "vectors of length" if norm.kind == "length" else "RMS"
    where = f" in block {norm.block}" if norm.block is not None else ""
    return f"{what} {number(_root(norm))}{where}, where the root of the eps is {number((norm.eps or 0.0) ** 0.5)}"


def _output(norm: NormRecord) -> str:
    """Say what eps makes of the output, and how it is known what there would be without."""
    if norm.input_rms == 0:
        return " That is exactly zero, and so is what it gives; gradients pass it times 1 / root of the eps."
    told = " So eps, not the signal, decides what it gives:"
    if norm.output_rms is None or _undamped(norm) == 0:
        return f"{told} about x{number(_kept(norm))} of what it would give without."
    why = "it has no gain" if norm.gain is None else "the RMS of its gain"
    if norm.kind == "length":
        why = "1 / root of the width" if norm.gain is None else "its gain / root of the width"
    return f"{told} RMS {number(norm.output_rms)}, where without eps it would be {number(_undamped(norm))} ({why})."


def _writes(norm: NormRecord, curve: Profile) -> str:
    record = site_of(norm, curve)
    if record is None or record.update_rms is None or norm.place not in ("read", "inside", "written"):
        return ""
    return f" The branch adds RMS {number(record.update_rms)} to a stream of RMS {number(record.stream_rms)}."


def _cause(norm: NormRecord, run: Run) -> str:
    """Name what made the input small, as far as the records show it."""
    if norm.input_rms == 0:
        return ""
    if norm.place in ("inside", "written"):
        small = [p for p in run.parameters if p.site == norm.site and norm.site is not None and _is_small_convolution(p)]
        if not small:
            return ""
        least = min(small, key=lambda p: (p.std or 0.0) * (p.fan_in or 1) ** 0.5)
        usual = (3 * (least.fan_in or 1)) ** -0.5
        calls = f", {least.init_calls}" if least.init_calls else ""
        return (
            f" In the same branch the convolution {least.name} has std {number(least.std)}{calls}; torch's default for its "
            f"{count(least.fan_in or 1, 'input')}, uniform up to 1 / sqrt(fan_in), has {number(usual)}, so what passes it is "
            f"x{number((least.std or 0.0) / usual)} of that."
        )
    if norm.norm != min(one.norm for one in run.norms):
        return ""
    tables = [p for p in run.parameters if p.role == "embedding" and p.std is not None and p.mean is not None]
    largest = max(tables, key=_rms, default=None)
    if largest is None or not (norm.input_rms or 0.0) / 2 < _rms(largest) < (norm.input_rms or 0.0) * 2:
        return ""
    calls = f", {largest.init_calls}" if largest.init_calls else ""
    return f" That is the scale of the embedding {largest.name} (std {number(largest.std)}{calls})."


def _rms(record: ParameterRecord) -> float:
    return math.hypot(record.mean or 0.0, record.std or 0.0)


def _is_small_convolution(record: ParameterRecord) -> bool:
    if record.role != "convolution" or record.kind != "parameter" or not record.fan_in or not record.std:
        return False
    return record.std * _SMALL * math.sqrt(3 * record.fan_in) < 1


RULE = Rule(
    scope="run",
    id="PC208",
    name="epsilon-dominated",
    severity="warning",
    threshold=0.5,
    unit="fraction of the vectors whose statistic is below 10 eps",
    sees="A norm whose input is so small that its eps, not the signal, decides what it gives.",
    why="x / sqrt(mean(x^2) + eps) is a norm only while the mean square is well above eps. Below, it divides by the constant "
    "sqrt(eps): what was to be brought to one scale keeps its own, vectors of different size stay so, and the branch behind it "
    "writes less than its init was chosen for.",
    formula="epsilon_share of norms.parquet > threshold: the statistic is the mean square, the variance, or for a "
    "normalisation to length 1 the sum of squares, of each vector, heads by themselves. And the norm gives less than "
    "sqrt(1/2) of what it would without eps: the RMS of its gain (1 without one, and 1 / sqrt(width) times that for length "
    "1), since every vector that is not zero is brought to it. Input that is exactly zero is a note. "
    "One finding a kind of norm. As a cause are named: a convolution of the same branch drawn 3 times below torch's default, "
    "and, at the first norm, an embedding of the scale of the input. Another cause is not claimed.",
    basis="At 10 eps the output is damped by 5 %, at eps itself to sqrt(1/2): there eps weighs as much as the signal. Half of "
    "the vectors is this tool's own choice; no published cut-off was found.",
    source="Zhang and Sennrich 2019, arXiv 1910.07467 (the scale invariance of RMSNorm, which eps ends); torch.nn.Conv1d "
    "(default init, uniform up to 1 / sqrt(fan_in)).",
    remedy="Bring what the norm reads well above the root of its eps (draw the weights before it at their usual scale, a "
    "depthwise convolution by its own fan-in), or lower eps.",
    check=_epsilon_dominated,
    caused_by=(("PC209", "any"), ("PC202", "touching"), ("PC203", "touching")),
)
