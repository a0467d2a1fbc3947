"""A stored run, from wherever it is named."""

import dataclasses
import json
import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import parameter, qwen, run_of

from propcheck import rules
from propcheck.errors import PropcheckError
from propcheck.records import LossInfo
from propcheck.records.baseline import kept, write_baseline
from propcheck.records.load import is_run, load
from propcheck.records.store import write_run


@pytest.fixture
def run():
    run = run_of([*qwen()[:6], *qwen(seed=1)[:6]], [parameter("a.weight")], seeds=(0, 1))
    return dataclasses.replace(run, findings=rules.judge(run))


@pytest.fixture
def directory(run, tmp_path):
    write_run(run, tmp_path / "run")
    return tmp_path / "run"


def test_a_directory_and_each_of_its_files_give_the_whole_run(run, directory):
    for name in ("", "sublayers.parquet", "parameters.parquet", "norms.parquet"):
        assert load(directory / name) == run


def test_a_baseline_is_read_as_one(run, tmp_path):
    write_baseline(run, tmp_path / "one.parquet", "")
    assert load(tmp_path / "one.parquet") == kept(run)


@pytest.mark.parametrize("name", ["sublayers.parquet", "before.parquet"])
def test_sublayers_alone_give_what_they_say_and_a_note_tells_the_rest(name, run, directory, tmp_path):
    place = tmp_path / name
    shutil.copy(directory / "sublayers.parquet", place)
    read = load(place)
    assert read.sites == run.sites
    same = ("target", "precision", "seeds", "versions", "config_hash")
    assert [getattr(read, field) for field in same] == [getattr(run, field) for field in same]
    assert (read.parameters, read.findings, read.loss) == ((), (), LossInfo(None, None))
    model = read.model
    assert (model.blocks, model.sites, model.width, model.placement) == (3, 6, 5120, "pre")
    assert len(read.notes) == 1
    assert str(place) in read.notes[0]
    assert "loss, findings, parameters" in read.notes[0]


def test_a_width_that_no_site_tells_is_unknown(tmp_path):
    sites = [dataclasses.replace(site, stream_rms=value) for site, value in zip(qwen()[:3], (None, 0.0, math.nan), strict=True)]
    write_run(run_of(sites), tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    assert load(tmp_path / "run" / "sublayers.parquet").model.width == 0


def test_parameters_alone_are_no_run(directory, tmp_path):
    for name in ("parameters.parquet", "norms.parquet"):
        shutil.copy(directory / name, tmp_path / "alone.parquet")
        with pytest.raises(PropcheckError, match=f"alone.parquet: {name} alone is not a run; give the run directory"):
            load(tmp_path / "alone.parquet")


def test_a_file_of_another_scan_in_a_run_directory_is_refused(run, directory, tmp_path):
    write_run(dataclasses.replace(run, sites=run.sites[:6]), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "sublayers.parquet", directory)
    with pytest.raises(PropcheckError, match=r"does not belong to run\.json"):
        load(directory / "sublayers.parquet")


def test_sublayers_with_broken_metadata_are_refused(directory, tmp_path):
    table = pq.read_table(directory / "sublayers.parquet")
    for key, value, message in (
        (b"propcheck.seeds", b"{", "broken metadata"),
        (b"propcheck.seeds", b"[null]", "broken metadata"),
        (b"propcheck.versions", b"[]", "broken metadata"),
        (b"propcheck.target", b"\xff", "broken metadata"),
        (b"propcheck.schema_version", b"2", "newer propcheck"),
        (b"propcheck.schema_version", b"0", "older propcheck"),
        (b"propcheck.schema_version", b"one", "not written by propcheck"),
    ):
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, key: value}), tmp_path / "sublayers.parquet")
        with pytest.raises(PropcheckError, match=message) as caught:
            load(tmp_path / "sublayers.parquet")
        assert "\n" not in str(caught.value)
    old = {**table.schema.metadata, b"propcheck.schema_version": b"0"}
    pq.write_table(table.drop_columns(["cosine"]).replace_schema_metadata(old), tmp_path / "sublayers.parquet")
    assert {site.cosine for site in load(tmp_path / "sublayers.parquet", force=True).sites} == {None}


@pytest.mark.parametrize("name", ["sublayers.parquet", "one.parquet"])
def test_what_is_no_run_gives_one_line(name, directory, tmp_path):
    place = tmp_path / name
    whole = (directory / "sublayers.parquet").read_bytes()
    for content in (None, b"", b"text", b"PAR1", whole[: len(whole) // 2]):
        if content is not None:
            place.write_bytes(content)
        with pytest.raises(PropcheckError, match=name) as caught:
            load(place)
        assert "\n" not in str(caught.value)
    pq.write_table(pa.table({"a": [1]}), place)
    with pytest.raises(PropcheckError, match="not written by propcheck"):
        load(place)


def test_another_file_or_an_unfinished_directory_is_named(directory, tmp_path):
    with pytest.raises(PropcheckError, match="not a run; give a run directory"):
        load(tmp_path / "nowhere")
    (directory / "run.json").unlink()
    with pytest.raises(PropcheckError, match=r"run\.json: missing"):
        load(directory)


def test_a_run_is_told_from_a_target(directory, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({}))
    assert is_run(str(directory))
    assert is_run("nowhere/one.parquet")
    for target in ("qwen3.8-27b", "package.module:build", "models/lm.py:build", "probes/tiny.toml", "config.json"):
        assert not is_run(target)
    assert not is_run(str(tmp_path / "hf"))
    assert not is_run(str(tmp_path))
    (directory / "config.json").write_text("{}")
    assert is_run(str(directory))
    (directory / "run.json").unlink()
    assert not is_run(str(directory))
    (directory / "config.json").unlink()
    assert is_run(str(directory))  # not finished, which reading it says
