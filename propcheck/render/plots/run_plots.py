"""Plots of a run: the forward and the backward pass by site, on a logarithmic axis, with the predictions of theory.

Values that a logarithmic axis cannot show are marked at its edges and counted in the caption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from propcheck.analysis.profile import profile, streams
from propcheck.formatting import count
from propcheck.render.plots.drawing import (
    DARK,
    GREY,
    KINDS,
    ORANGE,
    VERMILION,
    caption,
    drawable,
    mark_no_values,
    new_figure,
    series,
    undrawn,
    write_figure,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from propcheck.analysis.profile import Profile
    from propcheck.records import Run, SiteRecord
    from propcheck.render.plots.drawing import Series


@dataclass(frozen=True, slots=True)
class _Plot:
    """Content of one plot: for each curve its column, label, colour and line style."""

    title: str
    axis: str
    curves: tuple[tuple[str, str, str, str], ...]
    theory: str
    marks: str
    marks_label: str


_PLOTS = {
    "forward.png": _Plot(
        title="Forward: RMS at each residual addition",
        axis="RMS",
        curves=(("sum_rms", "sum", DARK, "-"), ("stream_rms", "stream (before the addition)", GREY, "--")),
        theory="theory_sum_rms",
        marks="update_rms",
        marks_label="update",
    ),
    "backward.png": _Plot(
        title="Backward: gradient norm at each residual addition",
        axis="gradient norm",
        curves=(
            ("grad_stream_norm", "stream", DARK, "-"),
            ("grad_sum_norm", "sum", GREY, "--"),
            ("grad_update_norm", "update", ORANGE, ":"),
        ),
        theory="theory_grad_norm",
        marks="param_grad_norm",
        marks_label="parameters",
    ),
}


def write_plots(run: Run, directory: Path) -> list[Path]:
    """Draw ``forward.png`` and ``backward.png``.

    Parameters
    ----------
    run
        The run; several seeds are drawn as their median with a bar for their range.
    directory
        Directory for the files; created if necessary. The same run gives the same bytes.

    Returns
    -------
    list of Path
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in _PLOTS.items():
        figure = new_figure(10, 5.2)
        _draw(figure, run, plot)
        paths.append(write_figure(figure, directory / name))
    return paths


def _draw(figure: Figure, run: Run, plot: _Plot) -> None:
    curve = profile(run)
    axes = _axes(figure, run, curve, plot)
    drawn = []
    for column, label, colour, style in plot.curves:
        # One line per stream: none connects an encoder and its decoder.
        for index, stream in enumerate(streams(run)):
            line = series(run, stream.sites, column)
            drawn.append(_line(axes, line, None if index else label, colour, style))
    _theory(axes, run, plot.theory)
    for kind, members in _by_kind(curve):
        drawn.append(_marks(axes, series(run, members, plot.marks), f"{plot.marks_label}: {kind}", *KINDS[kind]))
    _finish(figure, axes, drawn)


def _by_kind(curve: Profile) -> list[tuple[str, list[SiteRecord]]]:
    kinds = [(kind, [record for record in curve.sites if record.sublayer == kind]) for kind in KINDS]
    return [(kind, members) for kind, members in kinds if members]


def _axes(figure: Figure, run: Run, curve: Profile, plot: _Plot) -> Axes:
    axes: Axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.set_title(f"{plot.title}\n{run.target}, {run.precision}, placement {run.model.placement}", fontsize=11)
    axes.set_ylabel(plot.axis)
    axes.grid(visible=True, which="major", alpha=0.3)
    sites = [record.site for record in curve.sites] or [0]
    axes.set_xlim(min(sites) - 0.5, max(sites) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_xlabel(f"site ({count(len(curve.units), curve.noun)})" if curve.noun == "block" else "site")
    return axes


def _theory(axes: Axes, run: Run, column: str) -> None:
    """Draw the predictions, if there are any; a missing one is not counted as unobserved."""
    label: str | None = "theory"
    for stream in streams(run):
        points = series(run, stream.sites, column).points
        if any(map(math.isfinite, points)):
            sites = [record.site for record in stream.sites]
            axes.plot(sites, points, color=VERMILION, label=label, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2.5)
            label = None


def _line(axes: Axes, line: Series, label: str | None, colour: str, style: str) -> Series:
    # A line does not show a single point between two gaps; a small dot does.
    axes.plot(line.sites, line.points, style, color=colour, label=label, linewidth=1.5, marker=".", markersize=2.5, zorder=2)
    _band(axes, line, colour)
    return line


def _marks(axes: Axes, line: Series, label: str, colour: str, marker: str) -> Series:
    axes.plot(line.sites, line.points, marker, color=colour, label=label, markersize=4.5, markeredgewidth=0, zorder=3)
    _band(axes, line, colour)
    return line


def _band(axes: Axes, line: Series, colour: str) -> None:
    if line.ranges:
        sites, low, high = zip(*line.ranges, strict=True)
        axes.vlines(sites, low, high, color=colour, alpha=0.35, linewidth=2, zorder=1)


def _finish(figure: Figure, axes: Axes, drawn: Sequence[Series]) -> None:
    """Mark the values that the axis cannot show, count them in the caption, and add the legend."""
    left_out = undrawn(drawn)
    zero, bad = left_out.zero, left_out.nonfinite
    edge = axes.get_xaxis_transform()  # x in sites, y from 0 (bottom) to 1 (top)
    if zero:
        axes.plot(zero, [0.015] * len(zero), "x", color=DARK, transform=edge, label="zero", markersize=6, zorder=4)
    if bad:
        axes.plot(
            bad, [0.985] * len(bad), "*", color=VERMILION, transform=edge, label="NaN or infinite", markersize=9, zorder=4
        )
    if not any(drawable(value) for line in drawn for _, value in line.recorded):
        mark_no_values(axes)
    if text := caption([left_out]):
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left")
    if any(line.recorded for line in drawn):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
