"""Columns and cells that show how two runs differ, for the tables and Markdown of compare and gate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.growth import factor
from propcheck.analysis.profile import log_ratio, safe_exp
from propcheck.comparison.quantities import QUANTITIES
from propcheck.formatting import number, percent, times
from propcheck.render.terminal.table_columns import TableColumn, columns_from_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.compare import QuantityChange
    from propcheck.records import Growth, Place

# Longest name of a place, in characters; a longer one loses its start.
_MAX_NAME = 20


def change_columns(changes: Sequence[QuantityChange], base: str, other: str) -> list[TableColumn]:
    """Return the columns of a table with one row per quantity: how many places differ, where first, and where most.

    Parameters
    ----------
    changes
        The quantities.
    base, other
        Names of the two runs.
    """
    rows = []
    for change in changes:
        row = [QUANTITIES[change.quantity].label, f"{change.differing}/{change.compared}", tolerance_range(change.allowed)]
        first, most = change.first, change.most
        if first is None or most is None:
            rows.append((*row, *[""] * 5))
            continue
        largest = f"{_ratio(most.ratio)} {short(most.place)}".strip() if most is not first else ""
        values = (number(first.baseline, aligned=True), number(first.value, aligned=True))
        rows.append((*row, short(first.place), *values, _ratio(first.ratio), largest))
    headings = (
        ("", 10),
        ("differs", 9),
        ("limit", 3),
        ("first at", 8),
        (base, 6),
        (other, 5),
        ("ratio", 7),
        ("largest", 2),
    )
    columns = columns_from_rows(headings, rows, text=("", "first at", "largest"))
    return [column for column in columns if any(column.cells)]


def tolerance_range(allowed: tuple[float, float]) -> str:
    """Format the range of accepted factors: ``5 %``, ``5 % to x1.6``."""
    least, most = allowed
    if least == most:
        return _tolerance(least)
    return f"{_tolerance(least)} to {_tolerance(most)}"


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
