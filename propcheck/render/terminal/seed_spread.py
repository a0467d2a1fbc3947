"""Spread of each value of a run over its seeds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import number

if TYPE_CHECKING:
    from propcheck.records import Run, SiteRecord


class Spread:
    """Spread of each value of a run over its seeds.

    Parameters
    ----------
    run
        The run; a single seed has no spread.
    """

    def __init__(self, run: Run) -> None:
        self._by_site: dict[int, list[SiteRecord]] = {}
        for record in run.sites:
            self._by_site.setdefault(record.site, []).append(record)

    def of(self, record: SiteRecord, column: str) -> float | None:
        """Return half the range of the finite values over the seeds, relative to the magnitude of the median.

        None if fewer than two seeds have a finite value, or the median is zero.
        """
        values: list[float | None] = [getattr(seed, column) for seed in self._by_site[record.site]]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        middle: float | None = getattr(record, column)
        if len(finite) < 2 or not middle or not math.isfinite(middle):
            return None
        return (max(finite) - min(finite)) / 2 / abs(middle)

    def cell(self, record: SiteRecord, column: str) -> str:
        """Format a value of the median profile; with several seeds, with its spread: ``3.42±0.3%``."""
        spread = self.of(record, column)
        value = number(getattr(record, column), aligned=True)
        return value if spread is None else f"{value}±{_percent(spread)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"
