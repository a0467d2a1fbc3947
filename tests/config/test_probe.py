"""A probe file is read strictly, and each mistake is answered by one line that says what would be right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from propcheck.config.fingerprint import config_hash, differences, setting_differences
from propcheck.config.probe import Probe, load_probe, parse_size
from propcheck.config.resolve import Override, bundled_probes
from propcheck.errors import PropcheckError


@pytest.fixture
def probe_file(tmp_path):
    def write(text, name="probe.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def message(target, *overrides):
    with pytest.raises(PropcheckError) as caught:
        load_probe(target, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_qwen_has_the_published_dimensions():
    """Numbers of the published config.json of Qwen3.8-27B."""
    probe = load_probe("qwen3.8-27b")
    model = probe.model
    assert (model.layers, model.width, model.vocabulary, model.tied_head) == (64, 5120, 248320, False)
    kinds = [model.mixers[layer % len(model.mixers)] for layer in range(model.layers)]
    assert [layer for layer, kind in enumerate(kinds) if kind == "attention"] == list(range(3, 64, 4))
    assert kinds.count("deltanet") == 48
    attention = model.attention
    assert (attention.heads, attention.kv_heads, attention.head_width) == (24, 4, 256)
    assert (attention.qk_norm, attention.gate, attention.bias) == (True, True, False)
    assert attention.rotary * attention.head_width == 64
    assert attention.rotary_theta == 1e7
    net = model.deltanet
    assert (net.key_heads, net.value_heads, net.key_head_width, net.value_head_width) == (16, 48, 128, 128)
    assert net.key_heads * net.key_head_width * 2 + net.value_heads * net.value_head_width == 10240  # convolution channels
    assert (net.convolution, net.chunk) == (4, 64)
    assert (model.ffn.width, model.ffn.kind, model.ffn.bias) == (17408, "swiglu", False)
    assert (model.norm.kind, model.norm.eps, model.norm.zero_centered) == ("rmsnorm", 1e-6, True)
    assert (probe.residual.placement, probe.residual.scale) == ("pre", "plain")
    assert probe.init.model_dump() == {"scheme": "normal", "std": 0.02, "embedding_std": None, "convolution_std": None}
    assert (probe.precision.preset, probe.precision.keep_fp32) == ("bf16", ("A_log", "dt_bias"))
    assert (probe.inputs.source, probe.inputs.batch, probe.inputs.tokens) == ("zipf", 1, 256)


def test_the_post_norm_twin_differs_in_the_placement_alone():
    twin, base = load_probe("qwen3.8-27b-postnorm"), load_probe("qwen3.8-27b")
    assert twin.base == "qwen3.8-27b"
    assert differences(twin, base) == [("residual.placement", "post", "pre")]
    assert (twin.scan, twin.rules) == (base.scan, base.rules)


def test_gpt2_and_llama_have_the_dimensions_of_their_configs():
    from transformers import GPT2Config

    published = GPT2Config()
    model = load_probe("gpt2").model
    assert (model.layers, model.width, model.vocabulary) == (published.n_layer, published.n_embd, published.vocab_size)
    assert (model.attention.heads, model.positions) == (published.n_head, published.n_positions)
    assert (model.norm.eps, model.dropout) == (published.layer_norm_epsilon, published.resid_pdrop)
    assert (model.tied_head, model.attention.rotary, model.attention.bias, model.ffn.bias) == (True, 0, True, True)
    model = load_probe("llama-7b").model
    # Parameters of Llama 2 7B as its model card counts them: 6,738,415,616.
    block = 4 * model.width**2 + 3 * model.width * model.ffn.width + 2 * model.width
    assert model.layers * block + 2 * model.vocabulary * model.width + model.width == 6_738_415_616
    assert (model.attention.kv_heads, model.norm.eps, model.tied_head) == (None, 1e-5, False)


def test_tiny_keeps_the_pattern_of_the_full_model():
    tiny, full = load_probe("tiny"), load_probe("qwen3.8-27b")
    assert (tiny.model.layers, tiny.model.mixers) == (full.model.layers, full.model.mixers)
    assert tiny.model.width == 128
    # Equal pre-activation scale: std x sqrt(width).
    assert tiny.init.std * tiny.model.width**0.5 == pytest.approx(full.init.std * full.model.width**0.5, rel=1e-3)


@pytest.mark.parametrize("name", sorted(bundled_probes()))
def test_a_bundled_probe_is_named_after_its_file_and_described(name):
    probe = load_probe(name)
    assert probe.name == name
    assert 0 < len(probe.description) <= 58


def test_an_empty_file_is_all_defaults_and_named_after_itself(probe_file):
    probe = load_probe(probe_file("", "my probe.toml"))
    assert probe == Probe(name="my-probe")


_SCHEMES = (
    '{key} = "{value}" must be one of "normal", "gpt2", "megatron", "xavier", "he", "fan-in", "small", "olmo-llama"; '
    'did you mean "{near}"?'
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nlayer = 3", "unknown key model.layer; did you mean model.layers?"),
        ("[model]\nplacement = 'post'", "unknown key model.placement; placement belongs in [residual]"),
        ("[model]\nkind = 'relu'", "unknown key model.kind; kind belongs in [model.ffn] or in [model.norm]"),
        ("[attention]\nheads = 3", "unknown key attention; attention belongs in [model]"),
        ("seeds = [1]", "unknown key seeds; seeds belongs in [scan]"),
        ("[scan]\nplacment = 1", "unknown key scan.placment; did you mean residual.placement?"),
        ("[scan]\nzzz = 1", "unknown key scan.zzz; [scan] has the keys seeds, memory, device, mode, shadow"),
        ("[rules.PC204]\nlimit = 1", "unknown key rules.PC204.limit; [rules.PC204] has the keys threshold, severity"),
        ("[rules.PC204]\ntreshold = 1", "unknown key rules.PC204.treshold; did you mean rules.PC204.threshold?"),
        ("[rules.PC20]\nthreshold = 1", "rules.PC20 is not a rule id; a rule id is PC and three digits, as in PC204"),
        ("[rules]\nPC204 = 3", "rules.PC204 = 3 must be a table"),
        ("model = 3", "model = 3 must be a table"),
        ("[model]\nlayers = '64'", 'model.layers = "64" must be an integer >= 1 and <= 10000'),
        ("[model]\nlayers = 64.0", "model.layers = 64.0 must be an integer >= 1 and <= 10000"),
        ("[model]\nlayers = true", "model.layers = true must be an integer >= 1 and <= 10000"),
        ("[model]\ntied_head = 1", "model.tied_head = 1 must be true or false"),
        ("[model]\ndropout = 1.0", "model.dropout = 1.0 must be a number >= 0 and < 1"),
        ("[model.norm]\neps = nan", "model.norm.eps = NaN must be a number >= 0"),
        (
            "[model]\nmixers = ['attn']",
            'model.mixers[0] = "attn" must be one of "attention", "deltanet"; did you mean "attention"?',
        ),
        ("[model]\nmixers = []", 'model.mixers = [] must be a list of at least one, each one of "attention", "deltanet"'),
        ("[model]\nlayer = 3\nlayers = 'x'", "unknown key model.layer; did you mean model.layers? (and 1 more)"),
        ("[scan]\nseeds = [0, -1]", "scan.seeds[1] = -1 must be an integer >= 0 and <= 4294967295"),
        ("[scan]\nseeds = [4294967296]", "scan.seeds[0] = 4294967296 must be an integer >= 0 and <= 4294967295"),
        ("[rules.PC204]\nthreshold = nan", "rules.PC204.threshold = NaN must be a number"),
        ("[inputs]\nexponent = inf", "inputs.exponent = Infinity must be a number >= 0"),
        ("[scan]\nseeds = [2, 2]", "scan.seeds = [2, 2]: each seed may appear only once"),
        ("[scan]\nmemory = 5", 'scan.memory = 5: must be "auto" or a size with its unit, as in "5GiB" or "800MB"'),
        ("[scan]\ndevice = 'tpu'", 'scan.device = "tpu": must be "cpu", "cuda" or "cuda:N"'),
        ("[model]\nheads = 3\n", "unknown key model.heads; heads belongs in [model.attention]"),
        ("[model.attention]\nheads = 7", "model: attention.heads = 7 must divide width = 768, or set attention.head_width"),
        ("[expect]\nstd = 0.01", 'expect: std needs init, the expected scheme, as in init = "gpt2"'),
        ("[expect]\ninit = 'gtp2'", _SCHEMES.format(key="expect.init", value="gtp2", near="gpt2")),
        ("[expect]\ninit = 'gpt2'\nstd = 0", "expect.std = 0 must be a number > 0"),
        ("[inputs]\nsource = 'tokens'", 'inputs: source = "tokens" needs file'),
        ("[inputs]\nsource = 'text'\nfile = 'a.txt'", 'inputs: source = "text" needs tokenizer'),
        ("[inputs]\nfile = 'a.npy'", 'inputs: source = "zipf" does not use file; remove the key or change source'),
        ("[inputs]\ntokens = 1", "inputs.tokens = 1 must be an integer >= 2"),
        (
            "[model]\npositions = 100\n[inputs]\ntokens = 128",
            "inputs.tokens = 128 exceeds model.positions = 100",
        ),
        (
            "name = '../x'",
            "name = \"../x\": must be a directory name: letters, digits, '.', '_' and '-', beginning with a letter or digit",
        ),
        ("layers = ", "not TOML: Invalid value (at end of document)"),
    ],
)
def test_a_mistake_is_answered_with_the_file_the_key_and_what_would_be_right(probe_file, text, expected):
    path = probe_file(text)
    assert message(path) == f"{path}: {expected}"


def test_a_bin_file_needs_its_dtype_and_a_file_of_tokens_a_known_ending(probe_file):
    assert "needs dtype" in message(probe_file("[inputs]\nsource = 'tokens'\nfile = 'a.bin'"))
    assert "must end in .npy or .bin" in message(probe_file("[inputs]\nsource = 'tokens'\nfile = 'a.txt'"))
    assert "remove it" in message(probe_file("[inputs]\nsource = 'tokens'\nfile = 'a.npy'\ndtype = 'uint16'"))


def test_a_base_that_is_missing_is_blamed_on_the_file_that_names_it(probe_file, tmp_path):
    path = probe_file("base = 'nix.toml'")
    assert message(path) == f"{path}: base = 'nix.toml': {tmp_path}/nix.toml: No such file or directory"


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\nlayers = 3\n")
    assert load_probe(str(path)).model.layers == 3


def test_an_unknown_target_lists_the_bundled_probes_and_the_nearest():
    assert message("qwen3.8-27") == (
        "qwen3.8-27: no such file or bundled probe; did you mean qwen3.8-27b? (bundled: gpt2, llama-7b, qwen3.8-27b, "
        "qwen3.8-27b-postnorm, tiny; a config.json or module:callable also works)"
    )


def test_a_file_that_cannot_be_read_is_one_line(tmp_path):
    assert message(str(tmp_path / "none.toml")) == f"{tmp_path}/none.toml: No such file or directory"
    assert message(str(tmp_path)) == f"{tmp_path}: this folder has no config.json"
    (tmp_path / "latin.toml").write_bytes(b"name = '\xe9'")
    assert message(str(tmp_path / "latin.toml")) == f"{tmp_path}/latin.toml: not TOML: not UTF-8 text"


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("residual.placement=post", lambda probe: probe.residual.placement == "post"),
        ('residual.placement = "post"', lambda probe: probe.residual.placement == "post"),
        ("model.layers=8", lambda probe: probe.model.layers == 8),
        ("model.norm.eps=1", lambda probe: probe.model.norm.eps == 1.0),
        ('model.mixers=["attention"]', lambda probe: probe.model.mixers == ("attention",)),
        ("model.ffn={ width = 100 }", lambda probe: probe.model.ffn.width == 100),
        ("rules.PC204.threshold=3", lambda probe: [rule.threshold for rule in probe.rules.values()] == [3]),
        ("rules.PC204.severity=note", lambda probe: [rule.severity for rule in probe.rules.values()] == ["note"]),
        ("scan.memory=5GiB", lambda probe: probe.scan.memory_bytes == 5 * 2**30),
        ("model.tied_head=true", lambda probe: probe.model.tied_head is True),
    ],
)
def test_an_override_sets_any_key(override, read):
    assert not read(load_probe("tiny"))
    assert read(load_probe("tiny", [override]))


def test_the_last_override_of_a_key_counts():
    assert load_probe("tiny", ["model.layers=8", Override("model.layers", 4, "--layers")]).model.layers == 4


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("layers", "must be key=value, as in residual.placement=post"),
        ("a..b=1", "must be key=value, as in residual.placement=post"),
        ("init.std=", "the value after = is missing"),
        ("model.mixers=[attention]", '[attention] is not a TOML value; strings in a list need quotes: ["a"]'),
        ("model.layers.x=1", "model.layers is a value, not a table"),
        ("modle.layers=1", "unknown key modle; did you mean model?"),
        ("model.layers=0", "model.layers = 0 must be an integer >= 1 and <= 10000"),
        ("model.deltanet.value_heads=3", "model.deltanet: value_heads = 3 must be a multiple of key_heads = 2"),
        ("inputs.source=text", 'inputs: source = "text" needs file'),
    ],
)
def test_a_wrong_override_is_named(override, expected):
    assert message("tiny", "scan.device=cuda", override) == f"--set {override}: {expected}"


def test_a_fault_of_the_file_is_not_blamed_on_an_override(probe_file):
    path = probe_file("[model]\nlayer = 3")
    assert message(path, "model.width=64") == f"{path}: unknown key model.layer; did you mean model.layers?"


def test_defaults_count_only_where_the_file_is_silent(probe_file):
    path = probe_file("[scan]\nseeds = [7]")
    probe = load_probe(path, ["scan.device=cuda"], {"scan": {"seeds": [1, 2], "memory": "1GiB", "device": "cpu"}})
    assert (probe.scan.seeds, probe.scan.memory, probe.scan.device) == ((7,), "1GiB", "cuda")


def test_a_path_is_relative_to_the_file_that_gives_it(probe_file, tmp_path, monkeypatch):
    path = probe_file("[inputs]\nsource = 'tokens'\nfile = 'data/ids.npy'")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_probe(path).inputs.file == str(tmp_path / "data/ids.npy")
    assert load_probe(path, ["inputs.file=ids.npy"]).inputs.file == str(tmp_path / "elsewhere/ids.npy")


@pytest.mark.parametrize(
    ("text", "size"), [("5GiB", 5368709120), ("512 MiB", 536870912), ("4.5GB", 4500000000), ("100b", 100), ("1kib", 1024)]
)
def test_a_size_has_its_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "5G", "GiB", "-1GiB", "0MB", "nanGB", "5 GiB/s", ""])
def test_anything_else_is_no_size(text):
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


def test_the_hash_follows_the_numbers_and_not_the_words():
    base = config_hash(load_probe("tiny"))
    assert len(base) == 64
    same = ["name=other", "description=other", "scan.memory=1GiB", "model.layers=64"]
    assert config_hash(load_probe("tiny", same)) == base
    for change in ("model.layers=63", "inputs.tokens=64", "rules.PC204.threshold=3", "scan.seeds=[1]", "precision.preset=fp32"):
        assert config_hash(load_probe("tiny", [change])) != base


def test_what_is_expected_counts_in_the_hash_where_it_is_given():
    given = load_probe("tiny", ["expect.init=gpt2"])
    assert config_hash(given) != config_hash(load_probe("tiny", ["expect.init=gpt2", "expect.std=0.01"]))
    assert config_hash(given) != config_hash(load_probe("tiny"))


@pytest.mark.parametrize("target", [{"python": {"target": "m:build"}}, {"huggingface": {"config": "c.json"}}, {}])
def test_every_kind_of_target_can_say_what_is_expected(target):
    expect = Probe.model_validate({**target, "expect": {"init": "gpt2", "std": 0.01, "embedding_std": 1.0}}).expect
    assert (expect.init, expect.std, expect.embedding_std) == ("gpt2", 0.01, 1.0)


def test_the_hash_does_not_follow_where_the_files_lie():
    at = [load_probe("tiny", ["inputs.source=tokens", f"inputs.file=/{place}/ids.npy"]) for place in ("a", "b")]
    assert config_hash(at[0]) == config_hash(at[1]) != config_hash(load_probe("tiny"))


def test_the_decoder_gets_its_sections_and_the_fp32_parameters():
    decoder = load_probe("qwen3.8-27b").decoder
    assert (decoder.model.layers, decoder.residual.placement, decoder.keep_fp32) == (64, "pre", ("A_log", "dt_bias"))


def test_reading_a_probe_imports_no_torch():
    code = "import sys; from propcheck.config.probe import load_probe; load_probe('tiny'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0


def test_another_source_drops_the_file_of_the_one_it_replaces(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text('[inputs]\nsource = "tokens"\nfile = "ids.bin"\ndtype = "uint16"\ntokens = 9\n')
    inputs = load_probe(str(path), ["inputs.source=zipf"]).inputs
    assert (inputs.source, inputs.file, inputs.dtype, inputs.tokens) == ("zipf", None, None, 9)


def test_of_two_kinds_of_target_only_what_both_have_is_said_to_differ():
    tiny, code = (load_probe(target).model_dump(mode="json") for target in ("tiny", "my.py:build"))
    assert {key.split(".")[0] for key, _, _ in setting_differences(tiny, code)} <= {"precision", "inputs"}
    other = load_probe("tiny", ["model.layers=3"]).model_dump(mode="json")
    assert setting_differences(other, tiny) == [("model.layers", 3, 64)]
    assert setting_differences(code, load_probe("my.py:other").model_dump(mode="json"))[0][0] == "python.target"
