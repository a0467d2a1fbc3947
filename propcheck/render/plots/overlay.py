"""Overlay plots of several runs, one plot per column of ``sublayers.parquet``.

Runs differ in colour and line style. Values that a logarithmic axis cannot show are marked at its edges in the colour of the
run and counted in the caption.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from propcheck.analysis.profile import streams
from propcheck.formatting import count
from propcheck.records import SiteRecord
from propcheck.records.columns import columns_of
from propcheck.render.plots.drawing import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    KINDS,
    ORANGE,
    PURPLE,
    SKY,
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

    from propcheck.records import Run
    from propcheck.render.plots.drawing import Undrawn

QUANTITIES = ("stream_rms", "update_rms", "update_ratio", "grad_stream_norm", "param_grad_norm")

# Values of the stream continue from site to site. All others depend on the kind of sublayer, so one line through them would
# jump at each site.
_STREAM_COLUMNS = frozenset({"stream_rms", "sum_rms", "stream_norm", "sum_norm", "grad_stream_norm", "grad_sum_norm"})
_HUES = (DARK, VERMILION, BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)
_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1, 3, 4)))
# One fewer than styles, so that 56 lines of one colour differ. Cross and star mark values that cannot be shown.
_MARKERS = ("o", "s", "^", "D", "v", "P", "<")
# Characters per line of the legend and of a title, and lines per column of the legend.
_LEGEND, _TITLE, _COLUMN = 44, 100, 45


@dataclass(frozen=True, slots=True)
class _Line:
    """A run with its colour and line style."""

    label: str
    run: Run
    colour: Any
    style: Any
    marker: str
    width: float


def write_overlays(runs: Sequence[tuple[str, Run]], directory: Path, quantities: Sequence[str] = QUANTITIES) -> list[Path]:
    """Draw one plot per quantity with all runs in it.

    Parameters
    ----------
    runs
        Label and run; several seeds are drawn as their median with a band for their range.
    directory
        Directory for the files, ``stream_rms.png`` and so on; created if necessary. The same runs give the same bytes.
    quantities
        Columns of ``sublayers.parquet``.

    Returns
    -------
    list of Path
        The files written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = _lines([((label,), run) for label, run in runs])
    by_site = _same_sites([run for _, run in runs])
    paths = []
    for quantity in quantities:
        figure = new_figure(10, max(5.2, _legend_height(lines)))
        axes, left_out = _panel(figure, 111, lines, quantity, by_site=by_site)
        axes.set_title(f"{axes.get_title()}\n{_compared(lines)}", fontsize=11)
        _finish(figure, lines, [left_out], [] if quantity in _STREAM_COLUMNS else _kinds(lines))
        paths.append(write_figure(figure, directory / f"{quantity}.png"))
    return paths


def write_sweep_plot(cells: Sequence[tuple[Sequence[str], Run]], path: Path) -> Path:
    """Draw all cells of a sweep in one plot: the RMS of the stream, and its gradient.

    Parameters
    ----------
    cells
        Values of each axis, as text (``("placement=post", "layers=32")``), and the run. With several axes the first one sets
        the colour and the others the line style.
    path
        The PNG file. The same cells give the same bytes.
    """
    lines = _lines(cells)
    figure = new_figure(14, max(5.6, _legend_height(lines)))
    panels = [
        _panel(figure, place, lines, quantity, by_site=False)[1]
        for place, quantity in ((121, "stream_rms"), (122, "grad_stream_norm"))
    ]
    figure.suptitle(_compared(lines), fontsize=11)
    _finish(figure, lines, panels, [])
    return write_figure(figure, path)


def _lines(cells: Sequence[tuple[Sequence[str], Run]]) -> list[_Line]:
    """Choose colour and style of each run: with one axis both differ, with several the first axis alone sets the colour."""
    parts = [tuple(label) for label, _ in cells]
    varying = [i for i in range(len(parts[0]) if parts else 0) if len({part[i] for part in parts}) > 1]
    places = [tuple(part[i] for i in varying) for part in parts]
    firsts, others = list(dict.fromkeys(p[:1] for p in places)), list(dict.fromkeys(p[1:] for p in places))
    hues: Sequence[Any] = _HUES
    if len(firsts) > len(_HUES):  # from dark to light; the lightest tenth is faint on white
        hues = [colormaps["viridis"](0.9 * i / (len(firsts) - 1)) for i in range(len(firsts))]
    lines = []
    for index, ((label, run), place) in enumerate(zip(cells, places, strict=True)):
        hue = firsts.index(place[:1])
        line = others.index(place[1:]) if len(others) > 1 else hue
        # Where two runs agree, the wider line below stays visible on both sides of the upper one.
        width = 2.2 - 1.1 * index / max(len(cells) - 1, 1)
        marker = _MARKERS[line % len(_MARKERS)]
        shown = textwrap.fill(", ".join(label), _LEGEND)
        lines.append(_Line(shown, run, hues[hue], _STYLES[line % len(_STYLES)], marker, width))
    return lines


def _same_sites(runs: Sequence[Run]) -> bool:
    """Return whether all runs have the same sites in the same streams, so that a site is the same place in each."""
    shapes = {tuple(tuple(record.site for record in stream.sites) for stream in streams(run)) for run in runs}
    return len(shapes) < 2


def _panel(figure: Figure, place: int, lines: Sequence[_Line], quantity: str, *, by_site: bool) -> tuple[Axes, list[Undrawn]]:
    """Draw one quantity of all runs; also return the values of each run that could not be drawn."""
    axes: Axes = figure.add_subplot(place)
    column = columns_of(SiteRecord)[quantity]
    axes.set_title(f"{column.phrase[0].upper()}{column.phrase[1:]} at each site", fontsize=11)
    axes.set_yscale("log")
    axes.set_ylabel(column.label)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.set_xlabel("site" if by_site else "relative depth (0: first site, 1: last site)")
    if by_site:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    left_out = [_draw(axes, line, index, quantity, by_site=by_site) for index, line in enumerate(lines)]
    if not any(drawable(getattr(record, quantity)) for line in lines for record in line.run.sites):
        mark_no_values(axes)
    return axes, left_out


def _draw(axes: Axes, line: _Line, index: int, quantity: str, *, by_site: bool) -> Undrawn:
    numbers = sorted({record.site for record in line.run.sites})
    x = {site: float(site) if by_site else i / max(len(numbers) - 1, 1) for i, site in enumerate(numbers)}
    drawn = []
    for sites, marker in _segments(line, quantity):
        part = series(line.run, sites, quantity)
        drawn.append(part)
        places = [x[site] for site in part.sites]
        axes.plot(
            places,
            part.points,
            color=line.colour,
            linestyle=line.style,
            linewidth=line.width,
            marker=marker,
            markersize=4,
            markevery=_marked(part.points, index),
        )
        if part.ranges:
            low, high = ([math.nan if end is None else end for end in ends] for ends in (part.low, part.high))
            axes.fill_between(places, low, high, color=line.colour, alpha=0.2, linewidth=0)
    left_out = undrawn(drawn)
    edge = axes.get_xaxis_transform()  # y from 0 (bottom) to 1 (top)
    for sites_not_shown, mark, y, size in ((left_out.zero, "x", 0.015, 6), (left_out.nonfinite, "*", 0.985, 9)):
        axes.plot(
            [x[s] for s in sites_not_shown],
            [y] * len(sites_not_shown),
            mark,
            color=line.colour,
            transform=edge,
            markersize=size,
            zorder=4,
        )
    return left_out


def _segments(line: _Line, quantity: str) -> list[tuple[list[SiteRecord], str]]:
    """Return the sites of each drawn line and its marker; no line connects an encoder and its decoder."""
    of_streams = [list(stream.sites) for stream in streams(line.run)]
    if quantity in _STREAM_COLUMNS:
        return [(sites, line.marker) for sites in of_streams]
    by_kind = (([r for r in sites if r.sublayer == kind], KINDS[kind][1]) for sites in of_streams for kind in KINDS)
    return [(sites, marker) for sites, marker in by_kind if sites]


def _marked(points: Sequence[float], index: int) -> list[int]:
    """Return the points with a marker: about ten, and every point without a line, between two gaps."""
    every = max(1, len(points) // 10)
    gaps = [True, *map(math.isnan, points), True]
    # At different places in each run, so that lines close together do not hide each other's markers.
    return [i for i in range(len(points)) if i % every == index % every or (gaps[i] and gaps[i + 2])]


def _kinds(lines: Sequence[_Line]) -> list[str]:
    seen = {record.sublayer for line in lines for record in line.run.sites}
    return [kind for kind in KINDS if kind in seen]


def _legend_height(lines: Sequence[_Line]) -> float:
    """Return the height of a plot, in inches, that fits a column of the legend."""
    return 1.6 + 0.175 * min(_legend_lines(lines), _COLUMN)


def _legend_lines(lines: Sequence[_Line]) -> int:
    return sum(1 + line.label.count("\n") for line in lines)


def _finish(figure: Figure, lines: Sequence[_Line], panels: Sequence[Sequence[Undrawn]], kinds: Sequence[str]) -> None:
    """Add the legend next to the panels, and a caption about the values that could not be drawn."""
    handles = [
        Line2D(
            [],
            [],
            color=line.colour,
            linestyle=line.style,
            linewidth=line.width,
            marker="" if kinds else line.marker,
            markersize=4,
            label=line.label,
        )
        for line in lines
    ]
    handles += [Line2D([], [], color=GREY, linestyle="", marker=KINDS[kind][1], markersize=5, label=kind) for kind in kinds]
    if lines:
        columns = math.ceil(_legend_lines(lines) / _COLUMN)
        figure.legend(handles=handles, loc="outside right center", fontsize=8, frameon=False, handlelength=4, ncols=columns)
    if text := caption([part for left_out in panels for part in left_out]):
        affected = sum(any(caption([part]) for part in of_run) for of_run in zip(*panels, strict=True))
        where = f", in {affected} of {count(len(lines), 'run')}" if len(lines) > 1 else ""
        figure.supxlabel(text + where, fontsize=9, x=0.01, ha="left")


def _compared(lines: Sequence[_Line]) -> str:
    """Name the runs, or count them if more than two, with the target and precision that they share."""
    targets, precisions = ({getattr(line.run, name) for line in lines} for name in ("target", "precision"))
    text = " against ".join(line.label.replace("\n", " ") for line in lines)
    if len(lines) > 2:
        text = count(len(lines), "run") + (f" of {targets.pop()}" if len(targets) == 1 else "")
    return textwrap.fill(text + (f", {precisions.pop()}" if len(precisions) == 1 else ""), _TITLE)
