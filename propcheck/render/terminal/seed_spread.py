"""How far the seeds of a run lie apart, number by number."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.formatting import number

if TYPE_CHECKING:
    from propcheck.records import Run, SiteRecord


class Spread:
    """The spread of each number of a run over its seeds.

    Parameters
    ----------
    run
        The run; with one seed there is no spread.
    """

    def __init__(self, run: Run) -> None:
        self._by_site: dict[int, list[SiteRecord]] = {}
        for record in run.sites:
            self._by_site.setdefault(record.site, []).append(record)

    def of(self, record: SiteRecord, column: str) -> float | None:
        """Half the distance from the least to the greatest finite value of the seeds, as a part of the median's magnitude.

        None where fewer than two seeds have a finite value, or the median is zero.
        """
        values: list[float | None] = [getattr(one, column) for one in self._by_site[record.site]]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        middle: float | None = getattr(record, column)
        if len(finite) < 2 or not middle or not math.isfinite(middle):
            return None
        return (max(finite) - min(finite)) / 2 / abs(middle)

    def cell(self, record: SiteRecord, column: str) -> str:
        """Write a number of a site of the median profile, with its spread where there are several seeds: ``3.42±0.3%``."""
        spread = self.of(record, column)
        written = number(getattr(record, column), aligned=True)
        return written if spread is None else f"{written}±{_percent(spread)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.0995 else f"{100 * share:.0f}%"
