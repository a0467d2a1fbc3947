"""Overlays: the same bytes each time, every run told apart, no value dropped in silence, no line from one stream to another."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from matplotlib.image import imread
from synthetic import additive, factors, post_norm, qwen, run_of

from propcheck.render.plots import overlay

PRE, POST = run_of(additive(8)), run_of(post_norm(8))


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Draws, and returns the figures by their file's name instead of writing them."""

    def draw(what, *arguments):
        found = {}
        with monkeypatch.context() as patch:
            patch.setattr(overlay, "write_figure", lambda figure, path: found.setdefault(path.name, figure))
            what(*arguments)
        return found

    return draw


def overlays(figures, tmp_path, runs, *quantities):
    return figures(overlay.write_overlays, runs, tmp_path, quantities or overlay.QUANTITIES)


def curves(axes):
    """The lines through the data, not the marks on the edges."""
    return [line for line in axes.get_lines() if line.get_transform() == axes.transData and len(line.get_xdata())]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_picture_is_written_for_each_quantity_and_nothing_else(tmp_path):
    paths = overlay.write_overlays([("pre", PRE), ("post", POST)], tmp_path / "new")
    names = ["stream_rms.png", "update_rms.png", "update_ratio.png", "grad_stream_norm.png", "param_grad_norm.png"]
    assert paths == [tmp_path / "new" / name for name in names]
    assert sorted((tmp_path / "new").iterdir()) == sorted(paths)
    assert all(imread(path).shape[:2] == (624, 1200) for path in paths)


def test_the_same_runs_give_the_same_bytes(tmp_path):
    runs = [("pre", PRE), ("post", POST)]
    first, second = (overlay.write_overlays(runs, tmp_path / name, ["sum_rms"]) for name in ("a", "b"))
    assert first[0].read_bytes() == second[0].read_bytes()
    cells = [(("placement=pre",), PRE), (("placement=post",), POST)]
    first, second = (overlay.write_sweep_plot(cells, tmp_path / name) for name in ("a.png", "b.png"))
    assert first.read_bytes() == second.read_bytes()


def test_runs_of_the_same_sites_are_drawn_by_site_and_others_by_relative_depth(figures, tmp_path):
    (axes,) = overlays(figures, tmp_path, [("pre", PRE), ("post", POST)], "sum_rms")["sum_rms.png"].axes
    assert axes.get_xlabel() == "site"
    assert [list(line.get_xdata()) for line in curves(axes)] == [list(range(16))] * 2
    assert list(curves(axes)[0].get_ydata()) == pytest.approx([record.sum_rms for record in PRE.sites])
    deeper = run_of(additive(16))
    (axes,) = overlays(figures, tmp_path, [("8", PRE), ("16", deeper)], "sum_rms")["sum_rms.png"].axes
    assert axes.get_xlabel().startswith("relative depth")
    shallow, deep = curves(axes)
    assert list(shallow.get_xdata()) == pytest.approx([i / 15 for i in range(16)])
    assert list(deep.get_xdata()) == pytest.approx([i / 31 for i in range(32)])


def test_the_title_says_what_is_compared_and_the_legend_names_each(figures, tmp_path):
    figure = overlays(figures, tmp_path, [("pre", PRE), ("post", POST)], "grad_stream_norm")["grad_stream_norm.png"]
    assert figure.axes[0].get_title() == "Gradient norm of the stream at each site\npre against post, bf16"
    assert legend(figure) == ["pre", "post"]
    many = [(f"run {i}", PRE) for i in range(5)]
    figure = overlays(figures, tmp_path, many, "sum_rms")["sum_rms.png"]
    assert figure.axes[0].get_title().endswith("\n5 runs of synthetic, bf16")


@pytest.mark.parametrize("amount", [2, 8, 9, 30])
def test_no_two_of_many_runs_look_alike(amount, figures, tmp_path):
    runs = [(str(i), run_of(factors(2, start=1 + i))) for i in range(amount)]
    (axes,) = overlays(figures, tmp_path, runs, "sum_rms")["sum_rms.png"].axes
    lines = curves(axes)
    assert len({line.get_color() for line in lines}) == amount
    looks = [(line.get_linestyle(), line.get_marker(), str(line._unscaled_dash_pattern)) for line in lines]
    assert len(set(looks)) == amount
    assert all(one != two for one, two in itertools.pairwise(looks))


def test_in_a_grid_the_first_key_has_the_colours_and_the_others_the_lines(figures, tmp_path):
    values = itertools.product(("pre", "post", "keel"), (16, 32), (0.01, 0.02, 0.1, 0.2, 0.3))
    cells = [((f"placement={p}", f"layers={n}", f"std={s}"), run_of(factors(2, start=s))) for p, n, s in values]
    figure = figures(overlay.write_sweep_plot, cells, tmp_path / "sweep.png")["sweep.png"]
    forward, backward = figure.axes
    for axes in (forward, backward):
        lines = curves(axes)
        assert len({line.get_color() for line in lines}) == 3
        assert len({line.get_color() for line in lines[:10]}) == 1
        looks = [(line.get_marker(), str(line._unscaled_dash_pattern)) for line in lines]
        assert len(set(looks[:10])) == 10
        assert looks[:10] == looks[10:20] == looks[20:]
    assert legend(figure)[0] == "placement=pre, layers=16, std=0.01"
    assert len(legend(figure)) == 30


def test_the_legend_of_thirty_cells_lies_beside_the_data_and_within_the_picture(figures, tmp_path):
    cells = [((f"a_rather_long_key={i}", "another_key_that_is_long=sandwich"), PRE) for i in range(30)]
    figure = figures(overlay.write_sweep_plot, cells, tmp_path / "sweep.png")["sweep.png"]
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.y0 <= box.y1 <= figure.bbox.y1
    assert max(axes.get_window_extent().x1 for axes in figure.axes) < box.x0 < box.x1 <= figure.bbox.x1 + 1
    assert all(axes.get_window_extent().width > 250 for axes in figure.axes)


def test_values_that_a_logarithm_lacks_are_marked_and_counted(figures, tmp_path):
    records = additive(8)
    records[2] = dataclasses.replace(records[2], sum_rms=math.nan)
    records[4] = dataclasses.replace(records[4], sum_rms=math.inf)
    records[5] = dataclasses.replace(records[5], sum_rms=0.0)
    records[7] = dataclasses.replace(records[7], sum_rms=None)
    figure = overlays(figures, tmp_path, [("bad", run_of(records)), ("good", POST)], "sum_rms")["sum_rms.png"]
    assert figure.get_supxlabel() == (
        "1 value zero (x at the bottom), 2 values NaN or infinite (star at the top), 1 value not observed, in 1 of 2 runs"
    )
    (axes,) = figure.axes
    marks = {
        line.get_marker(): (list(line.get_xdata()), line.get_color())
        for line in axes.get_lines()
        if line.get_transform() == axes.get_xaxis_transform() and len(line.get_xdata())
    }
    colour = curves(axes)[0].get_color()
    assert marks == {"x": ([5], colour), "*": ([2, 4], colour)}
    assert [math.isnan(value) for value in curves(axes)[0].get_ydata()] == [i in (2, 4, 5, 7) for i in range(16)]


def test_a_value_between_two_gaps_has_a_marker(figures, tmp_path):
    records = [dataclasses.replace(r, sum_rms=r.sum_rms if r.site in (77, 79) else None) for r in additive(64)]
    (axes,) = overlays(figures, tmp_path, [("gaps", run_of(records))], "sum_rms")["sum_rms.png"].axes
    assert {77, 79} <= set(curves(axes)[0].get_markevery())


def test_several_seeds_are_their_median_and_a_band(figures, tmp_path):
    scales = (1.0, 3.0, 2.0)
    sites = [dataclasses.replace(r, sum_rms=r.sum_rms * scales[s]) for s in range(3) for r in additive(4, seed=s)]
    run = run_of(sites, seeds=(0, 1, 2))
    (axes,) = overlays(figures, tmp_path, [("seeds", run)], "sum_rms")["sum_rms.png"].axes
    one = [record.sum_rms for record in additive(4)]
    assert list(curves(axes)[0].get_ydata()) == pytest.approx([2 * value for value in one])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (min(heights), max(heights)) == pytest.approx((min(one), 3 * max(one)))
    (axes,) = overlays(figures, tmp_path, [("one", PRE)], "sum_rms")["sum_rms.png"].axes
    assert not axes.collections


def test_no_line_leads_from_one_stream_to_the_next(figures, tmp_path):
    half = 8
    sites = [dataclasses.replace(r, continues=None if r.site in (0, half) else r.site - 1) for r in additive(8)]
    run = run_of(sites)
    (axes,) = overlays(figures, tmp_path, [("two", run)], "sum_rms")["sum_rms.png"].axes
    assert [list(line.get_xdata()) for line in curves(axes)] == [list(range(half)), list(range(half, 16))]
    # The same numbers in other streams are other places.
    (axes,) = overlays(figures, tmp_path, [("two", run), ("one", PRE)], "sum_rms")["sum_rms.png"].axes
    assert axes.get_xlabel().startswith("relative depth")


def test_updates_of_different_kinds_are_lines_of_their_own(figures, tmp_path):
    run = run_of(qwen())
    found = overlays(figures, tmp_path, [("qwen", run), ("post", run_of(post_norm(64)))], "update_rms", "sum_rms")
    lines = curves(found["update_rms.png"].axes[0])
    by_kind = {}
    for record in run.sites:
        by_kind.setdefault(record.sublayer, []).append(record.site)
    assert sorted(list(line.get_xdata()) for line in lines[:3]) == sorted(by_kind.values())
    assert len({line.get_marker() for line in lines[:3]}) == 3
    assert len(lines) == 5
    assert legend(found["update_rms.png"]) == ["qwen", "post", "attention", "linear_attention", "mlp"]
    assert len(curves(found["sum_rms.png"].axes[0])) == 2
    assert legend(found["sum_rms.png"]) == ["qwen", "post"]


@pytest.mark.parametrize("value", [None, 0.0, math.nan])
def test_runs_without_a_drawable_value_are_drawn(value, figures, tmp_path):
    records = [dataclasses.replace(r, **dict.fromkeys(overlay.QUANTITIES, value)) for r in additive(1)]
    for name, figure in overlays(figures, tmp_path, [("none", run_of(records)), ("empty", run_of([]))]).items():
        assert [text.get_text() for text in figure.axes[0].texts] == ["no positive finite value"], name
    overlay.write_overlays([("none", run_of(records)), ("empty", run_of([]))], tmp_path)
    overlay.write_sweep_plot([(("none",), run_of(records))], tmp_path / "sweep.png")
