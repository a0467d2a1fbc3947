"""The part of PC104 on step sizes: step biases compared with the range that Mamba draws from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import number, percent
from propcheck.rules.rule import Hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord

# Mamba draws softplus(bias) from this range (arXiv 2312.00752, section 3.6).
MIN_STEP, MAX_STEP = 0.001, 0.1


def step_size_hits(parameters: Sequence[ParameterRecord], threshold: float) -> list[Hit]:
    """Report step biases whose softplus is outside Mamba's range by more than a factor ``threshold``."""
    biases = [p for p in parameters if p.role == "step_bias" and p.mean is not None and math.isfinite(p.mean)]
    outside = [p for p in biases if not MIN_STEP / threshold <= _step(p) <= MAX_STEP * threshold]
    return [_hit(group) for group in folded(outside)]


def _hit(group: Sequence[ParameterRecord]) -> Hit:
    center = math.sqrt(MIN_STEP * MAX_STEP)
    worst = max(group, key=lambda p: abs(math.log(max(_step(p), 1e-300) / center)))
    step = _step(worst)
    return Hit(
        sites=(),
        place=place(worst),
        metric="softplus(mean)",
        value=step,
        expected=f"{number(MIN_STEP)} to {number(MAX_STEP)}",
        message=f"{subject(group)} {verb(group, 'starts', 'start')} at a mean of {number(worst.mean)} ({worst.init_calls}). "
        f"Without input, the step size is softplus of that mean, {number(step)}; Mamba draws step sizes from "
        f"{number(MIN_STEP)} to {number(MAX_STEP)}. At decay rate 1, a step of {number(step)} keeps "
        f"{percent(math.exp(-step))} of the state from one token to the next; a step of {number(MAX_STEP)} keeps "
        f"{percent(math.exp(-MAX_STEP))}.",
        severity=None if worst.sublayer == "ssm" else "note",
        remedy="Draw the step log-uniformly from 0.001 to 0.1 and set the bias to its inverse softplus, "
        "step + log(-expm1(-step)). Do this in the function that initialises the model, and exclude the bias from the general "
        "init.",
    )


def _step(record: ParameterRecord) -> float:
    """Return softplus(mean): only mean and std of the vector are recorded."""
    mean = record.mean or 0.0
    return mean + math.log1p(math.exp(-mean)) if mean > 0 else math.log1p(math.exp(mean))
