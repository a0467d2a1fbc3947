"""Biases of step sizes against the range that Mamba draws them from: a part of PC104."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, place, subject, verb
from propcheck.formatting import number, percent
from propcheck.rules.rule import Hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord

# Mamba (arXiv 2312.00752, section 3.6) draws softplus(bias) from this range.
LOW, HIGH = 0.001, 0.1


def off_range(parameters: Sequence[ParameterRecord], limit: float) -> list[Hit]:
    """Find the step biases whose softplus lies outside Mamba's range by more than a factor ``limit``."""
    known = [p for p in parameters if p.role == "step_bias" and p.mean is not None and math.isfinite(p.mean)]
    off = [p for p in known if not LOW / limit <= _step(p) <= HIGH * limit]
    hits = []
    for group in folded(off):
        worst = max(group, key=lambda p: abs(math.log(max(_step(p), 1e-300) / math.sqrt(LOW * HIGH))))
        step = _step(worst)
        hits.append(
            Hit(
                sites=(),
                place=place(worst),
                metric="softplus(mean)",
                value=step,
                expected=f"{number(LOW)} to {number(HIGH)}",
                message=f"{subject(group)} {verb(group, 'starts', 'start')} at {number(worst.mean)} ({worst.init_calls}): "
                f"softplus of that mean, the step size where the input adds nothing, is {number(step)}; Mamba draws steps from "
                f"{number(LOW)} to {number(HIGH)}. Where the decay rate is 1, a step of {number(step)} leaves "
                f"{percent(math.exp(-step))} of the state from one token to the next, and one of {number(HIGH)} "
                f"{percent(math.exp(-HIGH))}.",
                severity=None if worst.sublayer == "ssm" else "note",
                remedy="Draw the step log-uniformly from 0.001 to 0.1 and set the bias to its inverse softplus, "
                "step + log(-expm1(-step)), in the function that initialises the model; keep the general init off it.",
            )
        )
    return hits


def _step(record: ParameterRecord) -> float:
    """Give softplus of the mean; the values of one vector differ, but only mean and spread are recorded."""
    mean = record.mean or 0.0
    return mean + math.log1p(math.exp(-mean)) if mean > 0 else math.log1p(math.exp(mean))
