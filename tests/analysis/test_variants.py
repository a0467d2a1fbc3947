"""What a run says of the probe that it is a variation of."""

from dataclasses import replace

import pytest
from synthetic import run_of, site

from propcheck.analysis.variants import comparable, measured_note, settings_note
from propcheck.cli import app as cli
from propcheck.config.fingerprint import differences
from propcheck.config.probe import load_probe
from propcheck.errors import PropcheckError
from propcheck.records import Finding
from propcheck.records.store import read_run

SETTINGS = ["model.layers=2", "model.width=32", "model.vocabulary=64", "inputs.tokens=8"]
SMALL = [*(f"--set={setting}" for setting in SETTINGS), "--no-plots", "-q"]


def write(path, text):
    path.write_text(text)
    return str(path)


def test_a_probe_counts_where_its_variation_is_silent(tmp_path):
    write(tmp_path / "one.toml", 'description = "x"\n[model]\nlayers = 3\nwidth = 64\n[inputs]\ntokens = 9\n')
    two = load_probe(write(tmp_path / "two.toml", 'base = "one.toml"\n[model]\nwidth = 32\n'))
    assert (two.model.layers, two.model.width, two.inputs.tokens) == (3, 32, 9)
    assert (two.name, two.description) == ("two", "")
    assert differences(two, load_probe(two.base)) == [("model.width", 32, 64)]


def test_a_base_may_have_a_base_but_not_itself(tmp_path):
    write(tmp_path / "one.toml", "[model]\nlayers = 3\n")
    write(tmp_path / "two.toml", 'base = "one.toml"\n[model]\nwidth = 32\n')
    three = load_probe(write(tmp_path / "three.toml", 'base = "two.toml"\n[residual]\nplacement = "post"\n'))
    assert (three.model.layers, three.model.width, three.residual.placement) == (3, 32, "post")
    write(tmp_path / "one.toml", 'base = "three.toml"\n')
    with pytest.raises(PropcheckError, match="own base"):
        load_probe(str(tmp_path / "three.toml"))


def test_a_base_that_is_missing_is_named_with_the_file(tmp_path):
    with pytest.raises(PropcheckError, match=r"two\.toml: base = 'nothing': .*nothing: no such file or bundled probe"):
        load_probe(write(tmp_path / "two.toml", 'base = "nothing"\n'))


def test_a_path_in_a_base_is_relative_to_the_base(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "one.toml", '[inputs]\nsource = "tokens"\nfile = "ids.npy"\n')
    probe = load_probe(write(tmp_path / "two.toml", 'base = "sub/one.toml"\n'))
    assert probe.inputs.file == str(tmp_path / "sub" / "ids.npy")


def test_settings_are_written_as_in_toml():
    assert settings_note("a", [("residual.placement", "post", "pre"), ("model.layers", 8, 64)]) == (
        'Same settings as a, except residual.placement = "post" instead of "pre"; model.layers = 8 instead of 64.'
    )
    unset = settings_note("a", [("inputs.file", "b.npy", None)])
    assert unset == 'Same settings as a, except inputs.file = "b.npy" instead of unset.'


def test_measurements_are_written_beside_those_of_the_base():
    here = run_of([site(0, 0, grad_stream_norm=2.0), site(1, 1, stream=1.0, update=0.0, grad_stream_norm=4.0)], loss=7.5)
    there = run_of([site(0, 0, grad_stream_norm=8.0), site(1, 1, stream=3.0, update=4.0, grad_stream_norm=16.0)], loss=7.0)
    finding = Finding("PC301", "exploding-gradient", "error", None, "m", 1.0, 1.0, "m", "r")
    assert measured_note(replace(here, findings=(finding,)), there, "base") == (
        "Compared with the run of base: sum RMS after block 1 is 1 instead of 5; gradient before block 0 is 2 instead of 8; "
        "gradient before block 1 is 4 instead of 16; first loss is 7.5 instead of 7; new: PC301."
    )


def test_runs_of_other_inputs_are_not_put_side_by_side():
    run = run_of([site(0, 0)])
    assert comparable(run, run)
    assert not comparable(run, replace(run, seeds=(1,)))
    assert not comparable(run, replace(run, precision="fp32"))


def test_the_twins_table_says_what_differs_once_both_are_there(tmp_path, capsys):
    twin = ["scan", write(tmp_path / "twin.toml", 'base = "base.toml"\n[residual]\nplacement = "post"\n'), *SMALL]
    base = ["scan", write(tmp_path / "base.toml", ""), *SMALL]
    cli.run([*twin, "--out", str(tmp_path / "runs" / "twin")])
    alone = capsys.readouterr().out
    assert "Compared with the run of base" not in alone
    cli.run([*base, "--out", str(tmp_path / "runs" / "base")])
    capsys.readouterr()
    cli.run([*twin, "--out", str(tmp_path / "runs" / "twin")])
    both = " ".join(capsys.readouterr().out.split())
    assert 'residual.placement = "post" instead of "pre"' in both
    assert "Compared with the run of base: sum RMS after block 1" in both
    assert any("Compared with the run" in note for note in read_run(tmp_path / "runs" / "twin").notes)
