"""What all pictures share: the numbers of a line, what a logarithmic axis cannot show of them, and the file.

Matplotlib's object interface with the Agg canvas: no display, no global state.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from propcheck.formatting import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from propcheck.records import Run, SiteRecord

# Okabe and Ito's palette, told apart by all common kinds of colour vision; grey for their yellow, which white drowns.
DARK, GREY, ORANGE, VERMILION = "#000000", "#888888", "#E69F00", "#D55E00"
BLUE, SKY, GREEN, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
# Colour and shape of each kind of sublayer.
KINDS = {
    "attention": (VERMILION, "^"),
    "linear_attention": (BLUE, "v"),
    "ssm": (SKY, "<"),
    "mlp": (GREEN, "o"),
    "moe": (PURPLE, "s"),
    "other": (ORANGE, "D"),
}


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity of some sites: median, lowest and highest over the seeds, and every (site, value) that was recorded."""

    sites: tuple[int, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    recorded: tuple[tuple[int, float | None], ...]

    @property
    def points(self) -> list[float]:
        """The medians, NaN (a gap in the line) where a logarithmic axis has no place for one."""
        return [value if value is not None and drawable(value) else math.nan for value in self.values]

    @property
    def ranges(self) -> list[tuple[int, float, float]]:
        """Site, lowest and highest value, where more than one seed has a value that can be drawn."""
        ends = zip(self.sites, self.low, self.high, strict=True)
        return [(site, low, high) for site, low, high in ends if low is not None and high is not None]


def series(run: Run, sites: Sequence[SiteRecord], column: str) -> Series:
    """Take one column of some sites.

    Parameters
    ----------
    run
        Has a row a seed.
    sites
        Of :func:`propcheck.analysis.profile.profile`: one record a site, the median over seeds.
    column
        One of ``sublayers.parquet``.
    """
    shown: dict[int, list[float]] = {record.site: [] for record in sites}
    recorded = tuple((record.site, getattr(record, column)) for record in run.sites if record.site in shown)
    for where, value in recorded:
        if drawable(value):
            shown[where].append(value)

    def ends(pick: Callable[[list[float]], float]) -> tuple[float | None, ...]:
        return tuple(pick(values) if len(values) > 1 else None for values in shown.values())

    return Series(tuple(shown), tuple(getattr(record, column) for record in sites), ends(min), ends(max), recorded)


def drawable(value: float | None) -> bool:
    """Whether a logarithmic axis has a place for a value."""
    return value is not None and 0 < value < math.inf


@dataclass(frozen=True, slots=True)
class Undrawn:
    """What a logarithmic axis has no place for: sites of zeros, sites of NaN or infinity, and how many were not observed."""

    zero: tuple[int, ...]
    nonfinite: tuple[int, ...]
    unseen: int


def undrawn(drawn: Sequence[Series]) -> Undrawn:
    """Gather it from every seed of some lines."""
    pairs = [pair for one in drawn for pair in one.recorded]
    return Undrawn(
        tuple(site for site, value in pairs if value == 0),
        tuple(site for site, value in pairs if value is not None and not math.isfinite(value)),
        sum(value is None for _, value in pairs),
    )


def caption(left_out: Sequence[Undrawn]) -> str:
    """Say how much it is; empty where it is nothing."""
    zero, bad = (sum(len(getattr(one, name)) for one in left_out) for name in ("zero", "nonfinite"))
    unseen = sum(one.unseen for one in left_out)
    parts = [
        f"{count(zero, 'value')} zero (x at the foot)" if zero else "",
        f"{count(bad, 'value')} NaN or infinite (star at the top)" if bad else "",
        f"{count(unseen, 'value')} not observed" if unseen else "",
    ]
    return ", ".join(part for part in parts if part)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure; sizes in inches, 120 pixels each."""
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG, under a temporary name first: never half a file under the final one. Same figure, same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Without the version of matplotlib in the file, its bytes depend on what is drawn alone.
        figure.savefig(temporary, format="png", metadata={"Software": None})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
