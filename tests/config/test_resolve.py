"""What TARGET may be, whose keys go together, and which directory a run gets."""

from __future__ import annotations

import pytest

from propcheck.config.fingerprint import config_hash, differences
from propcheck.config.probe import load_probe
from propcheck.config.resolve import Override, read_target
from propcheck.errors import PropcheckError


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def message(target, *overrides):
    with pytest.raises(PropcheckError) as caught:
        load_probe(target, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_or_a_json_file_is_a_hugging_face_config(workdir):
    (workdir / "My Model").mkdir()
    (workdir / "My Model" / "config.json").write_text("{}")
    (workdir / "small.json").write_text("{}")
    for target, name, config in (
        ("My Model", "My-Model", "My Model"),
        ("My Model/config.json", "My-Model", "My Model/config.json"),
        ("small.json", "small", "small.json"),
    ):
        probe = load_probe(target)
        assert (probe.kind, probe.name, probe.huggingface.config) == ("huggingface", name, str(workdir / config))
    assert read_target("My Model").origin == "My Model"


def test_a_config_in_the_working_directory_is_named_after_that(workdir):
    (workdir / "config.json").write_text("{}")
    assert load_probe(".").name == load_probe("config.json").name == workdir.name


def test_a_colon_makes_it_code(workdir):
    for target, name, kept in (
        ("pkg.models:build", "models-build", "pkg.models:build"),
        ("models:build", "models-build", "models:build"),
        ("src/my_gpt.py:GPT", "my_gpt-GPT", f"{workdir}/src/my_gpt.py:GPT"),
        ("/abs/m.py:f", "m-f", "/abs/m.py:f"),
    ):
        probe = load_probe(target)
        assert (probe.kind, probe.name, probe.python.target) == ("python", name, kept)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("model.py", "model.py: name the callable that returns the model, as in model.py:build"),
        ("model.py:", "model.py:: must be package.module:callable or path/to/file.py:callable"),
        (":build", ":build: must be package.module:callable or path/to/file.py:callable"),
        ("a:b.c", "a:b.c: must be package.module:callable or path/to/file.py:callable"),
    ],
)
@pytest.mark.usefixtures("workdir")
def test_code_without_its_callable_is_refused(target, expected):
    assert message(target) == expected


def test_a_probe_names_a_config_or_code_relative_to_itself(workdir):
    (workdir / "probes").mkdir()
    (workdir / "probes" / "a.toml").write_text(
        '[huggingface]\nconfig = "m/config.json"\noverrides = { num_hidden_layers = 2 }\n'
    )
    (workdir / "probes" / "b.toml").write_text('[python]\ntarget = "m.py:build"\nargs = { layers = 2 }\n')
    (workdir / "probes" / "c.toml").write_text('[python]\ntarget = "pkg.m:build"\n')
    probe = load_probe("probes/a.toml")
    assert (probe.huggingface.config, probe.huggingface.overrides) == ("probes/m/config.json", {"num_hidden_layers": 2})
    probe = load_probe("probes/b.toml", ["python.args.width=3"])
    assert (probe.python.target, probe.python.args) == ("probes/m.py:build", {"layers": 2, "width": 3})
    assert load_probe("probes/c.toml").python.target == "pkg.m:build"


def test_a_variation_of_a_config_says_what_differs(workdir):
    (workdir / "config.json").write_text("{}")
    (workdir / "one.toml").write_text('[huggingface]\nconfig = "config.json"\noverrides = { a = 1 }\n')
    (workdir / "two.toml").write_text('base = "one.toml"\n[huggingface]\noverrides = { a = 2, b = 3 }\n')
    base, variant = load_probe("one.toml"), load_probe("two.toml")
    assert differences(variant, base) == [("huggingface.overrides.a", 2, 1), ("huggingface.overrides.b", 3, None)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[huggingface]\nconfig = "c"\n[model]\nlayers = 3',
            (
                "[model] describes the reference decoder and cannot be combined with [huggingface]; use "
                "--set huggingface.overrides.KEY=VALUE to change that target"
            ),
        ),
        (
            '[python]\ntarget = "a:b"\n[init]\nstd = 1.0',
            (
                "[init] describes the reference decoder and cannot be combined with [python]; use --arg KEY=VALUE to change "
                "that target"
            ),
        ),
        ('[python]\ntarget = "a:b"\n[huggingface]\nconfig = "c"', "[huggingface] and [python] are two targets; remove one"),
        ("[huggingface]\noverrides = { a = 1 }", "[huggingface] needs config, the path of a config.json"),
        (
            "[python]\nargs = { a = 1 }",
            "arguments apply to package.module:callable or path/to/file.py:callable only",
        ),
        (
            '[python]\ntarget = "a:b"\n[precision]\nkeep_fp32 = ["A_log"]',
            "precision.keep_fp32 applies to the reference decoder only; remove it",
        ),
        ("[python]\ntarget = 3", "python.target = 3 must be a string"),
        ('[huggingface]\nconfg = "c"', "unknown key huggingface.confg; did you mean huggingface.config?"),
    ],
)
def test_sections_of_two_targets_do_not_mix(workdir, text, expected):
    (workdir / "p.toml").write_text(text)
    assert message("p.toml") == f"p.toml: {expected}"


def test_the_option_that_mixes_them_is_named(workdir):
    (workdir / "config.json").write_text("{}")
    assert message("a:b", "precision.preset=fp32", "model.layers=3").startswith("--set model.layers=3: [model] describes")
    assert message("config.json", "residual.placement=post").startswith("--set residual.placement=post: [residual] describes")
    assert message("config.json", Override("python.args.a", 1, "--arg a=1")) == (
        "--arg a=1: arguments apply to package.module:callable or path/to/file.py:callable only; set a key of the config with "
        "--set huggingface.overrides.KEY=VALUE"
    )


def test_the_precision_is_the_targets_own_unless_given(workdir):
    (workdir / "config.json").write_text("{}")
    assert load_probe("config.json").precision.preset is None
    assert load_probe("config.json", ["precision.preset=fp16"]).precision.preset == "fp16"


def test_the_hash_follows_the_content_of_the_config_and_not_its_place(workdir):
    for folder, text in (("a", '{"x": 1}'), ("b", '{"x": 1}'), ("c", '{"x": 2}')):
        (workdir / folder).mkdir()
        (workdir / folder / "config.json").write_text(text)
        (workdir / folder / "m.py").write_text(text)
    for targets in (("a", "b", "c"), ("a/config.json", "b", "c"), ("a/m.py:f", "b/m.py:f", "c/m.py:f")):
        first, same, other = (config_hash(load_probe(target)) for target in targets)
        assert first == same != other
    assert config_hash(load_probe("a")) != config_hash(load_probe("a", ["huggingface.overrides.x=3"]))


def test_the_hash_of_a_decoder_does_not_know_of_other_targets():
    # As the run beside it was stored, before there were any.
    import json
    from pathlib import Path

    stored = json.loads((Path(__file__).parents[2] / "reports" / "qwen3.8-27b" / "run.json").read_text())
    assert config_hash(load_probe("qwen3.8-27b")) == stored["config_hash"]
