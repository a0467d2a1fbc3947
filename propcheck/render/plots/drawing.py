"""Shared by all plots: the values of a line, the values that a logarithmic axis cannot show, colours, and the PNG file.

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

    from matplotlib.axes import Axes

    from propcheck.records import Run, SiteRecord

# Okabe and Ito's palette, distinguishable with all common kinds of colour vision; grey instead of yellow, which is faint on
# white.
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
    """One column of some sites: median, lowest and highest value over the seeds, and every recorded (site, value)."""

    sites: tuple[int, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    recorded: tuple[tuple[int, float | None], ...]

    @property
    def points(self) -> list[float]:
        """The medians; NaN, a gap in the line, for a value that a logarithmic axis cannot show."""
        return [value if value is not None and drawable(value) else math.nan for value in self.values]

    @property
    def ranges(self) -> list[tuple[int, float, float]]:
        """Site, lowest and highest value, for sites where several seeds have a drawable value."""
        ends = zip(self.sites, self.low, self.high, strict=True)
        return [(site, low, high) for site, low, high in ends if low is not None and high is not None]


def series(run: Run, sites: Sequence[SiteRecord], column: str) -> Series:
    """Return one column of some sites.

    Parameters
    ----------
    run
        The run, with one row per seed and site.
    sites
        Sites of :func:`propcheck.analysis.profile.profile`: one record per site, the median over the seeds.
    column
        Name of a column of ``sublayers.parquet``.
    """
    shown: dict[int, list[float]] = {record.site: [] for record in sites}
    recorded = tuple((record.site, getattr(record, column)) for record in run.sites if record.site in shown)
    for site, value in recorded:
        if drawable(value):
            shown[site].append(value)

    def ends(pick: Callable[[list[float]], float]) -> tuple[float | None, ...]:
        return tuple(pick(values) if len(values) > 1 else None for values in shown.values())

    return Series(tuple(shown), tuple(getattr(record, column) for record in sites), ends(min), ends(max), recorded)


def drawable(value: float | None) -> bool:
    """Return whether a logarithmic axis can show a value."""
    return value is not None and 0 < value < math.inf


@dataclass(frozen=True, slots=True)
class Undrawn:
    """Values that a logarithmic axis cannot show: sites of zeros, sites of NaN or infinity, number of unobserved values."""

    zero: tuple[int, ...]
    nonfinite: tuple[int, ...]
    unseen: int


def undrawn(drawn: Sequence[Series]) -> Undrawn:
    """Collect the values of all seeds of some lines that cannot be shown."""
    pairs = [pair for line in drawn for pair in line.recorded]
    return Undrawn(
        tuple(site for site, value in pairs if value == 0),
        tuple(site for site, value in pairs if value is not None and not math.isfinite(value)),
        sum(value is None for _, value in pairs),
    )


def caption(left_out: Sequence[Undrawn]) -> str:
    """Return a caption that counts the values not shown; empty if there are none."""
    zero, bad = (sum(len(getattr(part, name)) for part in left_out) for name in ("zero", "nonfinite"))
    unseen = sum(part.unseen for part in left_out)
    parts = [
        f"{count(zero, 'value')} zero (x at the bottom)" if zero else "",
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
    """Write a PNG under a temporary name and rename it. The same figure gives the same bytes."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # Without the version of matplotlib, the bytes of the file depend only on the figure.
        figure.savefig(temporary, format="png", metadata={"Software": None})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def mark_no_values(axes: Axes) -> None:
    """Say on a panel that it has no value to draw."""
    axes.set_ylim(0.1, 10)
    axes.text(0.5, 0.5, "no positive finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)
