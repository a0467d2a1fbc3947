"""Two pictures of a run: the forward pass and the backward pass, by site, on a logarithmic axis, and what theory predicts.

Matplotlib's object interface with the Agg canvas: no display, no global state. Values that a logarithmic axis cannot show are
marked at its edges and counted in the caption, never dropped.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from propcheck import depth
from propcheck.wording import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from propcheck.records import Run, SiteRecord

# Okabe and Ito's palette, told apart by all common kinds of colour vision; shapes differ too.
_KINDS = {
    "attention": ("#D55E00", "^"),
    "linear_attention": ("#0072B2", "v"),
    "ssm": ("#56B4E9", "<"),
    "mlp": ("#009E73", "o"),
    "moe": ("#CC79A7", "s"),
    "other": ("#E69F00", "D"),
}
_DARK, _GREY, _PREDICTED = "#000000", "#888888", "#D55E00"


@dataclass(frozen=True, slots=True)
class _Series:
    """One quantity of some sites: median, lowest and highest over the seeds, and every (site, value) that was recorded."""

    sites: tuple[int, ...]
    values: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    recorded: tuple[tuple[int, float | None], ...]


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
        figure = Figure(figsize=(10, 5.2), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure, run, curve)
        temporary = directory / f".{name}.{os.getpid()}.tmp"
        try:
            # Without the version of matplotlib in the file, its bytes depend on what is drawn alone.
            figure.savefig(temporary, format="png", metadata={"Software": None})
            temporary.replace(directory / name)
        finally:
            temporary.unlink(missing_ok=True)
        paths.append(directory / name)
    return paths


def _forward(figure: Figure, run: Run, curve: depth.Profile) -> None:
    axes = _axes(figure, run, curve, "Forward: RMS by residual addition", "RMS")
    drawn = [
        *_lines(axes, run, "sum_rms", "sum", _DARK, "-"),
        *_lines(axes, run, "stream_rms", "stream (before the addition)", _GREY, "--"),
    ]
    _theory(axes, run, "theory_sum_rms")
    for kind, members in _by_kind(curve):
        drawn.append(_marks(axes, _series(run, members, "update_rms"), f"update: {kind}", *_KINDS[kind]))
    _finish(figure, axes, drawn)


def _backward(figure: Figure, run: Run, curve: depth.Profile) -> None:
    axes = _axes(figure, run, curve, "Backward: gradient norms by residual addition", "norm of the gradient")
    drawn = [
        *_lines(axes, run, "grad_stream_norm", "stream", _DARK, "-"),
        *_lines(axes, run, "grad_sum_norm", "sum", _GREY, "--"),
        *_lines(axes, run, "grad_update_norm", "update", "#E69F00", ":"),
    ]
    _theory(axes, run, "theory_grad_norm")
    for kind, members in _by_kind(curve):
        drawn.append(_marks(axes, _series(run, members, "param_grad_norm"), f"parameters: {kind}", *_KINDS[kind]))
    _finish(figure, axes, drawn)


def _by_kind(curve: depth.Profile) -> list[tuple[str, list[SiteRecord]]]:
    kinds = [(kind, [record for record in curve.sites if record.sublayer == kind]) for kind in _KINDS]
    return [(kind, members) for kind, members in kinds if members]


def _series(run: Run, sites: Sequence[SiteRecord], column: str) -> _Series:
    shown: dict[int, list[float]] = {record.site: [] for record in sites}
    recorded = tuple((record.site, getattr(record, column)) for record in run.sites if record.site in shown)
    for where, value in recorded:
        if _drawable(value):
            shown[where].append(value)

    def ends(pick: Callable[[list[float]], float]) -> tuple[float | None, ...]:
        return tuple(pick(values) if len(values) > 1 else None for values in shown.values())

    return _Series(tuple(shown), tuple(getattr(record, column) for record in sites), ends(min), ends(max), recorded)


def _drawable(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


def _axes(figure: Figure, run: Run, curve: depth.Profile, title: str, label: str) -> Axes:
    axes: Axes = figure.add_subplot()
    axes.set_yscale("log")
    axes.set_title(f"{title}\n{run.target}, {run.precision}, placement {run.model.placement}", fontsize=11)
    axes.set_ylabel(label)
    axes.grid(visible=True, which="major", alpha=0.3)
    sites = [record.site for record in curve.sites] or [0]
    axes.set_xlim(min(sites) - 1, max(sites) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_xlabel(f"site ({count(len(curve.units), curve.noun)})" if curve.noun == "block" else "site")
    return axes


def _points(series: _Series) -> list[float]:
    return [value if value is not None and _drawable(value) else math.nan for value in series.values]


def _lines(axes: Axes, run: Run, column: str, label: str, colour: str, style: str) -> list[_Series]:
    """Draw a line for each stream: none leads from an encoder to its decoder."""
    parts = [_series(run, stream.sites, column) for stream in depth.streams(run)]
    return [_line(axes, part, label if part is parts[0] else None, colour, style) for part in parts]


def _theory(axes: Axes, run: Run, column: str) -> None:
    """Draw what was predicted, where anything was. A null among it is no value that was not observed."""
    label: str | None = "theory"
    for stream in depth.streams(run):
        points = _points(_series(run, stream.sites, column))
        if any(map(math.isfinite, points)):
            sites = [record.site for record in stream.sites]
            axes.plot(sites, points, color=_PREDICTED, label=label, linewidth=0.9, linestyle=(0, (4, 2)), zorder=2.5)
            label = None


def _line(axes: Axes, series: _Series, label: str | None, colour: str, style: str) -> _Series:
    # A gap in a line hides a lone point between two gaps; a small dot shows it.
    axes.plot(
        series.sites, _points(series), style, color=colour, label=label, linewidth=1.5, marker=".", markersize=2.5, zorder=2
    )
    _band(axes, series, colour)
    return series


def _marks(axes: Axes, series: _Series, label: str, colour: str, marker: str) -> _Series:
    axes.plot(series.sites, _points(series), marker, color=colour, label=label, markersize=4.5, markeredgewidth=0, zorder=3)
    _band(axes, series, colour)
    return series


def _band(axes: Axes, series: _Series, colour: str) -> None:
    ranges = [
        (s, lo, hi)
        for s, lo, hi in zip(series.sites, series.low, series.high, strict=True)
        if lo is not None and hi is not None
    ]
    if ranges:
        axes.vlines(
            [r[0] for r in ranges],
            [r[1] for r in ranges],
            [r[2] for r in ranges],
            color=colour,
            alpha=0.35,
            linewidth=2,
            zorder=1,
        )


def _finish(figure: Figure, axes: Axes, drawn: Sequence[_Series]) -> None:
    """Mark what the axis cannot show, and say in the caption how much that is."""
    pairs = [pair for series in drawn for pair in series.recorded]
    zero = [site for site, value in pairs if value == 0]
    bad = [site for site, value in pairs if value is not None and not math.isfinite(value)]
    unseen = sum(value is None for _, value in pairs)
    edge = axes.get_xaxis_transform()  # x in sites, y from 0 (foot) to 1 (top)
    if zero:
        axes.plot(zero, [0.015] * len(zero), "x", color=_DARK, transform=edge, label="zero", markersize=6, zorder=4)
    if bad:
        axes.plot(
            bad, [0.985] * len(bad), "*", color="#D55E00", transform=edge, label="NaN or infinite", markersize=9, zorder=4
        )
    if not any(_drawable(value) for _, value in pairs):
        axes.set_ylim(0.1, 10)
        axes.text(0.5, 0.5, "no positive finite value", transform=axes.transAxes, ha="center", va="center", color=_GREY)
    parts = [
        f"{count(len(zero), 'value')} zero (x at the foot)" if zero else "",
        f"{count(len(bad), 'value')} NaN or infinite (star at the top)" if bad else "",
        f"{count(unseen, 'value')} not observed" if unseen else "",
    ]
    if any(parts):
        figure.supxlabel(", ".join(part for part in parts if part), fontsize=9, x=0.01, ha="left")
    if pairs:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
