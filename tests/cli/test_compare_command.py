"""``propcheck compare`` at the command line: what it takes, what it says, in every format and width.

Runs are made from recurrences; two small models are scanned in the last tests.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from synthetic import additive, factors, parameter, run_of

from propcheck import rules
from propcheck.api.scan import measure_and_judge
from propcheck.cli.app import run
from propcheck.cli.output import FORMATS
from propcheck.records.baseline import write_baseline
from propcheck.records.store import read_run, write_run

SARIF = json.loads((Path(__file__).parents[1] / "render" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))


def made(name, sites, **changes):
    record = run_of(sites, [parameter("blocks.0.mlp.w", site=1, block=0, sublayer="mlp")], target=name, **changes)
    record = dataclasses.replace(record, findings=rules.judge(record))
    write_run(record, Path(name))
    return record


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    """Three runs: before; after, whose mlp writes twice as much from block 2 on; grown, which explodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("propcheck.api.sides.measure_and_judge", pytest.fail)  # what is stored is not scanned
    made("before", additive(4))
    louder = [
        dataclasses.replace(site, update_rms=2 * site.update_rms) if site.block >= 2 and site.sublayer == "mlp" else site
        for site in additive(4)
    ]
    made("after", louder)
    made("grown", factors(4, forward=30.0))


@pytest.fixture
def compare(capsys):
    def compare(*arguments, status=0):
        assert run(["compare", *arguments]) == status
        out, err = capsys.readouterr()
        return " ".join(out.split()) if status == 0 else (out, err)

    return compare


def document(capsys, *arguments):
    assert run(["compare", *arguments, "--no-plots", "--output-format", "json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def changes(contrast):
    return {one["quantity"]: one for one in contrast["changes"]}


def test_two_stored_runs_are_set_side_by_side_and_plotted(capsys):
    assert run(["compare", "before", "after"]) == 0
    out, err = capsys.readouterr()
    assert err == "propcheck: wrote reports/compare-before-after\n"
    assert "B starts to differ from A at site 5 (mlp of block 2, blocks.2.mlp)." in " ".join(out.split())
    plots = list(Path("reports/compare-before-after").iterdir())
    assert len(plots) >= 4
    assert {path.suffix for path in plots} == {".png"}


def test_a_run_beside_itself_is_alike(compare):
    text = compare("before", "before", "--no-plots")
    assert "All numbers of B match those of A." in text
    assert not Path("reports").exists()


def test_what_changed_is_counted_and_placed(capsys):
    (contrast,) = document(capsys, "before", "after")["contrasts"]
    update = changes(contrast)["update_rms"]
    assert (update["compared"], update["differing"]) == (8, 2)
    assert (update["first"]["site"], update["first"]["ratio"]) == (5, pytest.approx(2.0))
    assert {name: one["differing"] for name, one in changes(contrast).items() if one["differing"]} == {"update_rms": 2}
    assert contrast["start"] == {"site": 5, "block": 2, "sublayer": "mlp", "module": "blocks.2.mlp", "parameter": None}


def test_the_tolerance_says_from_where_on_a_number_counts(capsys):
    (contrast,) = document(capsys, "before", "after", "--tolerance", "update_rms=150%")["contrasts"]
    assert contrast["start"] is None
    assert changes(contrast)["update_rms"]["differing"] == 0


def test_files_of_a_run_and_baselines_stand_for_it(capsys):
    write_baseline(read_run(Path("after")), Path("b/after.parquet"), "")
    for second in ("after/sublayers.parquet", "after/parameters.parquet", "b/after.parquet"):
        shown = document(capsys, "before/norms.parquet", second)
        assert shown["contrasts"][0]["start"]["site"] == 5
        assert [one["target"] for one in shown["runs"]] == ["before", "after"]
    Path("after/sublayers.parquet").rename("alone.parquet")
    (contrast,) = document(capsys, "before", "alone.parquet")["contrasts"]
    assert contrast["start"]["site"] == 5
    assert "loss" not in changes(contrast)
    assert any("has only sites" in note for note in contrast["notes"])


def test_three_runs_are_each_beside_the_first(capsys):
    shown = document(capsys, "before", "after", "grown")
    assert [one["label"] for one in shown["runs"]] == ["A", "B", "C"]
    assert [one["run"] for one in shown["contrasts"]] == ["B", "C"]
    assert set(shown["rows"][0]["sites"]) == {"A", "B", "C"}
    won = [one["rule"] for one in shown["contrasts"][1]["findings"]["won"]]
    assert "PC201" in won
    assert shown["contrasts"][0]["findings"]["won"] == []


def test_models_of_different_depth_are_compared_on_relative_depth(capsys, compare):
    made("deep", additive(8))
    shown = document(capsys, "before", "deep")
    (contrast,) = shown["contrasts"]
    assert contrast["relative_depth"] is True
    assert [row["relative_depth"] for row in shown["rows"]] == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.01)
    # Block 3 of 4 is beside block 7 of 8.
    assert {site["block"] for site in shown["rows"][-1]["sites"]["B"]} == {7}
    assert "relative depth" in compare("before", "deep", "--no-plots")


def test_a_missing_sublayer_is_named(compare):
    made("less", [site for site in additive(4) if site.site != 4])
    assert "B lacks the attention of block 2 of A (site 4)." in compare("before", "less", "--no-plots")
    assert "A lacks the attention of block 2 of B (site 4)." in compare("less", "before", "--no-plots")


def test_few_blocks_are_shown_unless_all_are_asked_for(capsys):
    for name in ("long", "longer"):
        made(name, additive(40, updates=(0.3, 1.0) if name == "long" else (0.3, 1.3)))
    amounts = {}
    for detail in ("few", "block"):
        assert run(["compare", "long", "longer", "--no-plots", "--detail", detail]) == 0
        out = capsys.readouterr().out
        rows = [int(line.split()[0]) for line in out.splitlines() if re.match(r" *\d+ ", line)]
        amounts[detail] = len(rows)
        assert (rows[0], rows[-1]) == (0, 39)
    assert amounts["block"] == 40
    assert amounts["few"] < 20


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("seeds", [1, 7])
def test_every_line_fits_the_terminal(width, seeds, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    for name, updates in (("one", (0.3, 1.0)), ("two", (0.5, 1.5))):
        sites = [site for seed in range(seeds) for site in additive(30, updates=updates, seed=seed)]
        made(name, sites, seeds=tuple(range(seeds)))
    assert run(["compare", "one", "two", "before", "--no-plots"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width
    assert "starts to differ from A" in " ".join(out.split())


def test_every_format_is_valid_and_all_are_written_at_once(capsys):
    files = {"table": "a.txt", "json": "b.json", "markdown": "c.md", "junit": "d.xml", "sarif": "e.sarif", "github": "f"}
    outputs = [f"--output={kind}={name}" for kind, name in files.items()]
    texts = {}
    for kind in FORMATS:
        assert run(["compare", "before", "after", "grown", "--no-plots", f"--output-format={kind}", *outputs]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        texts[kind] = Path(files[kind]).read_text()
        if kind != "table":
            assert out == texts[kind]
    json.loads(texts["json"], parse_constant=pytest.fail)
    assert ET.fromstring(texts["junit"]).findall(".//failure") == []
    log = json.loads(texts["sarif"], parse_constant=pytest.fail)
    assert [error.message for error in jsonschema.Draft4Validator(SARIF).iter_errors(log)] == []
    assert {result["level"] for result in log["runs"][0]["results"]} == {"note"}
    lines = texts["github"].splitlines()
    assert len(lines) == len(log["runs"][0]["results"]) > 0
    assert all(line.startswith("::notice title=compare-") for line in lines)
    assert texts["markdown"].startswith("## propcheck compare: before · after · grown\n")
    assert "C starts to differ from A" in texts["table"]


def test_what_is_not_finite_is_compared_and_is_strict_json(capsys):
    sites = additive(4)
    sites[3] = dataclasses.replace(sites[3], update_rms=float("nan"), sum_rms=float("inf"))
    made("bad", sites)
    (contrast,) = document(capsys, "before", "bad")["contrasts"]
    assert changes(contrast)["update_rms"]["first"]["value"] == "NaN"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["before"], "before: needs two or more runs to compare"),
        (["before", "no"], "no: no such file or bundled probe"),
        (["before", "no.parquet"], "no.parquet: no such baseline"),
        (["before", "empty.parquet"], "empty.parquet: empty"),
        (["before", "newer"], "newer propcheck (schema 2"),
        (["before", "after", "--tolerance", "nan"], "--tolerance nan: must be finite and 0 or more"),
        (["before", "after", "--detail", "site"], "'site' is not one of"),
        (["before", "after", "--seeds", "0..4"], "--seeds: no effect, since every side is a run"),
        (["before", "after", "--output", "a.html"], "unknown suffix .html"),
        (["before", "after", "--out", "file/here"], "file is not a directory"),
        (["before", "after", "--out", "here", "--no-plots"], "--out here: nothing to write"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, said, compare):
    Path("file").touch()
    Path("empty.parquet").touch()
    made("newer", additive(2))
    stored = json.loads(Path("newer/run.json").read_text())
    Path("newer/run.json").write_text(json.dumps({**stored, "schema_version": 2}))
    out, err = compare(*arguments, status=2)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("propcheck: ")
    assert said in err


SMALL = ["--set=model.layers=2", "--set=model.width=32", "--set=model.vocabulary=50", "--tokens=8", "--threads=1", "--no-plots"]


def test_targets_are_scanned_and_kept_and_what_they_set_apart_is_named(capsys, monkeypatch):
    monkeypatch.setattr("propcheck.api.sides.measure_and_judge", measure_and_judge)
    Path("wide.toml").write_text('base = "tiny"\n[init]\nstd = 0.5\n')
    assert run(["compare", "tiny", "wide.toml", *SMALL, "--out", "here", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "init.std = 0.5" in " ".join(out.split())
    assert {path.name for path in Path("here").iterdir()} == {"1-tiny", "2-wide"}
    # They are runs like others: side by side again, nothing is scanned, and the numbers are those.
    monkeypatch.setattr("propcheck.api.sides.measure_and_judge", pytest.fail)
    assert run(["compare", "here/1-tiny", "here/2-wide", "--no-plots"]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if "differs" in line] == [
        line for line in out.splitlines() if "differs" in line
    ]
    (contrast,) = document(capsys, "here/1-tiny", "here/2-wide")["contrasts"]
    assert contrast["settings"] == [{"key": "init.std", "first": pytest.approx(0.1265, rel=0.01), "here": 0.5}]


def test_an_interrupted_scan_ends_with_130(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("propcheck.api.sides.measure_and_judge", interrupted)
    assert run(["compare", "before", "tiny", "--no-plots", "-q"]) == 130
    assert capsys.readouterr() == ("", "")
    assert not Path("reports").exists()
