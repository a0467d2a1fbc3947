"""Write ``docs/validation.md``, measured beside published: ``python docs/validation.py`` (a minute or two)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).parent
MEASURED = HERE.parent / "tests" / "validation"

INTRODUCTION = """\
# Measured against published

Numbers that papers give, beside what propcheck measures in their settings. Made by `python docs/validation.py` from
`tests/validation/`, where each has its test; do not edit. What a paper says of a limit (wide layers, many tokens) is met within
the tolerance that its test names. Where nobody published a number, the column says where it comes from.
"""

SECTIONS = {
    "xiong": """\
## Pre-norm and post-norm

A scan of the paper's own setting: uniform attention, a ReLU network of the stream's width, weights N(0, 1/d). The columns
`sum_rms` and `grad_norm` give the numbers. Tests: post-norm sums within 1.5 ± 0.2; pre-norm within the bounds at every layer;
the post-norm gradient flat within 25 %, the pre-norm one falling within 35 % of 1/√L.""",
    "kedia": """\
## Closed forms for one operation

`closed_forms.py`, there, against random draws. The forms are exact in the limit of wide layers, so that what is left is the
error of sampling, here as in the paper. Its code says from which ranges it drew; those are used here, with fewer tokens and
more runs. What its table calls FFN is its `linear.py`, a linear layer. Test: within the published errors.""",
    "gains": """\
## Backward gain over forward gain

How much steeper than 1/√depth the pre-norm gradient falls. By quadrature, and from the columns `grad_stream_norm`,
`grad_sum_norm`, `stream_rms` and `update_rms` of a scan. Tests: the quadrature in the range, the scan within 5 % of it.""",
    "depth_scaling": """\
## Placements for great depth

Tests: DeepNorm within 0.2 % at each of its 128 additions; Peri-LN within 12 % at the end (updates of one model are correlated
a little: 113 to 125 were measured before); Keel within 2 %.""",
    "rounding": """\
## What a bf16 addition loses

The columns `swallowed` and `add_error` for Gaussian stream and update. Test: within 10 %.""",
}


def page() -> str:
    """Measure every row and return the page."""
    sys.path.insert(0, str(MEASURED))
    parts = [INTRODUCTION]
    for name, text in SECTIONS.items():
        lines = [row.line() for row in importlib.import_module(name).rows()]
        head = "| what | setting | published | measured | source |\n|---|---|---|---|---|"
        parts.append("\n".join([f"{text}\n\n{head}", *lines, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    (HERE / "validation.md").write_text(page(), encoding="utf-8")
