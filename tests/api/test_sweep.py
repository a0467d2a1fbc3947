"""Sweeps: a cell is a scan like any other, and a failed cell, an interruption and a second call cost no other cell."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

import propcheck.api.measurement
from propcheck.api.options import keyword_options
from propcheck.api.sweep import sweep_request
from propcheck.cli.app import run
from propcheck.config.grid import read_axes
from propcheck.errors import PropcheckError
from propcheck.records.store import read_run

PROBE = """
[model]
layers = 8
width = 64
vocabulary = 128
attention = { heads = 2 }
ffn = { width = 96 }
[inputs]
tokens = 16
"""

CODE = """
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers, heads):
        super().__init__()
        if 32 % heads:
            raise ValueError(f"{heads} heads do not divide 32")
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(Block(32) for _ in range(layers))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(layers=4, heads=2):
    return Model(layers, heads)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(PROBE)
    Path("code.py").write_text(CODE)
    return tmp_path


@pytest.fixture
def scanned(monkeypatch):
    """The layers of each model that is scanned from here on; ``stop`` says which scan raises what instead, once."""
    real = propcheck.api.measurement.measure

    class Scanned(list):
        stop: tuple[int, type[BaseException]] | None = None

    seen = Scanned()

    def measure(request):
        if seen.stop is not None and len(seen) == seen.stop[0]:
            error, seen.stop = seen.stop[1], None
            raise error
        seen.append(request.probe.model.layers)
        return real(request)

    monkeypatch.setattr(propcheck.api.measurement, "measure", measure)
    return seen


def sweep(*arguments, plots=False):
    return run(["sweep", *arguments, *([] if plots else ["--no-plots"])])


def document(capsys):
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def stamps():
    return {path: path.stat().st_mtime_ns for path in Path("reports").rglob("*.parquet")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vary", "model.layerz=2,4"], "--vary model.layerz=2: unknown key model.layerz; did you mean model.layers?"),
        (["--vary", "model.ffn={ width = 96 },{ wide = 96 }"], "--vary model.ffn={ wide = 96 }: unknown key model.ffn.wide"),
        (["--vary", "model.layers=0,-1"], "--vary model.layers=0: model.layers = 0 must be an integer >= 1"),
        (["--vary", "python.args.layers=1,2"], "arguments apply to package.module:callable"),
        (["--vary", "inputs.tokens=8,16", "--tokens", "4"], "--tokens: inputs.tokens is varied"),
        (["--vary", "model.layers=1,2", "--set", "model.layers=4"], "--set model.layers=4: model.layers is varied"),
        (["--vary", "model.layers=1,2", "--select", "PC999"], "unknown rule PC999"),
        ([], "Missing option '--vary'"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_slip_in_an_option_ends_the_sweep_at_once(arguments, message, capsys, scanned):
    assert sweep("small.toml", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)
    assert scanned == []
    assert not Path("reports").exists()


@pytest.mark.usefixtures("folder")
def test_each_cell_is_a_whole_run_equal_to_a_scan_of_its_own(capsys):
    assert sweep("small.toml", "--vary", "residual.placement=pre,post", "--vary", "model.layers=2,8", plots=True) == 0
    place = Path("reports/small-sweep")
    assert "4 scanned, 0 up to date, 0 failed" in capsys.readouterr().out
    cell = place / "placement=post,layers=8"
    files = {"sublayers.parquet", "parameters.parquet", "norms.parquet", "run.json", "forward.png", "backward.png"}
    assert {path.name for path in cell.iterdir()} == files
    assert {path.name for path in place.iterdir() if path.is_file()} == {"sweep.png"}
    assert run(["scan", "small.toml", "--set", "residual.placement=post", "--set", "model.layers=8", "--no-plots"]) == 0
    alone, own = read_run(Path("reports/small")), read_run(cell)
    assert own.sites == alone.sites
    assert own.parameters == alone.parameters
    assert (own.findings, own.loss, own.config_hash) == (alone.findings, alone.loss, alone.config_hash)
    assert own.path == str(cell)
    assert own.command.startswith("propcheck sweep small.toml --vary residual.placement=pre,post")


@pytest.mark.usefixtures("folder")
def test_a_refused_cell_is_a_row_with_its_reason_and_the_rest_goes_on(capsys):
    arguments = ["small.toml", "--vary", "model.attention.heads=2,3,4", "--output-format", "json", "--fail-level", "never"]
    assert sweep(*arguments) == 1
    good, bad, other = document(capsys)["cells"]
    assert [one["status"] for one in (good, bad, other)] == ["scanned", "failed", "scanned"]
    assert "attention.heads = 3 must divide width = 64" in bad["reason"]
    assert (bad["run"], bad["path"], bad["summary"], bad["findings"]) == (None, None, None, None)
    assert bad["values"] == {"model.attention.heads": 3}
    assert good["summary"]["sites"] == good["run"]["model"]["sites"] == 16
    assert sorted(path.name for path in Path("reports/small-sweep").iterdir()) == ["heads=2", "heads=4"]


@pytest.mark.usefixtures("folder")
def test_code_that_raises_for_one_value_fails_that_cell_alone(capsys):
    arguments = ["code.py:build", "--vary", "python.args.layers=2,4", "--vary", "python.args.heads=3,4", "--tokens", "8"]
    assert sweep(*arguments) == 1
    out = capsys.readouterr().out
    assert out.count("ValueError: 3 heads do not divide 32") == 2
    assert "2 scanned, 0 up to date, 2 failed" in out
    assert read_run(Path("reports/code-build-sweep/layers=4,heads=4")).model.blocks == 4


@pytest.mark.parametrize(("error", "reason"), [(MemoryError, "out of memory"), (ZeroDivisionError, "a bug in propcheck")])
@pytest.mark.usefixtures("folder")
def test_whatever_ends_one_scan_the_rest_goes_on(error, reason, capsys, scanned):
    scanned.stop = (1, error)
    assert sweep("small.toml", "--vary", "model.layers=4,1,2", "--output-format", "json") == 1
    first, second, third = document(capsys)["cells"]
    assert reason in second["reason"]
    assert (first["status"], third["status"]) == ("scanned", "scanned")


@pytest.mark.usefixtures("folder")
def test_a_second_call_scans_nothing_and_says_the_same(capsys, scanned):
    arguments = ["small.toml", "--vary", "model.layers=2,8", "--output-format", "json"]
    assert sweep(*arguments) == 0
    before = document(capsys)
    files = stamps()
    assert scanned == [2, 8]
    assert sweep(*arguments) == 0
    after = document(capsys)
    assert scanned == [2, 8]
    assert stamps() == files
    assert [one.pop("status") for one in after["cells"]] == ["skipped", "skipped"]
    assert [one.pop("status") for one in before["cells"]] == ["scanned", "scanned"]
    assert after == before
    assert sweep("small.toml", "--vary", "model.layers=8,4") == 0
    assert scanned == [2, 8, 4]


@pytest.mark.usefixtures("folder")
def test_a_run_that_is_there_is_judged_by_the_rules_of_this_call(capsys, scanned):
    arguments = ["small.toml", "--vary", "model.layers=8", "--set", "init.embedding_std=0.0001", "--output-format", "json"]
    sweep(*arguments)
    found = document(capsys)["cells"][0]["findings"]
    assert found
    assert sweep(*arguments, "--ignore", ",".join({one["rule"] for one in found})) == 0
    assert document(capsys)["cells"][0]["findings"] == []
    assert read_run(Path("reports/small-sweep/layers=8")).findings == ()
    sweep(*arguments)
    assert document(capsys)["cells"][0]["findings"] == found
    assert scanned == [8]


@pytest.mark.usefixtures("folder", "capsys")
def test_plots_that_a_done_cell_lacks_are_drawn(scanned):
    sweep("small.toml", "--vary", "model.layers=2")
    assert not list(Path("reports").rglob("*.png"))
    sweep("small.toml", "--vary", "model.layers=2", plots=True)
    assert {path.name for path in Path("reports").rglob("*.png")} == {"forward.png", "backward.png", "sweep.png"}
    assert scanned == [2]


@pytest.mark.parametrize(
    "change",
    [
        lambda place: Path("small.toml").write_text(PROBE + "batch = 2\n"),
        lambda place: (place / "sublayers.parquet").write_bytes(b"cut short"),
        lambda place: (place / "run.json").unlink(),
        lambda place: (place / "run.json").write_text(
            (place / "run.json").read_text().replace('"propcheck": "', '"propcheck": "0.')
        ),
    ],
    ids=["changed probe", "cut short", "killed", "another version"],
)
@pytest.mark.usefixtures("folder", "capsys")
def test_a_stale_run_is_scanned_again(change, scanned):
    arguments = ["small.toml", "--vary", "model.layers=2,4"]
    sweep(*arguments)
    change(Path("reports/small-sweep/layers=2"))
    del scanned[:]
    assert sweep(*arguments) == 0
    assert scanned == ([2, 4] if "batch" in Path("small.toml").read_text() else [2])
    assert sweep(*arguments) == 0
    assert len(scanned) < 3


@pytest.mark.usefixtures("folder", "capsys")
def test_other_ids_to_read_are_another_run_though_the_hash_leaves_out_where_they_lie(scanned):
    import numpy as np

    for name, top in (("a.npy", 2), ("b.npy", 100)):
        np.save(name, np.arange(1000, dtype=np.uint16) % top)
    for name in ("a.npy", "b.npy", "b.npy"):
        assert (
            sweep("small.toml", "--vary", "model.layers=2", "--set", "inputs.source=tokens", "--set", f"inputs.file={name}")
            == 0
        )
    assert scanned == [2, 2]


@pytest.mark.usefixtures("folder", "capsys")
def test_code_beside_the_target_that_is_younger_than_a_run_has_it_scanned_again(scanned):
    arguments = ["code.py:build", "--vary", "python.args.layers=2,4"]
    assert sweep(*arguments) == sweep(*arguments) == 0
    assert len(scanned) == 2
    Path("beside.py").write_text("")  # the target may import it
    os.utime("beside.py", (time.time() + 60,) * 2)
    assert sweep(*arguments) == 0
    assert len(scanned) == 4


@pytest.mark.usefixtures("folder")
def test_a_cell_that_fails_leaves_no_run_of_other_settings_behind(capsys):
    assert sweep("code.py:build", "--vary", "python.args.layers=2,4") == 0
    Path("code.py").write_text(CODE.replace("if 32 % heads", "if layers == 2"))
    assert sweep("code.py:build", "--vary", "python.args.layers=2,4") == 1
    assert "1 scanned, 0 up to date, 1 failed" in capsys.readouterr().out
    with pytest.raises(PropcheckError, match="not a complete propcheck run"):
        read_run(Path("reports/code-build-sweep/layers=2"))


@pytest.mark.usefixtures("folder")
def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on_from_there(capsys, scanned):
    arguments = ["small.toml", "--vary", "model.layers=2,4,8"]
    scanned.stop = (2, KeyboardInterrupt)
    assert sweep(*arguments) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "propcheck: interrupted with 2 of 3 cells in reports/small-sweep\n"
    assert scanned == [2, 4]
    assert sweep(*arguments) == 0
    assert scanned == [2, 4, 8]
    assert "1 scanned, 2 up to date, 0 failed" in capsys.readouterr().out


@pytest.mark.usefixtures("folder")
def test_findings_decide_the_status_by_the_fail_level(capsys):
    # An embedding that the first updates dwarf is a warning: PC205.
    arguments = ["small.toml", "--vary", "model.layers=8", "--set", "init.embedding_std=0.0001", "--select", "PC205"]
    assert sweep(*arguments) == 0
    assert "1W PC205" in " ".join(capsys.readouterr().out.split())
    assert sweep(*arguments, "--fail-level", "warning") == 1
    assert sweep(*arguments, "--fail-level", "warning", "--ignore", "PC205") == 0
    assert sweep(*arguments, "--vary", "rules.PC205.severity=note,error") == 1
    assert sweep(*arguments, "--vary", "rules.PC205.severity=note,error", "--fail-level", "never") == 0


@pytest.mark.usefixtures("folder")
def test_a_config_json_is_varied_by_its_overrides(capsys):
    Path("gpt").mkdir()
    keys = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_head": 2,
        "n_layer": 2,
        "vocab_size": 64,
    }
    Path("gpt/config.json").write_text(json.dumps(keys))
    assert (
        sweep("gpt/config.json", "--vary", "huggingface.overrides.n_layer=2,3", "--tokens", "8", "--output-format", "json") == 0
    )
    cells = document(capsys)["cells"]
    assert [one["summary"]["sites"] for one in cells] == [4, 6]
    assert [Path(one["path"]).name for one in cells] == ["n_layer=2", "n_layer=3"]


@pytest.mark.usefixtures("folder", "scanned")
def test_on_a_terminal_it_is_said_which_cell_is_next_and_elsewhere_nothing(capsys, monkeypatch):
    assert sweep("small.toml", "--vary", "model.layers=2,4") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert sweep("small.toml", "--vary", "model.layers=2,4") == 0
    said = ["propcheck: cell 1 of 2: layers=2", "propcheck: cell 2 of 2: layers=4"]
    assert capsys.readouterr().err.splitlines() == said
    assert sweep("small.toml", "--vary", "model.layers=2,4", "--quiet") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("folder")
def test_a_place_that_cannot_be_written_is_refused_before_the_first_scan(capsys, scanned):
    Path("file").write_text("")
    assert sweep("small.toml", "--vary", "model.layers=2", "--out", "file") == 2
    assert "file is not a directory" in capsys.readouterr().err
    assert scanned == []


@pytest.mark.usefixtures("folder")
def test_all_cells_are_checked_before_the_first_scan():
    cells = sweep_request("small.toml", read_axes(["model.layers=2,0,4"]), keyword_options({"batch": 3})).cells
    assert [cell.request and (cell.request.probe.model.layers, cell.request.probe.inputs.batch) for cell in cells] == [
        (2, 3),
        None,
        (4, 3),
    ]
    assert cells[1].refusal == "--vary model.layers=0: model.layers = 0 must be an integer >= 1 and <= 10000"
    assert not Path("reports").exists()
