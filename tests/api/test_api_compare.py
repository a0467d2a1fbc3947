"""``propcheck.compare`` and ``propcheck.gate`` say what the command line says, of runs, files and targets."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from torch import nn

import propcheck

TOKENS = 12


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers=3, width=16, std=0.02):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 40)
        for block in self.blocks:
            nn.init.normal_(block.inner.weight, std=std)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wide(**args):
    return Model(std=0.04, **args)


@functools.cache
def scanned(build=Model, **options):
    return propcheck.scan(build, tokens=TOKENS, threads=1, **options)


def test_runs_and_targets_are_compared_and_the_comparison_prints_its_table(tmp_path):
    directory = scanned().save(tmp_path / "run", plots=False)
    result = propcheck.compare(scanned(), directory, wide, tokens=TOKENS, threads=1)
    assert [one.label for one in result.contrasts] == ["B", "C"]
    assert not any(change.differing for change in result.contrasts[0].changes)
    first = {change.quantity: change.first for change in result.contrasts[1].changes}["update_rms"]
    # Twice the std of the same draws; the bias, uniform up to 1/4, is as it was.
    assert (first.place.site, first.place.module) == (0, "blocks.0.inner")
    assert 1 < first.ratio < 2
    assert "C starts to differ from A at blocks.0.inner.weight" in " ".join(str(result).split())
    assert repr(result).startswith("<propcheck.Comparison of ")
    assert {path.name for path in result.plot(tmp_path / "plots")} >= {"stream_rms.png", "grad_stream_norm.png"}


def test_a_run_passes_beside_its_baseline_file_and_another_does_not(tmp_path):
    baseline = scanned().save_baseline(tmp_path / "model.parquet")
    assert propcheck.gate(scanned(), baseline).passed
    assert propcheck.gate(Model, str(baseline), tokens=TOKENS, threads=1).passed
    result = propcheck.gate(scanned(wide), scanned())  # two runs in one hand: that the names differ is meant
    assert not result.passed
    assert {finding.rule for finding in result.findings} >= {"gate-init", "gate-stream"}
    assert (result.start.site, result.start.parameter) == (0, "blocks.0.inner.weight")
    assert all(one.tolerance == pytest.approx(1.05) for one in result.differences)
    text = " ".join(str(result).split())
    assert "update the baseline with --update-baseline and commit it." in text
    assert text.endswith("look first at the code where the change starts.")
    assert repr(result).endswith("failed>")


def test_a_stored_baseline_of_another_target_is_refused_unless_forced(tmp_path):
    baseline = scanned().save_baseline(tmp_path / "model.parquet")
    with pytest.raises(
        propcheck.PropcheckError, match=r"model\.parquet: cannot be compared with this run: it was made with target .*Model"
    ):
        propcheck.gate(scanned(wide), baseline)
    assert not propcheck.gate(scanned(wide), baseline, force=True).passed


def test_tolerances_are_a_share_or_shares_of_what_they_are_for():
    assert propcheck.gate(scanned(wide), scanned(), tolerance="300%").passed
    loose = propcheck.gate(scanned(wide), scanned(), tolerance={"blocks.*": "300%", "loss": 0.0})
    assert {one.quantity for one in loose.differences} <= {"loss", "grad_norm"}  # the embedding and the head are no blocks


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: propcheck.compare(scanned()), "needs two or more runs to compare"),
        (lambda: propcheck.gate(scanned(), scanned(), tokens=3), "tokens: no effect, since every side is a run"),
        (lambda: propcheck.compare(scanned(), scanned(), seeds=3), "seeds: no effect"),
        (lambda: propcheck.gate(scanned(), scanned(), tolerance="nan"), "tolerance nan: must be finite and 0 or more"),
        (lambda: propcheck.gate(scanned(), scanned(), tolerance={"los": "1%"}), "'los' is neither a quantity"),
        (lambda: propcheck.gate(scanned(), Path("missing.parquet")), "missing.parquet"),
    ],
)
def test_what_the_command_line_refuses_is_an_error(call, said):
    with pytest.raises(propcheck.PropcheckError, match=said):
        call()
