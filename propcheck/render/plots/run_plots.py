"""Two pictures of a run: the forward pass and the backward pass, by site, on a logarithmic axis, and what theory predicts.

Values that a logarithmic axis cannot show are marked at its edges and counted in the caption, never dropped.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator

from propcheck.analysis import profile as depth
from propcheck.formatting import count
from propcheck.render.plots.drawing import (
    DARK,
    GREY,
    KINDS,
    ORANGE,
    VERMILION,
    caption,
    drawable,
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

    from propcheck.records import Run, SiteRecord
    from propcheck.render.plots.drawing import Series


def write_plots(run: Run, directory: Path) -> list[Path]:
    """Draw ``forward.png`` and ``backward.png``.

    Parameters
    ----------
    run
        The run; several seeds are drawn as their median and range.
    directory
        Where the files go, each under a temporary name first; made if need be. Same run, same bytes.

    Returns
    -------
    list of Path
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    curve = depth.profile(run)
    paths = []
    for name, draw in (("forward.png", _forward), ("backward.png", _backward)):
        figure = new_figure(10, 5.2)
        draw(figure, run, curve)
        paths.append(write_figure(figure, directory / name))
    return paths


def _forward(figure: Figure, run: Run, curve: depth.Profile) -> None:
    axes = _axes(figure, run, curve, "Forward: RMS by residual addition", "RMS")
    drawn = [
        *_lines(axes, run, "sum_rms", "sum", DARK, "-"),
        *_lines(axes, run, "stream_rms", "stream (before the addition)", GREY, "--"),
    ]
    _theory(axes, run, "theory_sum_rms")
    for kind, members in _by_kind(curve):
        drawn.append(_marks(axes, series(run, members, "update_rms"), f"update: {kind}", *KINDS[kind]))
    _finish(figure, axes, drawn)


def _backward(figure: Figure, run: Run, curve: depth.Profile) -> None:
    axes = _axes(figure, run, curve, "Backward: gradient norms by residual addition", "norm of the gradient")
    drawn = [
        *_lines(axes, run, "grad_stream_norm", "stream", DARK, "-"),
        *_lines(axes, run, "grad_sum_norm", "sum", GREY, "--"),
        *_lines(axes, run, "grad_update_norm", "update", ORANGE, ":"),
    ]
    _theory(axes, run, "theory_grad_norm")
    for kind, members in _by_kind(curve):
        drawn.append(_marks(axes, series(run, members, "param_grad_norm"), f"parameters: {kind}", *KINDS[kind]))
    _finish(figure, axes, drawn)


def _by_kind(curve: depth.Profile) -> list[tuple[str, list[SiteRecord]]]:
    kinds = [(kind, [record for record in curve.sites if record.sublayer == kind]) for kind in KINDS]
    return [(kind, members) for kind, members in kinds if members]


def _axes(figure: Figure, run: Run, curve: depth.Profile, title: str, label: str) -> Axes:
    axes: Axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.set_title(f"{title}\n{run.target}, {run.precision}, placement {run.model.placement}", fontsize=11)
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
    sites = [record.site for record in curve.sites] or [0]
    axes.set_xlim(min(sites) - 0.5, max(sites) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_xlabel(f"site ({count(len(curve.units), curve.noun)})" if curve.noun == "block" else "site")
    return axes


def _lines(axes: Axes, run: Run, column: str, label: str, colour: str, style: str) -> list[Series]:
    """Draw a line for each stream: none leads from an encoder to its decoder."""
    parts = [series(run, stream.sites, column) for stream in depth.streams(run)]
    return [_line(axes, part, label if part is parts[0] else None, colour, style) for part in parts]


def _theory(axes: Axes, run: Run, column: str) -> None:
    """Draw what was predicted, where anything was. A null among it is no value that was not observed."""
    label: str | None = "theory"
    for stream in depth.streams(run):
        points = series(run, stream.sites, column).points
        if any(map(math.isfinite, points)):
            sites = [record.site for record in stream.sites]
            axes.plot(sites, points, color=VERMILION, label=label, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2.5)
            label = None


def _line(axes: Axes, one: Series, label: str | None, colour: str, style: str) -> Series:
    # A gap in a line hides a lone point between two gaps; a small dot shows it.
    axes.plot(one.sites, one.points, style, color=colour, label=label, linewidth=1.5, marker=".", markersize=2.5, zorder=2)
    _band(axes, one, colour)
    return one


def _marks(axes: Axes, one: Series, label: str, colour: str, marker: str) -> Series:
    axes.plot(one.sites, one.points, marker, color=colour, label=label, markersize=4.5, markeredgewidth=0, zorder=3)
    _band(axes, one, colour)
    return one


def _band(axes: Axes, one: Series, colour: str) -> None:
    if one.ranges:
        sites, low, high = zip(*one.ranges, strict=True)
        axes.vlines(sites, low, high, color=colour, alpha=0.35, linewidth=2, zorder=1)


def _finish(figure: Figure, axes: Axes, drawn: Sequence[Series]) -> None:
    """Mark what the axis cannot show, and say in the caption how much that is."""
    left_out = undrawn(drawn)
    zero, bad = left_out.zero, left_out.nonfinite
    edge = axes.get_xaxis_transform()  # x in sites, y from 0 (foot) to 1 (top)
    if zero:
        axes.plot(zero, [0.015] * len(zero), "x", color=DARK, transform=edge, label="zero", markersize=6, zorder=4)
    if bad:
        axes.plot(
            bad, [0.985] * len(bad), "*", color=VERMILION, transform=edge, label="NaN or infinite", markersize=9, zorder=4
        )
    if not any(drawable(value) for one in drawn for _, value in one.recorded):
        axes.set_ylim(0.1, 10)
        axes.text(0.5, 0.5, "no positive finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)
    if text := caption([left_out]):
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left")
    if any(one.recorded for one in drawn):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
