"""Numbers and plurals as messages and tables write them: three significant digits, plain words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def number(value: float | None, *, aligned: bool = False) -> str:
    """Write a number with three significant digits.

    Parameters
    ----------
    value
        Any float; ``None`` (not observed) becomes ``-``.
    aligned
        Keep trailing zeros, as a column of a table wants it.

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
    mantissa, exponent_text = f"{value:.2e}".split("e")
    exponent = int(exponent_text)
    if -3 <= exponent < 5:
        text = f"{float(f'{value:.2e}'):.{max(0, 2 - exponent)}f}"
        return text if aligned or "." not in text else text.rstrip("0").rstrip(".")
    return f"{mantissa if aligned else mantissa.rstrip('0').rstrip('.')}e{exponent}"


def percent(fraction: float) -> str:
    """Write a fraction as a percentage with three significant digits."""
    return f"{number(100 * fraction)} %"


def times(ratio: float) -> str:
    """Format a ratio: ``x2.1``; near 1 as a change, ``+0.12 %``."""
    if ratio == 1:
        return "x1"
    return f"{'+' if ratio > 1 else ''}{percent(ratio - 1)}" if 0.9 < ratio < 1.1 else f"x{number(ratio)}"


def count(amount: int, noun: str) -> str:
    """Write ``1 site``, ``3 sites``, ``2 branches``."""
    if amount == 1:
        return f"1 {noun}"
    return f"{amount} {noun}es" if noun.endswith(("ch", "s", "x")) else f"{amount} {noun}s"


def places(noun: str, indices: Sequence[int]) -> str:
    """Write ``block 3`` or ``blocks 3 to 9`` for the range that some indices span."""
    low, high = min(indices), max(indices)
    return f"{noun} {low}" if low == high else f"{noun}s {low} to {high}"
