"""The row of a cell says what the run says, fits 80 columns, and a cell that failed says why."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import additive, factors, run_of

from propcheck.comparison.sweep import Outcome, SweepResult
from propcheck.config.grid import grid, read_axes
from propcheck.records import Finding
from propcheck.render.terminal.sweep_table import print_sweep, summary, sweep_json, sweep_markdown


def finding(severity, rule):
    return Finding(rule, "name", severity, None, "sum_rms", math.nan, 1.0, "it is so", "change it")


FINDINGS = (finding("error", "PC201"), finding("warning", "PC205"), finding("warning", "PC301"), finding("note", "PC301"))


def sweep(*vary, runs):
    axes = read_axes(vary)
    outcomes = [
        Outcome(cell, status, None, run) if status == "failed" else Outcome(cell, status, run)
        for cell, (status, run) in zip(grid(axes), runs, strict=True)
    ]
    return SweepResult("small", Path("reports/small-sweep"), axes, tuple(outcomes))


GROWS = run_of(factors(8, forward=1.5, backward=2.0), findings=FINDINGS, loss=7.0)
FLAT = run_of(factors(4), loss=math.nan)
MIXED = sweep(
    "residual.placement=pre,post",
    "model.layers=8,4",
    runs=[("scanned", GROWS), ("skipped", FLAT), ("failed", "heads = 3 must divide | width"), ("scanned", FLAT)],
)


def printed(one, width=80):
    stream = io.StringIO()
    print_sweep(one, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_summary_is_that_of_the_recurrence():
    # Each block multiplies the stream by 1.5 and the gradient by 2, which is 1 after the last.
    one = summary(GROWS)
    assert (one.sites, one.loss) == (16, 7.0)
    assert one.sum_rms == pytest.approx(1.5**8)
    assert one.stream_factor == pytest.approx(1.5)
    assert (one.first_gradient, one.last_gradient) == pytest.approx((2.0**8, 2.0))
    assert one.gradient_factor == pytest.approx(2.0)


def test_what_was_not_observed_stays_so():
    one = summary(run_of([dataclasses.replace(r, sum_rms=None, grad_stream_norm=None) for r in additive(4)], loss=None))
    assert dataclasses.astuple(one) == (8, None, None, None, None, None, None)
    assert summary(run_of([])).sum_rms is None


def test_of_several_streams_the_longest_counts_and_of_those_alike_the_last():
    short, long = additive(2), factors(8, forward=1.5, backward=2.0)
    moved = [dataclasses.replace(r, site=r.site + 4, block=r.block + 2) for r in long]
    told = [dataclasses.replace(r, continues=None if r.site in (0, 4) else r.site - 1) for r in [*short, *moved]]
    run = run_of(told)
    assert summary(run).sum_rms == pytest.approx(1.5**8)
    alike = [dataclasses.replace(r, continues=None if r.site in (0, 8) else r.site - 1) for r in additive(8)]
    assert summary(run_of(alike)).sum_rms == alike[-1].sum_rms
    text = printed(sweep("model.layers=8", runs=[("scanned", run)]))
    assert "several streams" in text
    assert "several streams" not in printed(MIXED)


def test_a_row_a_cell_in_eighty_columns():
    text = printed(MIXED)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert next(row for row in rows if row[:2] == ["pre", "8"])[:7] == ["pre", "8", "25.6", "1.5", "256", "2", "7.00"]
    assert "1E 2W 1N PC201 PC205 +1" in text
    assert "none" in next(line for line in text.splitlines() if line.startswith("pre       4"))
    assert "NaN" in next(line for line in text.splitlines() if line.startswith("post      4"))
    assert "Columns hidden (terminal too narrow): sites, last grad." in text


def test_with_room_nothing_is_left_out():
    text = printed(MIXED, width=120)
    assert "Columns hidden" not in text
    assert "last  gradient" in text


def test_a_failed_cell_is_a_row_and_its_reason_stands_under_the_table():
    lines = printed(MIXED).splitlines()
    row = next(line for line in lines if line.startswith("post      8"))
    assert "failed" in row
    assert not any(character.isdigit() for character in row.removeprefix("post      8"))
    where = lines.index("failed placement=post, layers=8")
    assert lines[where + 1].strip() == "heads = 3 must divide | width"
    assert "Cells: 2 scanned, 1 up to date, 1 failed." in lines


def test_markdown_has_every_column_and_the_reasons():
    text = sweep_markdown(MIXED)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 4
    assert all(line.count("|") == table[0].count("|") for line in table)
    assert "sites" in table[0]
    assert "| pre | 8 | 16 | 25.6 | 1.5 |" in table[2]
    assert "**failed** placement=post, layers=8: heads = 3 must divide | width" in text


def test_json_is_strict_and_has_a_cell_for_each_combination():
    document = json.loads(sweep_json(MIXED), parse_constant=pytest.fail)
    assert document["schema_version"] == 1
    assert document["sweep"] == {
        "target": "small",
        "path": "reports/small-sweep",
        "vary": {"residual.placement": ["pre", "post"], "model.layers": [8, 4]},
    }
    first, second, failed, _ = document["cells"]
    assert first["values"] == {"residual.placement": "pre", "model.layers": 8}
    assert first["path"] == "reports/small-sweep/placement=pre,layers=8"
    assert [one["rule"] for one in first["findings"]] == ["PC201", "PC205", "PC301", "PC301"]
    assert first["findings"][0]["value"] == "NaN"
    assert second["status"] == "skipped"
    assert second["summary"]["loss"] == second["loss"]["value"] == "NaN"
    assert failed["status"] == "failed"
    assert failed["reason"] == "heads = 3 must divide | width"
    assert failed["run"] is failed["summary"] is failed["path"] is None
