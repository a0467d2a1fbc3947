"""Several runs over one another, a picture a quantity: where they part is where to look.

Runs are told apart by colour and by line style. Values that a logarithmic axis cannot show are marked at its edges in the
run's colour and counted in the caption, never dropped.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from propcheck.analysis import profile as depth
from propcheck.formatting import count
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
    from propcheck.render.plots.drawing import Undrawn

QUANTITIES = ("stream_rms", "update_rms", "update_ratio", "grad_stream_norm", "param_grad_norm")

# Title and axis of each; another column is called by its name.
_WORDS = {
    "stream_rms": ("RMS of the stream before each residual addition", "stream RMS"),
    "sum_rms": ("RMS of the sum after each residual addition", "sum RMS"),
    "update_rms": ("RMS of each update", "update RMS"),
    "update_ratio": ("Size of each update beside the stream", "update RMS / stream RMS"),
    "grad_stream_norm": ("Gradient of the stream before each residual addition", "norm of the gradient"),
    "param_grad_norm": ("Gradient of the parameters of each sublayer", "norm of the gradient"),
}
# The stream's values go on from site to site; all others depend on the kind of sublayer, and one line through them would leap
# up and down at each site.
_OF_THE_STREAM = frozenset({"stream_rms", "sum_rms", "stream_norm", "sum_norm", "grad_stream_norm", "grad_sum_norm"})
_HUES = (DARK, VERMILION, BLUE, ORANGE, GREEN, PURPLE, SKY, GREY)
_STYLES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1, 3, 4)))
# One fewer than styles, so that 56 lines of one colour differ. No cross and no star: these mark what cannot be drawn.
_MARKERS = ("o", "s", "^", "D", "v", "P", "<")
# Characters on a line of the legend and of a title, and lines of a legend beside a picture.
_LEGEND, _TITLE, _COLUMN = 44, 100, 45


@dataclass(frozen=True, slots=True)
class _Line:
    """One run as it is drawn."""

    label: str
    run: Run
    colour: Any
    style: Any
    marker: str
    width: float


def write_overlays(runs: Sequence[tuple[str, Run]], directory: Path, quantities: Sequence[str] = QUANTITIES) -> list[Path]:
    """Draw a picture a quantity with every run in it.

    Parameters
    ----------
    runs
        Label and run; several seeds are drawn as their median, with their range as a band.
    directory
        Where the files go, ``stream_rms.png`` and so on, each under a temporary name first; made if need be. Same runs, same
        bytes.
    quantities
        Columns of ``sublayers.parquet`` that hold numbers.

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
        _finish(figure, lines, [left_out], [] if quantity in _OF_THE_STREAM else _kinds(lines))
        paths.append(write_figure(figure, directory / f"{quantity}.png"))
    return paths


def write_sweep_plot(cells: Sequence[tuple[Sequence[str], Run]], path: Path) -> Path:
    """Draw all cells of a sweep in one picture: the stream on its way forward, its gradient on its way back.

    Parameters
    ----------
    cells
        What was varied, a text an axis (``("placement=post", "layers=32")``), and the run. With several axes the first decides
        the colour and the others the line.
    path
        The PNG. Same cells, same bytes.
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
    """Choose a look for each run: with one axis colour and line differ, in a grid the first axis has the colours to itself."""
    parts = [tuple(label) for label, _ in cells]
    varying = [i for i in range(len(parts[0]) if parts else 0) if len({one[i] for one in parts}) > 1]
    places = [tuple(one[i] for i in varying) for one in parts]
    firsts, others = ([*dict.fromkeys(one)] for one in ([p[:1] for p in places], [p[1:] for p in places]))
    hues: Sequence[Any] = _HUES
    if len(firsts) > len(_HUES):  # from dark to light, in order; the lightest tenth is lost on white
        hues = [colormaps["viridis"](0.9 * i / (len(firsts) - 1)) for i in range(len(firsts))]
    lines = []
    for index, ((label, run), place) in enumerate(zip(cells, places, strict=True)):
        hue = firsts.index(place[:1])
        line = others.index(place[1:]) if len(others) > 1 else hue
        # Where two runs agree, the one below looks out on both sides of the one above.
        width = 2.2 - 1.1 * index / max(len(cells) - 1, 1)
        marker = _MARKERS[line % len(_MARKERS)]
        shown = textwrap.fill(", ".join(label), _LEGEND)
        lines.append(_Line(shown, run, hues[hue], _STYLES[line % len(_STYLES)], marker, width))
    return lines


def _same_sites(runs: Sequence[Run]) -> bool:
    """Whether a number means the same place in each: the same sites, in streams that begin at the same of them."""
    shapes = {tuple(tuple(record.site for record in stream.sites) for stream in depth.streams(run)) for run in runs}
    return len(shapes) < 2


def _panel(figure: Figure, place: int, lines: Sequence[_Line], quantity: str, *, by_site: bool) -> tuple[Axes, list[Undrawn]]:
    """Draw one quantity of all runs; also returns what of each could not be drawn."""
    axes: Axes = figure.add_subplot(place)
    title, unit = _WORDS.get(quantity, (quantity, quantity))
    axes.set_title(title, fontsize=11)
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.set_xlabel("site" if by_site else "relative depth (0: first site, 1: last site)")
    if by_site:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    left_out = [_draw(axes, line, index, quantity, by_site=by_site) for index, line in enumerate(lines)]
    if not any(drawable(getattr(record, quantity)) for line in lines for record in line.run.sites):
        axes.set_ylim(0.1, 10)
        axes.text(0.5, 0.5, "no positive finite value", transform=axes.transAxes, ha="center", va="center", color=GREY)
    return axes, left_out


def _draw(axes: Axes, line: _Line, index: int, quantity: str, *, by_site: bool) -> Undrawn:
    numbers = sorted({record.site for record in line.run.sites})
    x = {site: float(site) if by_site else i / max(len(numbers) - 1, 1) for i, site in enumerate(numbers)}
    drawn = []
    for sites, marker in _strands(line, quantity):
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
    edge = axes.get_xaxis_transform()  # y from 0 (foot) to 1 (top)
    for wrong, mark, y, size in ((left_out.zero, "x", 0.015, 6), (left_out.nonfinite, "*", 0.985, 9)):
        axes.plot([x[s] for s in wrong], [y] * len(wrong), mark, color=line.colour, transform=edge, markersize=size, zorder=4)
    return left_out


def _strands(line: _Line, quantity: str) -> list[tuple[list[SiteRecord], str]]:
    """Say which sites one line leads through, and its marker: none leads from an encoder to its decoder."""
    streams = [list(stream.sites) for stream in depth.streams(line.run)]
    if quantity in _OF_THE_STREAM:
        return [(sites, line.marker) for sites in streams]
    strands = [([r for r in sites if r.sublayer == kind], KINDS[kind][1]) for sites in streams for kind in KINDS]
    return [strand for strand in strands if strand[0]]


def _marked(points: Sequence[float], index: int) -> list[int]:
    """Choose the points that get a marker: about ten, and all that have no line since a gap lies on both sides."""
    every = max(1, len(points) // 10)
    gaps = [True, *map(math.isnan, points), True]
    # Not at the same places in every run, lest those that lie close hide one another's.
    return [i for i in range(len(points)) if i % every == index % every or (gaps[i] and gaps[i + 2])]


def _kinds(lines: Sequence[_Line]) -> list[str]:
    seen = {record.sublayer for line in lines for record in line.run.sites}
    return [kind for kind in KINDS if kind in seen]


def _legend_height(lines: Sequence[_Line]) -> float:
    """Return how high a picture must be, in inches, for a column of the legend beside it."""
    return 1.6 + 0.175 * min(_legend_lines(lines), _COLUMN)


def _legend_lines(lines: Sequence[_Line]) -> int:
    return sum(1 + line.label.count("\n") for line in lines)


def _finish(figure: Figure, lines: Sequence[_Line], panels: Sequence[Sequence[Undrawn]], kinds: Sequence[str]) -> None:
    """Put the legend beside the panels, and say under them what could not be drawn."""
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
    if text := caption([one for left_out in panels for one in left_out]):
        having = sum(any(caption([one]) for one in of_run) for of_run in zip(*panels, strict=True))
        where = f", in {having} of {count(len(lines), 'run')}" if len(lines) > 1 else ""
        figure.supxlabel(text + where, fontsize=9, x=0.01, ha="left")


def _compared(lines: Sequence[_Line]) -> str:
    """Say what the runs are: the two, or how many of which target; and in which precision, where all have one."""
    targets, precisions = ({getattr(line.run, name) for line in lines} for name in ("target", "precision"))
    said = " against ".join(line.label.replace("\n", " ") for line in lines)
    if len(lines) > 2:
        said = count(len(lines), "run") + (f" of {targets.pop()}" if len(targets) == 1 else "")
    return textwrap.fill(said + (f", {precisions.pop()}" if len(precisions) == 1 else ""), _TITLE)
