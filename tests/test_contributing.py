"""The three examples of CONTRIBUTING.md, applied to a copy of the package, do what the page says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[1]
STEPS = re.findall(
    r"<!-- (new file|in) ?:? ?([\w/.]+)(?:, replace: (.*?))? -->\n```(?:python|text)\n(.*?)```",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.DOTALL,
)
BIASED = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        nn.init.normal_(self.embedding.weight, mean=5.0)
        self.linear = nn.Linear(32, 32)

    def forward(self, ids):
        x = self.embedding(ids)
        return (x + self.linear(x)) @ self.embedding.weight.T


def build():
    return Model()
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """A copy of the package with every step of the page applied."""
    folder = tmp_path_factory.mktemp("changed")
    for name in ("propcheck", "probes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, path, old, text in STEPS:
        target = folder / path
        if kind == "new file":
            assert not target.exists()
            target.write_text(text)
            continue
        before = target.read_text()
        assert before.count(old) == 1, f"{path}: {old}"
        target.write_text(before.replace(old, text.rstrip("\n")))
    return folder


def scan(folder, target, *options):
    (folder / "biased.py").write_text(BIASED)
    command = [sys.executable, "-m", "propcheck", "scan", target, "--no-plots", "--out", "run", "--output-format", "json"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_the_rule_finds_what_it_is_for(changed):
    document = scan(changed, "biased.py:build")
    (finding,) = [found for found in document["findings"] if found["rule"] == "PC107"]
    assert finding["name"] == "embedding-offset"
    assert finding["site"]["parameter"] == "embedding.weight"
    assert finding["value"] == pytest.approx(5.0, rel=0.05)


def test_the_column_is_measured_and_stored(changed):
    document = scan(changed, "biased.py:build")
    field = pq.read_schema(changed / "run" / "sublayers.parquet").field("sum_crest")
    assert field.metadata[b"description"] == b"Largest magnitude of the sum relative to its RMS."
    assert all(row["sum_crest"] == row["sum_absmax"] / row["sum_rms"] for row in document["sublayers"])


def test_the_placement_keeps_two_unit_signals_at_one(changed):
    options = [f"--set=model.{key}" for key in ("layers=2", "width=64", "vocabulary=256")]
    document = scan(changed, "tiny", *options, "--set=residual.placement=averaged", "--tokens=16")
    for row in document["sublayers"]:
        total = row["stream_rms"] ** 2 + row["update_rms"] ** 2 + 2 * row["cosine"] * row["stream_rms"] * row["update_rms"]
        assert row["sum_rms"] == pytest.approx(total**0.5, rel=1e-2)
    first, second = document["sublayers"][:2]  # what the next sublayer finds is the sum over sqrt(2)
    assert second["stream_rms"] == pytest.approx(first["sum_rms"] / 2**0.5, rel=1e-2)
