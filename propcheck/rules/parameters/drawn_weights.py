"""Which parameters the rules on initialisation judge: those with known, finite, floating-point values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from propcheck.records import ParameterRecord, Run

# Below this many elements, sampling noise dominates the statistics that the rules look at.
MIN_ELEMENTS = 1000

_WEIGHT_ROLES = frozenset({"linear", "convolution", "embedding"})
_FLOAT_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


def drawn_parameters(run: Run) -> list[ParameterRecord]:
    """List the parameters that were written (else PC102), are finite (else PC101) and are not quantised."""
    return [
        p
        for p in run.parameters
        if p.kind == "parameter" and p.init_calls is not None and p.nonfinite == 0 and p.dtype in _FLOAT_DTYPES and p.numel
    ]


def is_large_weight(record: ParameterRecord) -> bool:
    """Whether a parameter is a matrix, kernel or table with enough elements for its statistics to mean something."""
    return record.role in _WEIGHT_ROLES and record.numel >= MIN_ELEMENTS
