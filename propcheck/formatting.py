"""Format numbers, percentages, counted nouns and index ranges for messages and tables."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def number(value: float | None, *, aligned: bool = False) -> str:
    """Format a number with three significant digits.

    Parameters
    ----------
    value
        Any float; ``None`` (not observed) becomes ``-``.
    aligned
        Keep trailing zeros, for table columns.

    Returns
    -------
    str
        ``3.42``, ``0.0065``, ``1380``, ``1.5e-5``, ``NaN``, ``inf``, ``-``; at most 7 characters for a positive number
        between 1e-9 and 1e10.
    """
    if value is None:
        return "-"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    rounded = f"{value:.2e}"
    mantissa, exponent_text = rounded.split("e")
    exponent = int(exponent_text)
    if -3 <= exponent < 5:
        text = f"{float(rounded):.{max(0, 2 - exponent)}f}"
        return text if aligned or "." not in text else text.rstrip("0").rstrip(".")
    return f"{mantissa if aligned else mantissa.rstrip('0').rstrip('.')}e{exponent}"


def percent(fraction: float) -> str:
    """Format a fraction as a percentage with three significant digits."""
    return f"{number(100 * fraction)} %"


def times(ratio: float) -> str:
    """Format a ratio: ``x2.1``; near 1 as a change, ``+0.12 %``."""
    if ratio == 1:
        return "x1"
    return f"{'+' if ratio > 1 else ''}{percent(ratio - 1)}" if 0.9 < ratio < 1.1 else f"x{number(ratio)}"


def count(amount: int, noun: str) -> str:
    """Format a counted noun: ``1 site``, ``3 sites``, ``2 branches``."""
    if amount == 1:
        return f"1 {noun}"
    return f"{amount} {noun}es" if noun.endswith(("ch", "s", "x")) else f"{amount} {noun}s"


def places(noun: str, indices: Sequence[int]) -> str:
    """Format the range that the indices span: ``block 3``, ``blocks 3 to 9``."""
    low, high = min(indices), max(indices)
    return f"{noun} {low}" if low == high else f"{noun}s {low} to {high}"
