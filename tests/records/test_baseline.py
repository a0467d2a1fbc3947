"""The committed file of a gate: what it keeps, that it is the same wherever it is made, and that it refuses all else."""

import dataclasses
import json
import math
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import factors, parameter, qwen, run_of

from propcheck import rules
from propcheck.errors import PropcheckError
from propcheck.records import Angle, Doubling, NormRecord, Origin, baseline
from propcheck.records.baseline import kept, read_baseline
from propcheck.records.store import read_run, write_run
from propcheck.render.baseline_summary import baseline_summary

ROOT = Path(__file__).parents[2]


def write_baseline(run, path):
    baseline.write_baseline(run, path, baseline_summary(run))


@pytest.fixture
def run():
    run = run_of(
        [*qwen()[:6], *qwen(seed=7)[:6]],
        [
            parameter("blocks.0.a.weight", block=0, site=1, sublayer="mlp", fan_in=3, grad_spread=0.1, used=True),
            parameter("b", shape=(), init_calls=None, grad_state=None, grad_norm=math.nan, role=None, std=5e-324, mean=-0.0),
        ],
        seeds=(0, 7),
        loss=1 / 3,
        settings={"name": "synthetic", "base": "", "scan": {"seeds": [0, 7]}, "inputs": {"file": None}},
    )
    odd = dataclasses.replace(run.sites[2], block=None, module=None, cosine=None, sum_mean=math.nan, sum_absmax=-math.inf)
    loss = dataclasses.replace(run.loss, lowest=0.3, highest=math.inf, by_seed=(0.3, math.inf))
    run = dataclasses.replace(run, loss=loss, sites=(*run.sites[:2], odd, *run.sites[3:]))
    return dataclasses.replace(run, findings=rules.judge(run))


@pytest.fixture
def path(run, tmp_path):
    path = tmp_path / "baselines" / "synthetic.parquet"
    write_baseline(run, path)
    return path


def rewritten(path, *, metadata=None, change=lambda table: table):
    """Write a baseline again as another program would."""
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata({**table.schema.metadata, **(metadata or {})}), path)


def refusal(path, **options):
    """Give the one line of a refusal that says what to do."""
    with pytest.raises(PropcheckError) as caught:
        read_baseline(path, **options)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert "with `propcheck gate TARGET --baseline" in text
    assert "--update-baseline`" in text
    return text.removeprefix(f"{path}: ")


def test_a_baseline_comes_back_exactly(run, path):
    read = read_baseline(path)
    assert repr(read) == repr(kept(run))  # repr: NaN equals no NaN, and -0.0 equals 0.0
    same = (
        "sites",
        "parameters",
        "loss",
        "findings",
        "settings",
        "inputs",
        "seeds",
        "precision",
        "model",
        "versions",
        "target",
    )
    assert all(repr(getattr(read, name)) == repr(getattr(run, name)) for name in same)
    assert (read.engine.mode, read.engine.device, read.engine.threads) == ("streamed", "cpu", 2)


def test_what_changes_from_call_to_call_changes_no_byte(run, path, tmp_path):
    again = dataclasses.replace(
        run,
        path="runs/elsewhere",
        command="propcheck scan synthetic --no-plots",
        engine=dataclasses.replace(run.engine, wall_seconds=99.0, peak_rss_bytes=1, memory_budget_bytes=2),
        notes=("The peak of 6 GiB is above the budget of 5 GiB.",),
        norms=(NormRecord(0, 0, 1, 0, "read", "n", "n.weight", "mean_square", "float32", 8),),
        doublings=(Doubling(site=1, block=0, module="a"),),
        angles=(Angle("rope", 0, None, "bfloat16", largest=2048.0, error=1.0),),
        origins=(Origin(0, "forward", "NaN", "softmax", "a", 0, "scores"),),
    )
    write_baseline(again, tmp_path / "other.parquet")
    for suffix in (".parquet", ".md"):
        assert (tmp_path / "other").with_suffix(suffix).read_bytes() == path.with_suffix(suffix).read_bytes()


def test_two_checkouts_of_one_repository_give_the_same_bytes(run, tmp_path):
    written, settings = [], []
    for checkout in (tmp_path / "home" / "repository", tmp_path / "runner"):
        place = f"{checkout}/models/lm.py:build"
        one = dataclasses.replace(run, settings={**run.settings, "python": {"target": place, "args": {"file": "/data"}}})
        write_baseline(one, checkout / "baselines" / "lm.parquet")
        written.append((checkout / "baselines" / "lm.parquet").read_bytes())
        settings.append(read_baseline(checkout / "baselines" / "lm.parquet").settings)
        assert settings[-1] == one.settings
    assert written[0] == written[1]
    assert settings[0] != settings[1]
    assert str(tmp_path).encode() not in written[0]


def test_settings_that_name_no_path_of_the_checkout_stay_as_they_are(run, tmp_path):
    settings = {
        "base": "tiny",
        "python": {"target": "package.module:build"},
        "inputs": {"file": "/proc/x", "tokenizer": "../t"},
    }
    write_baseline(dataclasses.replace(run, settings=settings), tmp_path / "one.parquet")
    assert read_baseline(tmp_path / "one.parquet").settings == settings


@pytest.mark.parametrize("name", ["qwen3.8-27b", "qwen3.8-27b-postnorm"])
def test_the_baseline_of_a_27b_model_is_small(name, tmp_path):
    run = read_run(ROOT / "reports" / name)
    write_baseline(run, tmp_path / "one.parquet")
    assert (tmp_path / "one.parquet").stat().st_size < 100_000
    assert len((tmp_path / "one.md").read_text().splitlines()) < 100
    assert read_baseline(tmp_path / "one.parquet") == kept(run)


def test_any_reader_of_parquet_tells_sites_from_parameters(run, path):
    table = pq.read_table(path)
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert metadata["propcheck.kind"] == "baseline"
    assert metadata["propcheck.schema_version"] == "1"
    assert json.loads(metadata["propcheck.seeds"]) == [0, 7]
    assert (metadata["propcheck.precision"], metadata["propcheck.target"]) == ("bf16", "synthetic")
    assert json.loads(metadata["propcheck.run"])["loss"]["value"] == 1 / 3
    rows = table.to_pylist()
    assert [row["name"] for row in rows] == [None] * 12 + ["blocks.0.a.weight", "b"]
    assert rows[0]["stream_rms"] == 0.02
    assert rows[12]["stream_rms"] is None
    assert table.schema.names.count("block") == 1


def test_an_empty_run_has_a_baseline(tmp_path):
    write_baseline(run_of([]), tmp_path / "one.parquet")
    assert read_baseline(tmp_path / "one.parquet") == kept(run_of([]))


def test_the_summary_shows_what_changed_and_nothing_else(run, path):
    before = path.with_suffix(".md").read_text().splitlines()
    changed = dataclasses.replace(run.sites[3], update_rms=12.34567)  # of block 1, in the first of two seeds
    other = dataclasses.replace(run.sites[9], update_rms=12.34567)
    sites = (*run.sites[:3], changed, *run.sites[4:9], other, *run.sites[10:])
    versions = {**run.versions, "numpy": "9", "python": "4"}
    write_baseline(dataclasses.replace(run, sites=sites, findings=(), versions=versions), path)
    after = path.with_suffix(".md").read_text().splitlines()
    gone, come = [x for x in before if x not in after], [x for x in after if x not in before]
    (old,), (new,) = ([line.split(" | ") for line in lines if line.startswith("|")] for lines in (gone, come))
    # The stream has taken updates of 0.19, 3.42 and 0.19 to its 0.02: sqrt(11.77) = 3.43.
    assert old[:4] == ["| 1", "mlp", "3.43", "3.42"]
    assert new == [*old[:3], "12.3", *old[4:]]
    assert [line for line in come if not line.startswith("|")] == ["None."]
    assert all(finding.rule in " ".join(gone) for finding in run.findings)


def test_the_summary_is_of_the_run_and_of_no_machine(run, path):
    text = path.with_suffix(".md").read_text()
    for line in ("# Baseline: synthetic", "- precision: bf16", "- inputs: batch 1, 256 tokens, zipf", "- seeds: 0, 7"):
        assert line in text.splitlines()
    assert "- first loss: 0.333; a uniform guess gives 6.91" in text
    assert "- versions: propcheck 0.1.0, torch 2.13.0" in text
    assert "12.5" not in text  # the seconds that it took


def test_a_directory_is_made_and_no_temporary_file_stays(path):
    assert sorted(one.name for one in path.parent.iterdir()) == ["synthetic.md", "synthetic.parquet"]


def test_a_write_that_fails_leaves_the_old_files(run, path, monkeypatch):
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    write_bytes = Path.write_bytes

    def full(self, content):
        write_bytes(self, content[:10])
        if "parquet" in self.name:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PropcheckError, match=r"cannot write the baseline .*synthetic\.parquet: No space left on device"):
        write_baseline(run_of(factors(3)), path)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
    assert repr(read_baseline(path)) == repr(kept(run))


def test_the_parquet_file_is_the_last_to_be_renamed(path, monkeypatch):
    renamed = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (renamed.append(Path(target).name), replace(self, target)))
    write_baseline(run_of(factors(3)), path)
    assert renamed == ["synthetic.md", "synthetic.parquet"]


def test_a_place_where_no_baseline_belongs_is_refused(run, path, tmp_path):
    (path.parent / "notes.md").write_text("# Notes\n")
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "file").write_text("")
    for place, message in (
        (tmp_path / "one.json", "use a name that ends with .parquet"),
        (tmp_path / "sublayers.parquet", "reserved for a file of a run directory"),
        (path.parent / "notes.parquet", r"notes\.md: the summary of the baseline would replace this file"),
        (tmp_path / "folder.parquet", "is a directory; a baseline is a file"),
        (tmp_path / "file" / "one.parquet", "cannot write the baseline"),
    ):
        with pytest.raises(PropcheckError, match=message):
            write_baseline(run, place)
    assert (path.parent / "notes.md").read_text() == "# Notes\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["baselines", "file", "folder.parquet"]


def test_a_missing_baseline_is_named(tmp_path):
    assert refusal(tmp_path / "no.parquet").startswith("no such baseline; create it with")


def test_a_folder_is_no_baseline(tmp_path):
    assert refusal(tmp_path).startswith("is a directory, not a baseline")


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PAR1", b"PAR1PAR1", b"{}" * 100])
def test_what_is_no_parquet_is_refused(content, tmp_path):
    (tmp_path / "one.parquet").write_bytes(content)
    said = "empty" if not content else "truncated or damaged" if content[:4] == b"PAR1" else "not a Parquet file"
    assert refusal(tmp_path / "one.parquet").startswith(said)


def test_a_baseline_cut_short_anywhere_is_refused(path):
    content = path.read_bytes()
    for length in (1, 3, 4, 5, 100, *range(200, len(content), 997), *range(len(content) - 12, len(content))):
        path.write_bytes(content[:length])
        assert refusal(path).startswith(("truncated or damaged", "not a Parquet file"))


def test_garbage_is_refused_or_reads_as_it_was_written(path):
    content, expected, draw = path.read_bytes(), repr(read_baseline(path)), random.Random(0)

    def outcome():
        damaged = bytearray(content)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            return repr(read_baseline(path))
        except PropcheckError as error:
            return str(error)

    outcomes = [outcome() for _ in range(150)]
    refused = [one for one in outcomes if one != expected]
    assert all(one.startswith(str(path)) and one.endswith("--update-baseline`") for one in refused)
    assert len(refused) > 75


def test_a_parquet_file_of_someone_else_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "one.parquet")
    assert "not written by propcheck" in refusal(tmp_path / "one.parquet")


@pytest.mark.parametrize("name", ["sublayers.parquet", "parameters.parquet"])
def test_a_file_of_a_run_directory_is_no_baseline(name, run, tmp_path):
    write_run(run, tmp_path)
    text = refusal(tmp_path / name)
    assert "is a file of a run directory, not a baseline; give the directory" in text
    assert f"--baseline {tmp_path}" not in text  # which would have that file overwritten


def test_a_number_that_was_changed_is_seen(path):
    run = pq.read_schema(path).metadata[b"propcheck.run"]
    rewritten(path, metadata={b"propcheck.run": run.replace(b'"batch": 1', b'"batch": 2')})
    assert refusal(path).startswith("damaged or modified since")
    rewritten(path, metadata={b"propcheck.run": run})
    read_baseline(path)
    rewritten(path, change=lambda table: table.set_column(0, "name", pa.array([*[None] * 12, "blocks.0.a.weight", "c"])))
    assert refusal(path).startswith("damaged or modified since")


def sealed(monkeypatch, path, **changes):
    """Write a baseline again with a digest that fits: what only another version of propcheck could have written."""
    monkeypatch.setattr("propcheck.records.baseline._digest", lambda *_: "fits")
    rewritten(path, metadata={b"propcheck.sha256": b"fits", **changes.pop("metadata", {})}, **changes)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"run": null}', b"\xff", b"[" * 100_000])
def test_metadata_that_are_broken_are_refused(text, path, monkeypatch):
    sealed(monkeypatch, path, metadata={b"propcheck.run": text})
    assert refusal(path).startswith("broken metadata")


def test_a_newer_schema_is_refused_even_when_forced(path, monkeypatch):
    sealed(monkeypatch, path, metadata={b"propcheck.schema_version": b"2"})
    for force in (False, True):
        assert refusal(path, force=force).startswith("written by a newer propcheck (schema 2; this one reads up to 1)")


def test_an_older_schema_is_read_as_far_as_it_goes_when_forced(run, path, monkeypatch):
    sealed(
        monkeypatch,
        path,
        metadata={b"propcheck.schema_version": b"0"},
        change=lambda table: table.drop_columns(["cosine", "grad_norm"]).append_column("gone", pa.array([1.0] * len(table))),
    )
    assert refusal(path).startswith("written by an older propcheck (schema 0; this one reads 1); create it again with")
    read = read_baseline(path, force=True)
    assert {site.cosine for site in read.sites} == {None}
    assert [one.grad_norm for one in read.parameters] == [None, None]
    assert [site.stream_rms for site in read.sites] == [site.stream_rms for site in run.sites]
    assert (read.loss, read.findings) == (run.loss, run.findings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.append_column("more", pa.array([1.0] * len(table))), "differ from schema 1 (more)"),
        (lambda table: table.drop_columns(["name"]), "differ from schema 1 (name)"),
        (lambda table: table.drop_columns(["numel"]), "differ from schema 1 (numel)"),
        (lambda table: table.set_column(0, "name", pa.nulls(len(table), pa.string())), "column seed has null values"),
    ],
)
def test_columns_of_another_kind_are_refused(change, message, path, monkeypatch):
    sealed(monkeypatch, path, change=change)
    assert message in refusal(path)


def test_a_column_that_was_added_since_is_not_observed(path, monkeypatch):
    sealed(monkeypatch, path, change=lambda table: table.drop_columns(["grad_spread", "masked"]))
    read = read_baseline(path)
    assert read.parameters[0].grad_spread is None
    assert read.parameters[0].grad_norm == 0.1
