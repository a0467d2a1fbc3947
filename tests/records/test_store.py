"""The run directory: an exact round trip, and a clear refusal of everything else."""

import dataclasses
import hashlib
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import factors, parameter, qwen, run_of

from propcheck import rules
from propcheck.errors import PropcheckError
from propcheck.records import Angle, Doubling, NormRecord, Origin, ParameterRecord, SiteRecord, store
from propcheck.records.columns import columns_of


@pytest.fixture
def run():
    run = run_of(
        qwen()[:6],
        [
            parameter("a.weight", fan_in=3, fan_out=4, used=True),
            parameter("b", shape=(), init_calls=None, grad_state=None, grad_norm=math.nan, role=None),
        ],
        loss=math.inf,
        notes=("one", "två"),
        norms=(NormRecord(0, 0, 1, 0, "read", "n", "n.weight", "mean_square", "float32", 8, eps=1e-6, output_rms=math.inf),),
        doublings=(Doubling(site=1, block=0, module="a"), Doubling(site=None, block=None, module=None)),
        angles=(Angle("rope", 0, None, "bfloat16", largest=2048.0, error=math.inf),),
        origins=(Origin(0, "forward", "NaN", "softmax", "a", 0, "scores that are -inf in whole rows", (0, 1), 2, 16),),
        unobserved=("encoder.layers.0: runs as one fused function",),
    )
    odd = dataclasses.replace(run.sites[2], block=None, module=None, cosine=None, sum_mean=math.nan, sum_absmax=-math.inf)
    run = dataclasses.replace(run, sites=(*run.sites[:2], odd, *run.sites[3:]))
    return dataclasses.replace(run, findings=rules.judge(run))


def test_a_run_comes_back_as_it_was(run, tmp_path):
    store.write_run(run, tmp_path / "deep" / "run")
    assert repr(store.read_run(tmp_path / "deep" / "run")) == repr(run)  # repr: NaN equals no NaN


def test_a_run_without_odd_values_comes_back_equal(tmp_path):
    run = run_of(factors(3))
    store.write_run(run, tmp_path)
    assert store.read_run(tmp_path) == run


def test_null_and_nan_stay_apart_in_the_file(run, tmp_path):
    store.write_run(run, tmp_path)
    table = pq.read_table(tmp_path / "sublayers.parquet")
    assert table["cosine"].null_count == 1
    assert table["sum_mean"].to_pylist()[0] is None
    assert math.isnan(table["sum_mean"].to_pylist()[2])
    assert table["sum_absmax"].to_pylist()[2] == -math.inf


@pytest.mark.parametrize(("name", "record"), [("sublayers", SiteRecord), ("parameters", ParameterRecord)])
def test_columns_have_the_records_order_and_a_type_whatever_was_found(name, record, tmp_path):
    store.write_run(run_of([]), tmp_path)
    empty = pq.read_schema(tmp_path / f"{name}.parquet")
    assert empty.names == [f.name for f in dataclasses.fields(record)]
    store.write_run(run_of(factors(2), [parameter("a")]), tmp_path)
    assert pq.read_schema(tmp_path / f"{name}.parquet").equals(empty)
    assert pa.null() not in empty.types


def test_shapes_are_lists_of_integers():
    assert store.PARAMETERS_SCHEMA.field("shape").type == pa.list_(pa.int64())
    assert store.SUBLAYERS_SCHEMA.field("stream_rms").type == pa.float64()
    assert store.SUBLAYERS_SCHEMA.field("stream_dtype").type == pa.string()


def test_the_parquet_files_say_where_they_come_from(run, tmp_path):
    store.write_run(run, tmp_path)
    metadata = pq.read_schema(tmp_path / "sublayers.parquet").metadata
    assert metadata[b"propcheck.schema_version"] == b"1"
    assert metadata[b"propcheck.config_hash"] == b"abc123"
    assert json.loads(metadata[b"propcheck.versions"])["torch"] == "2.13.0"
    assert json.loads(metadata[b"propcheck.seeds"]) == [0]


def test_run_json_is_strict(run, tmp_path):
    store.write_run(run, tmp_path)

    def refuse(token):
        raise AssertionError(token)

    document = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert document["loss"]["value"] == "Infinity"
    assert document["run"]["model"]["class"] == "Synthetic"


def test_nothing_but_the_four_files_is_left_behind(run, tmp_path):
    store.write_run(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "norms.parquet",
        "parameters.parquet",
        "run.json",
        "sublayers.parquet",
    ]


def test_an_interrupted_write_leaves_no_temporary_file_and_a_refused_mixture(run, tmp_path, monkeypatch):
    store.write_run(run, tmp_path)
    replace = Path.replace

    def interrupted(self, target):
        if target.name == "parameters.parquet":
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.write_run(run_of(factors(2)), tmp_path)
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(PropcheckError, match=r"sublayers\.parquet: does not belong to run\.json"):
        store.read_run(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "sublayers.parquet", "parameters.parquet", "norms.parquet"])
def test_a_missing_file_is_named(name, run, tmp_path):
    store.write_run(run, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(PropcheckError, match=f"{name}: missing"):
        store.read_run(tmp_path)


@pytest.mark.parametrize("name", ["run.json", "sublayers.parquet", "parameters.parquet", "norms.parquet"])
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(name, kept, run, tmp_path):
    store.write_run(run, tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(PropcheckError, match=name):
        store.read_run(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["[]", "1", "{}", '{"schema_version": 1}', '{"schema_version": 1, "run": null}', '{"loss": NaN}', "\xff", "[" * 100_000],
)
def test_a_foreign_run_json_is_refused(text, run, tmp_path):
    store.write_run(run, tmp_path)
    (tmp_path / "run.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PropcheckError, match=r"run\.json: not a propcheck run"):
        store.read_run(tmp_path)


def test_a_foreign_parquet_file_is_refused(run, tmp_path):
    store.write_run(run, tmp_path)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "sublayers.parquet")
    with pytest.raises(PropcheckError, match="not written by propcheck"):
        store.read_run(tmp_path)


def test_a_run_from_before_a_column_was_added_reads_as_not_observed(run, tmp_path):
    store.write_run(run, tmp_path)
    table = pq.read_table(tmp_path / "parameters.parquet").drop_columns(["fan_in", "fan_out", "used"])
    pq.write_table(table, tmp_path / "parameters.parquet")
    document = json.loads((tmp_path / "run.json").read_text())
    document["files"]["parameters.parquet"] = hashlib.sha256((tmp_path / "parameters.parquet").read_bytes()).hexdigest()
    del document["unobserved"]
    (tmp_path / "run.json").write_text(json.dumps(document))
    read = store.read_run(tmp_path)
    assert (read.parameters[0].fan_in, read.parameters[0].used, read.unobserved) == (None, None, ())
    assert read.parameters[0].name == "a.weight"


def test_a_file_without_a_column_that_is_never_null_is_refused(run, tmp_path):
    store.write_run(run, tmp_path)
    pq.write_table(pq.read_table(tmp_path / "parameters.parquet").drop_columns(["numel"]), tmp_path / "parameters.parquet")
    with pytest.raises(PropcheckError, match=r"columns differ from schema 1 \(numel\)"):
        store.read_run(tmp_path)


def test_a_newer_schema_is_refused(run, tmp_path):
    store.write_run(run, tmp_path)
    text = (tmp_path / "run.json").read_text().replace('"schema_version": 1', '"schema_version": 2')
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(PropcheckError, match="written by a newer propcheck"):
        store.read_run(tmp_path)


def aged(directory, *, columns=(), extra=()):
    """Make a run one of schema 0, which lacks some columns and has others."""
    document = json.loads((directory / "run.json").read_text())
    for path in directory.glob("*.parquet"):
        table = pq.read_table(path)
        metadata = {**table.schema.metadata, b"propcheck.schema_version": b"0"}
        table = table.drop_columns([name for name in columns if name in table.schema.names])
        for name in extra:
            table = table.append_column(name, pa.array([1.0] * len(table)))
        pq.write_table(table.replace_schema_metadata(metadata), path)
        document["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (directory / "run.json").write_text(json.dumps({**document, "schema_version": 0}))


def test_an_older_schema_is_refused_unless_it_is_forced(run, tmp_path):
    store.write_run(run, tmp_path)
    aged(tmp_path, columns=("block", "cosine", "grad_norm"), extra=("gone",))
    with pytest.raises(
        PropcheckError, match=r"run\.json: written by an older propcheck \(schema 0; this one reads 1\); scan again"
    ):
        store.read_run(tmp_path)
    read = store.read_run(tmp_path, force=True)
    assert {(site.block, site.cosine) for site in read.sites} == {(None, None)}
    assert [site.stream_rms for site in read.sites] == [site.stream_rms for site in run.sites]
    assert [one.grad_norm for one in read.parameters] == [None, None]
    assert (read.findings, read.loss, read.settings) == (run.findings, run.loss, run.settings)


def test_an_older_schema_without_a_column_that_is_never_null_is_refused_even_so(run, tmp_path):
    store.write_run(run, tmp_path)
    aged(tmp_path, columns=("numel",))
    with pytest.raises(PropcheckError, match=r"parameters\.parquet: columns differ from schema 1 \(numel\)"):
        store.read_run(tmp_path, force=True)


def test_a_newer_schema_is_refused_even_when_forced(run, tmp_path):
    store.write_run(run, tmp_path)
    text = (tmp_path / "run.json").read_text().replace('"schema_version": 1', '"schema_version": 2')
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(PropcheckError, match="written by a newer propcheck"):
        store.read_run(tmp_path, force=True)


def test_a_column_of_another_type_or_with_an_impossible_null_is_named(run, tmp_path):
    store.write_run(run, tmp_path)
    table = pq.read_table(tmp_path / "sublayers.parquet")
    for name, values, message in (
        ("sum_rms", pa.array(["1"] * len(table)), "column sum_rms has type string, expected double"),
        ("seed", pa.array([None] * len(table), type=pa.int64()), "column seed has null values"),
    ):
        changed = table.set_column(table.schema.names.index(name), name, values)
        pq.write_table(changed, tmp_path / "sublayers.parquet")
        with pytest.raises(PropcheckError, match=message):
            store.read_run(tmp_path)


def test_a_parquet_file_of_a_run_is_known_by_its_columns(run, tmp_path):
    store.write_run(run, tmp_path)
    assert {name: store.file_kind(pq.read_schema(tmp_path / name)) for name in store.FILES} == {n: n for n in store.FILES}
    pq.write_table(pa.table({"seed": [1], "site": [1], "sublayer": ["mlp"]}), tmp_path / "another.parquet")
    assert store.file_kind(pq.read_schema(tmp_path / "another.parquet")) is None


def test_a_directory_that_is_none_is_refused(run, tmp_path):
    with pytest.raises(PropcheckError, match="no such run directory"):
        store.read_run(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(PropcheckError, match="cannot write the run"):
        store.write_run(run, tmp_path / "file")


@pytest.mark.parametrize("record_type", [SiteRecord, ParameterRecord, NormRecord])
def test_every_column_is_described(record_type):
    described = columns_of(record_type)
    assert list(described) == [f.name for f in dataclasses.fields(record_type)]
    assert all(column.description.endswith(".") and column.label and column.phrase for column in described.values())


def test_a_column_has_the_type_of_its_field():
    sites, parameters = columns_of(SiteRecord), columns_of(ParameterRecord)
    assert (sites["seed"].value_type, sites["seed"].nullable) == (int, False)
    assert (sites["sublayer"].value_type, sites["sublayer"].nullable) == (str, False)
    assert (sites["sum_rms"].value_type, sites["sum_rms"].nullable) == (float, True)
    assert (parameters["sublayer"].value_type, parameters["sublayer"].nullable) == (str, True)
    assert parameters["shape"].value_type is tuple


def test_records_are_imported_without_pyarrow():
    code = "import sys, propcheck.records; sys.exit('pyarrow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_of_the_columns_is_fresh():
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "generate.py"))["columns_page"]()
    assert (docs / "columns.md").read_text() == page, "run `make docs`"
