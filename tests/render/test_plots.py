"""The plots: written whole, the same bytes each time, and no value dropped in silence."""

import dataclasses
import math

import pytest
from matplotlib.image import imread
from synthetic import additive, qwen, run_of

from propcheck.analysis.theory import predict
from propcheck.render.plots import run_plots as plots


def drawn_text(monkeypatch, run, directory):
    """Everything that the figures say: captions, and the labels of the legends."""
    figures = []
    finish = plots._finish
    monkeypatch.setattr(plots, "_finish", lambda figure, axes, drawn: (finish(figure, axes, drawn), figures.append(figure)))
    plots.write_plots(run, directory)
    return [
        " ".join(
            [
                figure.get_supxlabel(),
                *(text.get_text() for ax in figure.axes if ax.get_legend() for text in ax.get_legend().get_texts()),
            ]
        )
        for figure in figures
    ]


def test_both_pictures_are_written_and_nothing_else(tmp_path):
    paths = plots.write_plots(run_of(qwen()), tmp_path / "run")
    assert paths == [tmp_path / "run" / "forward.png", tmp_path / "run" / "backward.png"]
    assert sorted((tmp_path / "run").iterdir()) == sorted(paths)
    assert all(imread(path).shape[:2] == (624, 1200) for path in paths)


def test_the_same_run_gives_the_same_bytes(tmp_path):
    run = run_of(additive(3))
    first, second = (plots.write_plots(run, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_kinds_are_told_apart_in_the_legend(monkeypatch, tmp_path):
    forward, backward = drawn_text(monkeypatch, run_of(qwen()), tmp_path)
    for kind in ("attention", "linear_attention", "mlp"):
        assert f"update: {kind}" in forward
        assert f"parameters: {kind}" in backward
    assert "not observed" not in forward


def test_what_theory_predicts_is_drawn_where_anything_is_and_its_nulls_are_no_gaps(monkeypatch, tmp_path):
    run = run_of(additive(4))
    assert all("theory" not in text for text in drawn_text(monkeypatch, run, tmp_path))
    predicted = dataclasses.replace(run, sites=predict(run))
    assert predicted.sites[0].theory_sum_rms is None
    for text in drawn_text(monkeypatch, predicted, tmp_path):
        assert text.split().count("theory") == 1
        assert "not observed" not in text


def test_the_line_of_theory_goes_through_its_values(tmp_path, monkeypatch):
    run = run_of(additive(4))
    run = dataclasses.replace(run, sites=predict(run))
    lines = {}
    finish = plots._finish
    monkeypatch.setattr(
        plots,
        "_finish",
        lambda figure, axes, drawn: (
            finish(figure, axes, drawn),
            lines.update({axes.get_ylabel(): [line for line in axes.get_lines() if line.get_label() == "theory"]}),
        ),
    )
    plots.write_plots(run, tmp_path)
    (forward,), (backward,) = lines["RMS"], lines["gradient norm"]
    assert list(forward.get_ydata())[1:] == pytest.approx([r.sum_rms for r in run.sites[1:]])
    assert list(backward.get_ydata())[1:] == pytest.approx([r.grad_stream_norm for r in run.sites[1:]])


def test_values_that_a_logarithm_lacks_are_counted(monkeypatch, tmp_path):
    records = [r for seed in (0, 1) for r in additive(4, seed=seed)]
    records[2] = dataclasses.replace(records[2], sum_rms=math.nan, stream_rms=math.inf, update_rms=0.0)
    records[5] = dataclasses.replace(records[5], param_grad_norm=None, grad_stream_norm=0.0)
    forward, backward = drawn_text(monkeypatch, run_of(records, seeds=(0, 1)), tmp_path)
    assert "1 value zero" in forward
    assert "2 values NaN or infinite" in forward
    assert "1 value zero" in backward
    assert "1 value not observed" in backward


@pytest.mark.parametrize("value", [None, 0.0, math.nan, -1.0])
def test_a_run_without_a_drawable_value_is_drawn(value, tmp_path):
    names = ("stream_rms", "update_rms", "sum_rms", "grad_stream_norm", "grad_sum_norm", "grad_update_norm", "param_grad_norm")
    plots.write_plots(run_of([dataclasses.replace(r, **dict.fromkeys(names, value)) for r in additive(1)]), tmp_path)
    plots.write_plots(run_of([]), tmp_path)


def test_no_line_leads_from_one_stream_to_the_next(monkeypatch, tmp_path):
    first = additive(3)
    half = len(first) // 2
    sites = [dataclasses.replace(one, continues=None if one.site in (0, half) else one.site - 1) for one in first]
    lines = []
    real = plots._line
    monkeypatch.setattr(plots, "_line", lambda axes, series, *rest: lines.append(series.sites) or real(axes, series, *rest))
    plots.write_plots(run_of(sites), tmp_path)
    ends = (tuple(range(half)), tuple(range(half, len(first))))
    assert set(lines) == set(ends)
