"""``assert_healthy`` fails where it should, with a message that says where, and writes baselines when it is told to."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from synthetic import additive, factors, parameter, run_of
from torch import nn

import propcheck
from propcheck import rules
from propcheck.api.run import Run
from propcheck.errors import PropcheckError
from propcheck.records.baseline import read_baseline
from propcheck.testing import UPDATE, assert_healthy

TINY = {"set": {"model.layers": 2, "model.width": 32, "model.vocabulary": 50}, "tokens": 8}


class Block(nn.Module):
    def __init__(self, width, std):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)
        nn.init.normal_(self.inner.weight, std=std)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers=3, width=16, std=0.05):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList([Block(width, std) for _ in range(layers)])
        self.head = nn.Linear(width, 40, bias=False)
        nn.init.normal_(self.embed.weight)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def broken(layers=3):
    """A model whose second block has a weight that is no number."""
    model = Model(layers)
    nn.init.constant_(model.blocks[1].inner.weight, math.nan)
    return model


def warned():
    """A run that grows tenfold a block, so that rules find errors."""
    record = run_of(factors(8, forward=10.0), [parameter("blocks.0.mlp.w")])
    return Run(dataclasses.replace(record, findings=rules.judge(record)))


@pytest.fixture(autouse=True)
def _judging(monkeypatch):
    monkeypatch.delenv(UPDATE, raising=False)


@pytest.fixture
def writing(monkeypatch):
    def write(target, place, **options):
        with monkeypatch.context() as patch:
            patch.setenv(UPDATE, "1")
            return assert_healthy(target, place, **options)

    return write


def instance():
    torch.manual_seed(0)
    return Model()


TARGETS = {"callable": lambda: Model, "instance": instance, "run": lambda: propcheck.scan(Model, tokens=8)}


@pytest.mark.parametrize("kind", TARGETS)
def test_whatever_a_scan_takes_is_judged_and_gated(kind, tmp_path, writing):
    options = {} if kind == "run" else {"tokens": 8}
    run = assert_healthy(TARGETS[kind](), **options)
    assert run.model.sites == 3
    place = tmp_path / "deep" / "model.parquet"
    assert writing(TARGETS[kind](), place, **options).record.sites == read_baseline(place).sites
    assert (tmp_path / "deep" / "model.md").read_text().startswith("# Baseline: ")
    assert assert_healthy(TARGETS[kind](), place, **options).record.sites == read_baseline(place).sites


def test_a_path_and_a_bundled_probe_are_targets(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "tiny"\n')
    assert assert_healthy("tiny", **TINY).record.sites == assert_healthy(str(tmp_path / "mine.toml"), **TINY).record.sites


def test_an_error_names_its_rule_and_its_place():
    with pytest.raises(AssertionError) as failed:
        assert_healthy(broken, tokens=8)
    text = str(failed.value)
    assert text.startswith(f"{__name__}:broken: ")
    assert " at or above error\n\nerror PC101 non-finite-parameter\n" in text
    assert "blocks.1.inner.weight" in text


def test_the_fail_level_says_what_fails():
    record = run_of(additive(4))
    for severity, failing in (
        ("error", {"error", "warning", "note"}),
        ("warning", {"warning", "note"}),
        ("note", {"note"}),
    ):
        run = Run(dataclasses.replace(record, findings=(dataclasses.replace(warned().findings[0], severity=severity),)))
        for level in ("error", "warning", "note", "never"):
            if level in failing:
                with pytest.raises(AssertionError, match=f"^synthetic: 1 finding at or above {level}\n\n{severity} PC"):
                    assert_healthy(run, fail_level=level)
            else:
                assert assert_healthy(run, fail_level=level) is run


def test_a_change_fails_with_the_place_where_it_starts(tmp_path, writing):
    def build(std=0.05):
        model = Model()
        nn.init.normal_(model.blocks[1].inner.weight, std=std)
        return model

    place = tmp_path / "model.parquet"
    writing(build, place, tokens=8)
    assert_healthy(build, place, tokens=8)
    # Arguments are part of what a baseline is of, so the change is in the code.
    build.__defaults__ = (0.1,)
    with pytest.raises(AssertionError) as failed:
        assert_healthy(build, place, tokens=8)
    text = str(failed.value)
    assert ": differs from its baseline\n" in text
    assert "error gate-stream " in text
    assert "The change starts at blocks.1." in " ".join(text.split())
    assert "blocks.1" in text
    assert text.endswith(
        "If the change is intended, run this test once with PROPCHECK_UPDATE_BASELINE=1 to update the baseline."
    )
    assert_healthy(build, place, tolerance="300%", tokens=8)
    writing(build, place, tokens=8)
    assert_healthy(build, place, tokens=8)


def test_what_the_baseline_has_is_known_and_what_it_has_not_fails_at_every_level(tmp_path):
    run = warned()
    assert any(one.severity == "error" for one in run.findings)
    place = tmp_path / "model.parquet"
    run.save_baseline(place)
    assert assert_healthy(run, place) is run
    with pytest.raises(AssertionError, match="at or above error") as failed:
        assert_healthy(run, place, fail_level="error")
    assert "differs from its baseline" not in str(failed.value)
    Run(dataclasses.replace(run.record, findings=())).save_baseline(place)
    for level in (None, "never"):
        with pytest.raises(AssertionError, match=r"error gate-findings .*\n  New error PC"):
            assert_healthy(run, place, fail_level=level)


def test_a_missing_baseline_is_one_line_before_anything_is_scanned(tmp_path, monkeypatch):
    monkeypatch.setattr("propcheck.testing.scan", pytest.fail)
    with pytest.raises(PropcheckError) as refused:
        assert_healthy(Model, tmp_path / "no.parquet")
    assert str(refused.value).startswith(f"{tmp_path}/no.parquet: no such baseline; run this test once with ")
    assert str(refused.value).endswith("PROPCHECK_UPDATE_BASELINE=1 to write it, and commit it")


def test_a_baseline_of_another_kind_is_refused_with_the_difference_and_the_way_out(tmp_path, writing):
    place = tmp_path / "model.parquet"
    writing(Model, place, tokens=8)
    for options, said in (
        ({"tokens": 8, "precision": "bf16"}, "precision fp32 (this run: bf16)"),
        ({"tokens": 9}, "inputs 1 x 8 zipf (this run: 1 x 9 zipf)"),
        ({"tokens": 8, "args": {"layers": 4}}, "arguments none (this run: layers=4)"),
    ):
        with pytest.raises(PropcheckError) as refused:
            assert_healthy(Model, place, **options)
        assert said in str(refused.value)
        assert str(refused.value).endswith("(from a test: PROPCHECK_UPDATE_BASELINE=1)")
        assert "\n" not in str(refused.value)


def test_a_run_with_a_nan_becomes_no_baseline(tmp_path, writing):
    with pytest.raises(PropcheckError, match="not written, because a run with NaN or infinity cannot be a baseline"):
        writing(broken, tmp_path / "model.parquet", tokens=8)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tolerance": "5%"}, "tolerance = '5%': needs a baseline"),
        ({"tokens": 8, "seeds": 1}, "tokens, seeds: no effect, since the target is a run and nothing is scanned"),
        ({"fail_level": "warn"}, "fail_level = 'warn': must be one of error, warning, note, never"),
    ],
)
def test_what_would_change_nothing_is_refused(options, said):
    with pytest.raises(PropcheckError) as refused:
        assert_healthy(warned(), **options)
    assert str(refused.value) == said


def test_pytest_shows_the_line_of_the_test_and_the_table_alone(tmp_path):
    # What a user sees: no line of propcheck's own code, the message whole.
    (tmp_path / "test_it.py").write_text(
        "import dataclasses\n"
        "from synthetic import additive, parameter, run_of\n"
        "from propcheck.api.run import Run\n"
        "from propcheck.testing import assert_healthy\n"
        "def test_it():\n"
        "    run = run_of(additive(2), [parameter('w')])\n"
        f"    Run(run).save_baseline({str(tmp_path / 'b.parquet')!r})\n"
        "    run = dataclasses.replace(run, loss=dataclasses.replace(run.loss, value=9.0))\n"
        f"    assert_healthy(Run(run), {str(tmp_path / 'b.parquet')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": f"{Path(__file__).parents[1] / 'support'}:{Path(__file__).parents[2]}",
            "PATH": "",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "testing.py" not in done.stdout
    assert "E       AssertionError: synthetic: differs from its baseline\n" in done.stdout
    assert "error gate-loss " in done.stdout
    assert "Gate failed: 1 of " in done.stdout
