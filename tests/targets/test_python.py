"""Code as a target: what it may return, what it is fed, and whose error an error is."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from propcheck.api.measurement import measure
from propcheck.api.requests import ScanRequest
from propcheck.cli.app import run
from propcheck.config.probe import load_probe
from propcheck.targets.user_errors import target_error

MODEL = """\
import torch
from torch import nn

import propcheck


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, layers=3, width=16, *, vocabulary=50):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

BACKWARD = """
class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("mine")


class build(Model):
    def forward(self, ids):
        return Cut.apply(super().forward(ids))
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module into the working directory; what it leaves in the process goes after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text, name="mine.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MODEL + text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def scanned(target, *overrides):
    return measure(ScanRequest(target, load_probe(target, ["inputs.tokens=8", *overrides])))


def refused(capsys, target, *options):
    """Scan from the command line; return what it says of the error, which is one line and status 2."""
    assert run(["scan", target, "--no-plots", "--tokens", "8", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("propcheck: ")
    assert err.count("\n") == 1
    return err.removeprefix("propcheck: ").rstrip("\n")


def line_of(text):
    """The line of the part of the file that a test adds."""
    return MODEL.count("\n") + text


def test_a_module_whose_forward_takes_ids_needs_nothing_else(write):
    write("")
    result = scanned("mine:Model")
    assert (result.model.class_name, result.model.blocks, result.model.sites) == ("Model", 3, 3)
    assert result.loss.uniform == pytest.approx(math.log(50))
    assert (result.precision, result.inputs.source, result.inputs.tokens) == ("fp32", "zipf", 8)
    assert scanned("mine.py:Model", "python.args.layers=2", "python.args.width=8").model.width == 8


def test_a_file_and_a_module_give_the_same_numbers(write):
    write("")
    assert scanned("mine.py:Model").sites == scanned("mine:Model").sites


def test_a_file_may_lie_elsewhere_and_import_its_neighbours(write):
    write("", "sub/neighbour_of_mine.py")
    write("from neighbour_of_mine import Model as Other\ndef build(): return Other(layers=1)\n", "sub/mine.py")
    assert scanned("sub/mine.py:build").model.blocks == 1


def test_a_file_with_the_name_of_an_installed_module_is_not_mistaken_for_it(write):
    write("", "json.py")
    assert scanned("json.py:Model").model.blocks == 3


def test_a_package_in_the_working_directory_is_importable(write):
    write("", "pkg_of_mine/__init__.py")
    write("", "pkg_of_mine/mod.py")
    assert scanned("pkg_of_mine.mod:Model").model.blocks == 3


@pytest.mark.parametrize("argument", ["targets", "labels"])
def test_forward_with_targets_or_labels_gets_the_next_ids(write, argument):
    write(f"""
class Own(Model):
    def forward(self, idx, mask=None, {argument}=None):
        logits = super().forward(idx)
        assert {argument} is not None and torch.equal(idx[:, 1:], {argument}[:, :-1])
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), {argument}.flatten())
""")
    own = scanned("mine:Own")
    assert own.inputs.tokens == 8
    assert own.loss.uniform == pytest.approx(math.log(50))
    assert own.loss.value == pytest.approx(math.log(50), abs=1)


def test_labels_of_a_transformers_model_are_not_filled_since_it_shifts_them_itself(write):
    write("""
from transformers import GPT2Config, GPT2LMHeadModel

class Own(GPT2LMHeadModel):
    def forward(self, input_ids, labels=None):
        assert labels is None
        return super().forward(input_ids)

def build():
    return Own(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50))
""")
    assert scanned("mine:build").inputs.tokens == 8


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ("torch.arange(12).view(2, 6)", (2, 6)),
        ("(torch.arange(12).view(2, 6),)", (2, 6)),
        ("{'ids': torch.arange(12).view(2, 6)}", (2, 6)),
        ("lambda: torch.arange(12).view(2, 6)", (2, 6)),
        ("lambda seed: {'ids': torch.full((1, 4), seed)}", (1, 4)),
    ],
)
def test_a_batch_is_a_tensor_a_tuple_a_dict_or_a_function(write, batch, shape):
    write(f"def build(): return propcheck.Target(Model(), batch={batch})\n")
    one = scanned("mine:build", "scan.seeds=[7]")
    assert (one.inputs.batch, one.inputs.tokens, one.inputs.source) == (*shape, "target")
    assert any("batch; ignored: inputs.tokens" in note for note in one.notes)


def test_floats_and_another_loss_need_no_vocabulary(write):
    write("""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 16)
        self.blocks = nn.ModuleList([Block(16) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, pixels):
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    return propcheck.Target(Net(), batch=lambda: torch.ones(2, 7, 5), loss=lambda out, batch: out.sum() * batch.sum())
""")
    result = scanned("mine:build")
    assert result.loss.uniform is None
    assert result.loss.value is not None


@pytest.mark.parametrize(
    ("preset", "dtypes", "expected"),
    [
        (None, {"bfloat16", "float32"}, "mixed (bf16, fp32)"),
        ("bf16", {"bfloat16"}, "bf16"),
        ("fp32", {"float32"}, "fp32"),
        ("bf16-mixed", {"float32"}, "bf16-mixed"),
    ],
)
def test_the_dtypes_are_those_of_the_code_unless_a_preset_casts_them(write, preset, dtypes, expected):
    write("""
class Half(Model):
    def __init__(self):
        super().__init__()
        self.head.to(torch.bfloat16)

    def forward(self, ids):
        x = self.wte(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))
""")
    result = scanned("mine:Half", *([f"precision.preset={preset}"] if preset else []))
    assert {p.dtype for p in result.parameters} == dtypes
    assert result.precision == expected


def test_the_vocabulary_is_the_token_embedding_or_the_key(write):
    write("""
class Seen(Model):
    def forward(self, ids):
        assert int(ids.max()) < 5
        return super().forward(ids)
""")
    scanned("mine:Seen", "inputs.vocabulary=5", "inputs.source=uniform", "inputs.tokens=200")


def test_evaluation_mode_reaches_the_model(write):
    write("""
class Mode(Model):
    def forward(self, ids):
        return super().forward(ids) * (1 if self.training else 0)
""")
    assert scanned("mine:Mode", "scan.mode=eval").loss.value == pytest.approx(math.log(50))
    assert scanned("mine:Mode").loss.value != pytest.approx(math.log(50))


def test_a_model_that_a_module_holds_is_scanned_as_it_is(write):
    write("""
model = Model()
with torch.no_grad():
    model.wte.weight.fill_(3.0)
""")
    result = scanned("mine:model")
    (embedding,) = [p for p in result.parameters if p.name == "wte.weight"]
    assert (embedding.mean, embedding.std) == (3.0, 0.0)
    model = sys.modules["mine"].model
    assert torch.equal(model.wte.weight, torch.full((50, 16), 3.0))
    assert "forward" not in vars(model.blocks[0])
    half = scanned("mine:model", "precision.preset=bf16")
    assert {p.dtype for p in half.parameters} == {"bfloat16"}
    assert model.wte.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def build():\n    raise ValueError('two\\n lines')\n", "mine.py:{3}: ValueError: two lines"),
        (
            "class build(Model):\n    def forward(self, ids):\n        return super().forward(ids) + torch.ones(7)\n",
            "mine.py:{4}: RuntimeError: The size of tensor a (50) must match the size of tensor b (7)",
        ),
        (
            "def loss(out, batch):\n    return out.missing\ndef build(): return propcheck.Target(Model(), loss=loss)\n",
            "mine.py:{3}: AttributeError: 'Tensor' object has no attribute 'missing'",
        ),
        (
            "def batch(seed):\n    return {}['ids']\ndef build(): return propcheck.Target(Model(), batch=batch)\n",
            "mine.py:{3}: KeyError: 'ids'",
        ),
        (
            BACKWARD,
            "mine.py:{10}: RuntimeError: mine",
        ),
        ("def build(): return 3\n", "mine.py:build: must return a torch.nn.Module or a propcheck.Target, but returned "),
        ("build = 3\n", "mine.py:build: must be a callable that returns the model, not an object of type int"),
        ("def build(: pass\n", "mine.py:{2}: SyntaxError: invalid syntax"),
        ("import nothing_of_the_kind\n", "mine.py:{2}: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
        ("def biuld(): pass\n", "mine.py has no build; did you mean biuld?"),
        ("del Block, Model\n", "mine.py has no build; it defines no callable"),
        (
            "class Two(Model):\n    def forward(self, ids, mask): return ids\ndef build(): return Two()\n",
            (
                "Two.forward takes (ids, mask), but the batch has 1 argument: missing a required argument: 'mask'; return "
                "propcheck.Target(model, batch=...)"
            ),
        ),
        (
            "def build(): return nn.Linear(3, 3)\n",
            (
                "Linear has no nn.Embedding, so it is unlikely to take token ids; return "
                "propcheck.Target(model, batch=...), or use --set inputs.vocabulary=N"
            ),
        ),
        (
            "def build(): return propcheck.Target(nn.Embedding(9, 16), batch=torch.zeros(6, dtype=torch.long))\n",
            (
                "the model returns neither a loss nor logits [batch, tokens, vocabulary] for token ids [batch, tokens], but a "
                "float32 tensor [6, 16]; return propcheck.Target(model, batch=..., loss=...) with a loss(output, batch)"
            ),
        ),
    ],
)
def test_an_error_of_the_code_is_shown_as_its_own(write, capsys, code, expected):
    import re

    write("\n" + code)
    numbered = re.sub(r"\{(\d+)\}", lambda match: str(line_of(int(match[1]))), expected)
    assert refused(capsys, "mine.py:build").startswith(numbered)


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        ("no_such.py:build", [], "no_such.py: no such file"),
        ("no_such_module:build", [], "no_such_module: no module named no_such_module, neither installed nor in the working"),
        ("mine.inner:build", [], "mine.inner: no module named mine.inner, neither installed nor in the working directory"),
        (
            "mine.py:Model",
            ["--arg", "layer=3"],
            (
                "mine.py:Model takes (layers=3, width=16, vocabulary=50): got an unexpected keyword argument 'layer'; did you "
                "mean layers?; set arguments with --arg KEY=VALUE"
            ),
        ),
        (
            "mine.py:needs",
            [],
            "mine.py:needs takes (layers): missing a required argument: 'layers'; set arguments with --arg KEY=VALUE",
        ),
        ("mine.py:model", ["--arg", "x=1"], "mine.py:model: the model is built already and takes no arguments (x)"),
        ("mine.py:Model", ["--arg", "layers=three"], "mine.py:"),
    ],
)
def test_what_cannot_be_called_is_refused(write, capsys, target, options, expected):
    write("def needs(layers): return Model(layers)\nmodel = Model()\n")
    assert refused(capsys, target, *options).startswith(expected)


def test_a_backward_pass_that_fails_names_the_target(write, capsys):
    write("""
class InPlace(Model):
    def forward(self, ids):
        y = super().forward(ids).exp()
        y2 = y.exp()
        y.mul_(2)
        return y2
""")
    assert refused(capsys, "mine.py:InPlace").startswith(
        "mine.py:InPlace: RuntimeError: one of the variables needed for gradient"
    )


def test_debug_shows_the_frames_of_the_code(write, capsys):
    write("def build():\n    raise ValueError('mine')\n")
    assert run(["scan", "mine.py:build", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "raise ValueError('mine')" in err
    assert err.endswith(f"propcheck: mine.py:{line_of(2)}: ValueError: mine\n")


def test_a_fault_of_our_own_is_not_blamed_on_the_code():
    import propcheck.formatting

    with pytest.raises(TypeError) as caught:
        propcheck.formatting.number("no number")
    assert target_error(caught.value, "mine.py:build") is None
