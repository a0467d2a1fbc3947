"""``propcheck.scan`` says what the command line says, of a string, a callable, or a model that is there already."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import propcheck
from propcheck.cli import app as cli

SMALL = {"model.layers": 2, "model.width": 32, "model.vocabulary": 50}
ROOT = Path(__file__).parents[2]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers=2, width=16, std=1.0):
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(width, 40)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=std)

    def forward(self, ids):
        self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_probe_by_name_gives_what_the_command_line_stores(tmp_path, capsys):
    run = propcheck.scan("tiny", set=SMALL, tokens=8, seeds=[0, 1])
    options = [f"--set={key}={value}" for key, value in SMALL.items()]
    cli.run(["scan", "tiny", *options, "--tokens", "8", "--seeds", "0,1", "--out", str(tmp_path / "cli"), "--no-plots", "-q"])
    assert capsys.readouterr().out.startswith(str(run).splitlines()[0])
    for name, frame in (("sublayers", run.sublayers), ("parameters", run.parameters)):
        pd.testing.assert_frame_equal(frame, pd.read_parquet(tmp_path / "cli" / f"{name}.parquet"))
    stored = json.loads((tmp_path / "cli" / "run.json").read_text())
    assert [one.rule for one in run.findings] == [one["rule"] for one in stored["findings"]]
    assert run.loss.uniform == pytest.approx(math.log(50))
    assert (run.model.sites, run.model.blocks) == (4, 2)
    assert run.record.config_hash == stored["config_hash"]


def test_a_saved_run_reads_back(tmp_path):
    run = propcheck.scan("tiny", set=SMALL, tokens=8)
    assert run.save(tmp_path / "here") == tmp_path / "here"
    assert {path.name for path in (tmp_path / "here").iterdir()} == {
        "run.json",
        "sublayers.parquet",
        "parameters.parquet",
        "norms.parquet",
        "forward.png",
        "backward.png",
    }
    pd.testing.assert_frame_equal(run.sublayers, pd.read_parquet(tmp_path / "here" / "sublayers.parquet"))
    assert str(tmp_path / "here") in str(run).replace("\n", "")


def test_a_run_saved_without_plots_leaves_none_of_an_earlier_run(tmp_path):
    run = propcheck.scan("tiny", set=SMALL, tokens=8)
    run.save(tmp_path)
    assert list(tmp_path.glob("*.png"))
    run.save(tmp_path, plots=False)
    assert not list(tmp_path.glob("*.png"))


def test_a_sweep_over_a_callable_of_this_process_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = propcheck.sweep(Model, vary={"python.args.layers": [1, 3]}, args={"width": 8}, tokens=8)
    assert [(cell.status, cell.run.model.sites, cell.run.model.width) for cell in result.cells] == [
        ("scanned", 1, 8),
        ("scanned", 3, 8),
    ]
    assert str(result).splitlines()[0].endswith(":Model: 2 values of python.args.layers, 2 cells")
    assert repr(result).endswith(": 2 cells>")
    assert list(tmp_path.iterdir()) == []
    assert result.plot(tmp_path / "sweep.png").exists()


def test_a_sweep_with_a_directory_resumes_unless_the_target_is_an_object(tmp_path):
    for expected in ("scanned", "skipped"):
        result = propcheck.sweep("tiny", vary={"model.layers": [1]}, set={"model.width": 32}, tokens=8, out=tmp_path / "a")
        assert [cell.status for cell in result.cells] == [expected]
    for _ in range(2):
        result = propcheck.sweep(Model, vary={"python.args.layers": [1]}, tokens=8, out=tmp_path / "b")
        assert [cell.status for cell in result.cells] == ["scanned"]


@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ({}, "name at least one key"),
        ({"model.layers": []}, "needs at least one value"),
        ({"model.layers": [1, 1]}, "model.layers is given this value twice"),
        ({"name": ["a"]}, "name has no effect on a scan"),
        ({"model.layerz": [1]}, "unknown key model.layerz"),
        ({"inputs.tokens": [4, 8]}, "inputs.tokens is varied as well"),
    ],
)
def test_a_sweep_that_is_wrong_is_an_error(vary, said):
    with pytest.raises(propcheck.PropcheckError, match=said):
        propcheck.sweep("tiny", vary=vary, tokens=8)


def test_a_callable_is_built_with_its_arguments():
    run = propcheck.scan(Model, args={"layers": 3, "width": 8}, tokens=8)
    assert (run.model.class_name, run.model.sites, run.model.width) == ("Model", 3, 8)
    assert run.record.target.endswith(":Model")
    assert run.record.settings["python"]["args"] == {"layers": 3, "width": 8}
    assert repr(run).startswith("<propcheck.Run of ")
    closure = propcheck.scan(lambda: Model(layers=1), tokens=8)
    assert closure.model.sites == 1


def test_arguments_may_be_objects_that_no_file_could_hold():
    def build(dtype, sizes):
        return Model(*sizes).to(dtype)

    run = propcheck.scan(build, args={"dtype": torch.bfloat16, "sizes": (1, 8)}, tokens=8)
    assert run.record.precision == "bf16"
    assert run.record.settings["python"]["args"] == {"dtype": "torch.bfloat16", "sizes": [1, 8]}


def test_a_model_that_exists_is_scanned_with_its_values_and_left_as_it_was():
    torch.manual_seed(3)
    model = Model(std=0.3).eval()
    before = copy.deepcopy(model.state_dict())
    tensors = {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    run = propcheck.scan(model, tokens=8)
    frame = run.parameters.set_index("name")
    values = model.embed.weight.detach()
    row = frame.loc["embed.weight = head.weight"]
    assert (row["mean"], row["std"]) == pytest.approx((float(values.mean()), float(values.std(correction=0))), rel=1e-5)
    assert row["init_calls"] == "constant"
    assert not model.training
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert tensors == {name: id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "forward" not in vars(model.blocks[0])
    other = propcheck.scan(model, tokens=8, seeds=5)
    assert other.parameters.set_index("name").loc["embed.weight = head.weight", "std"] == row["std"]  # values, not draws


def test_a_model_that_exists_stays_as_it_was_where_it_cannot_be_recorded():
    class Reads(Block):
        def __deepcopy__(self, memo):
            copied = Reads(self.inner.in_features)
            copied.load_state_dict({name: memo[id(tensor)] for name, tensor in self.state_dict(keep_vars=True).items()})
            torch.rand(()).item()  # a value that is drawn, which no record has
            return copied

    model = Model(layers=1)
    model.blocks[0] = Reads(16)
    before = copy.deepcopy({name: tensor.clone() for name, tensor in model.state_dict().items()})
    run = propcheck.scan(model, tokens=8)
    assert run.model.sites == 1
    assert any(".item()" in note for note in run.notes)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_losses_of_a_model_that_exists_are_plain_autograds():
    torch.manual_seed(0)
    model = Model()
    ids = torch.arange(12).view(2, 6)
    run = propcheck.scan(propcheck.Target(model, batch=ids))
    logits = model(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert run.loss.value == pytest.approx(loss.item(), rel=1e-6)
    norms = run.parameters.set_index("name")["grad_norm"]
    assert norms["blocks.1.inner.weight"] == pytest.approx(float(model.blocks[1].inner.weight.grad.norm()), rel=1e-4)
    assert (run.record.inputs.batch, run.record.inputs.tokens, run.record.inputs.source) == (2, 6, "target")


def test_rules_are_selected_and_ignored():
    everything = propcheck.scan("tiny", tokens=8, set=SMALL | {"init.embedding_std": 1e-4})
    assert "PC205" in [one.rule for one in everything.findings]
    without = propcheck.scan("tiny", tokens=8, set=SMALL | {"init.embedding_std": 1e-4}, ignore=["PC205"])
    assert "PC205" not in [one.rule for one in without.findings]


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("tin", {}, "tin: no such file or bundled probe"),
        ("tiny", {"args": {"a": 1}}, "args['a']: arguments apply to package.module:callable"),
        ("tiny", {"set": {"model.layer": 1}}, "set['model.layer']: unknown key model.layer"),
        ("tiny", {"precision": "bf17"}, 'precision: precision.preset = "bf17" must be one of'),
        ("tiny", {"tokens": 1}, "tokens: inputs.tokens = 1 must be an integer >= 2"),
        ("tiny", {"memory": "5"}, 'memory: scan.memory = "5": must be "auto"'),
        ("tiny", {"ignore": ["PC999"]}, "unknown rule PC999"),
        (
            Model,
            {"args": {"layer": 1}},
            "Model takes (layers=2, width=16, std=1.0): got an unexpected keyword argument 'layer'",
        ),
        (3, {}, "must be a callable that returns the model, not an object of type int"),
        (lambda: 3, {}, "must return a torch.nn.Module or a propcheck.Target, but returned an object of type int"),
    ],
)
def test_what_the_command_line_refuses_is_an_error(target, options, said):
    with pytest.raises(propcheck.PropcheckError) as caught:
        propcheck.scan(target, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_of_the_code_names_its_line_in_the_callers_file():
    def build():
        raise KeyError("mine")

    line = build.__code__.co_firstlineno + 1
    with pytest.raises(propcheck.PropcheckError, match=rf"test_api\.py:{line}: KeyError: 'mine'"):
        propcheck.scan(build)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, propcheck; assert 'scan' in dir(propcheck) and not {'torch', 'pandas', 'pydantic'} & set(sys.modules);"
        "from propcheck import scan, Target, Run; sys.exit(not ('torch' in sys.modules and callable(scan)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'scna'"):
        propcheck.scna  # noqa: B018


def test_a_shadow_says_how_far_half_precision_is_from_fp32():
    run = propcheck.scan("tiny", set={"model.layers": 2, "model.vocabulary": 64}, tokens=8, shadow="fp32")
    # One rounding of bf16 is 2^-9 = 0.2 % at most; a few of them lie before the last site.
    assert 0 < run.sublayers.shadow_stream_error.iloc[-1] < 0.05
    assert set(run.norms.place) == {"read", "inside", "outside"}
