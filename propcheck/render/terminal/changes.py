"""Table of the quantities in which two runs differ, shared by the terminal and Markdown output of compare and gate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.growth import factor
from propcheck.analysis.profile import log_ratio, safe_exp
from propcheck.comparison.gate_findings import times
from propcheck.formatting import number, percent
from propcheck.records import ParameterRecord, SiteRecord
from propcheck.records.columns import columns_of
from propcheck.render.terminal.columns import TableColumn, columns_from_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.compare import Change
    from propcheck.config.tolerances import Quantity
    from propcheck.records import Growth, Place

# Quantities that are not columns of a record.
_OTHER_LABELS: dict[Quantity, str] = {"parameter_rms": "parameter RMS", "loss": "first loss"}
# Longest name of a place, in characters; a longer one loses its start.
_MAX_NAME = 20


def label_of(quantity: Quantity) -> str:
    """Return the short name of a quantity: ``stream RMS``."""
    if quantity in _OTHER_LABELS:
        return _OTHER_LABELS[quantity]
    return {**columns_of(ParameterRecord), **columns_of(SiteRecord)}[quantity].label


def change_columns(changes: Sequence[Change], base: str, other: str) -> list[TableColumn]:
    """Lay out one row per quantity: in how many places it differs, where first, and where most.

    Parameters
    ----------
    changes
        The quantities.
    base, other
        Names of the two runs.
    """
    rows = []
    for change in changes:
        row = [label_of(change.quantity), f"{change.differing}/{change.compared}", passing(change.allowed)]
        if change.first is None or change.most is None:
            rows.append((*row, *[""] * 5))
            continue
        first, most = change.first, change.most
        largest = f"{_ratio(most.ratio)} {short(most.place)}".strip() if most is not first else ""
        values = (number(first.baseline, aligned=True), number(first.value, aligned=True))
        rows.append((*row, short(first.place), *values, _ratio(first.ratio), largest))
    headings = (
        ("", 10),
        ("differs", 9),
        ("tolerance", 3),
        ("first at", 8),
        (base, 6),
        (other, 5),
        ("ratio", 7),
        ("largest", 2),
    )
    columns = columns_from_rows(headings, rows, text=("", "first at", "largest"))
    return [column for column in columns if any(column.cells)]


def passing(allowed: tuple[float, float]) -> str:
    """Return the range of the tolerances: ``5 %``, ``5 % to x1.6``."""
    smallest, largest = allowed
    if smallest == largest:
        return _tolerance(smallest)
    return f"{_tolerance(smallest)} to {_tolerance(largest)}"


def _tolerance(allowed: float) -> str:
    return percent(allowed - 1) if allowed < 1.1 else f"x{number(allowed)}" if math.isfinite(allowed) else "any"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else times(ratio)


def ratio_of(value: float | None, base: float | None) -> str:
    """Return value / base; empty if either was not observed, is zero or non-finite."""
    logarithm = log_ratio(value, base)
    return "" if logarithm is None else times(safe_exp(logarithm))


def short(place: Place) -> str:
    """Return a place in few characters: ``site 11, block 5``, or the end of a parameter's name."""
    if place.parameter is not None:
        name = place.parameter.split(" = ")[0]
        return name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :].lstrip('.')}"
    if place.site is None:
        return ""
    return ", ".join(part for part in (f"site {place.site}", f"block {place.block}" if place.block is not None else "") if part)


def law(growth: Growth, noun: str) -> str:
    """Return the law of a curve in few characters: ``depth^0.50``, ``1.48^block``."""
    if growth.law is None or growth.exponent is None or growth.rate is None:
        return ""
    return {
        "power": f"depth^{growth.exponent:.2f}",
        "exponential": f"{factor(growth.rate)}^{noun}",
        "either": "unclear",
        "flat": "flat",
        "neither": "neither",
    }[growth.law]
