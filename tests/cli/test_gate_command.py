"""``propcheck gate`` at the command line: statuses, refusals in one line and before the scan, baselines whole or untouched.

The scan is stood in for by runs made from recurrences, except in the last tests.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import additive, parameter, run_of

from propcheck import rules
from propcheck.cli.app import run
from propcheck.cli.output import FORMATS
from propcheck.records import Finding, InputInfo, Place
from propcheck.records.baseline import kept, read_baseline
from propcheck.records.store import read_run, write_run

ROOT = Path(__file__).parents[2]
BASELINE = "baselines/tiny.parquet"
SARIF = json.loads((Path(__file__).parents[1] / "render" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))


def louder(one):
    """The same run with updates x1.2 from site 3 on."""
    sites = (dataclasses.replace(site, update_rms=1.2 * site.update_rms) if site.site >= 3 else site for site in one.sites)
    return dataclasses.replace(one, sites=tuple(sites))


def explosion(severity="error"):
    return Finding(
        "PC201", "explosion", severity, Place(3, 1, "mlp", "blocks.1.mlp"), "sum_rms", 90.0, 1.0, "it grows", "scale it"
    )


class Scanner:
    """Stands in for propcheck.api.measurement.measure and propcheck.rules.judge; what was scanned is in ``scanned``."""

    def __init__(self):
        self.scanned = []
        self.findings = ()
        self.change = lambda one: one
        self.raises = None

    def measure(self, request):
        probe = request.probe
        self.scanned.append(request.target)
        if self.raises is not None:
            raise self.raises
        seeds, inputs = tuple(probe.scan.seeds), probe.inputs
        made = run_of(
            [site for seed in seeds for site in additive(4, seed=seed)],
            [parameter("blocks.1.mlp.w", site=3, block=1, sublayer="mlp")],
            seeds=seeds,
            target=request.target,
            command=request.command,
            precision=probe.precision.preset or "bf16",
            inputs=InputInfo(inputs.batch or 1, inputs.tokens, inputs.source),
            settings=probe.model_dump(mode="json"),
        )
        return self.change(made)

    def judge(self, _, **__):
        return self.findings


@pytest.fixture
def scanner(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stand_in = Scanner()
    monkeypatch.setattr("propcheck.api.measurement.measure", stand_in.measure)
    monkeypatch.setattr(rules, "judge", stand_in.judge)
    return stand_in


@pytest.fixture
def gate(scanner, capsys):
    """Run a gate of ``tiny`` without plots: status, standard output, standard error."""

    def gate(*arguments, target="tiny", baseline=BASELINE):
        status = run(["gate", target, "--baseline", baseline, "--no-plots", *arguments])
        return status, *capsys.readouterr()

    return gate


@pytest.fixture
def made(gate, scanner):
    """A baseline of ``tiny``; nothing is scanned since."""
    assert gate("--update-baseline", "-q")[0] == 0
    scanner.scanned.clear()
    return Path(BASELINE)


def refused(result, *said):
    """One line on standard error, which says so, and status 2."""
    status, out, err = result
    assert (status, out, err.count("\n")) == (2, "", 1), (out, err)
    assert err.startswith("propcheck: ")
    for one in said:
        assert one in err
    return True


def test_a_run_like_its_baseline_passes_with_status_0(made, gate, scanner):
    status, out, err = gate()
    assert status == 0
    assert "Gate passed: " in out
    assert err.splitlines()[-1] == "propcheck: wrote reports/tiny"
    assert scanner.scanned == ["tiny"]
    assert read_run(Path("reports/tiny")).command == f"propcheck gate tiny --baseline {BASELINE} --no-plots"
    assert not list(Path("reports/tiny").glob("*.png"))


def test_a_change_fails_with_status_1_and_its_place(made, gate, scanner):
    scanner.change = louder
    status, out, _ = gate()
    text = " ".join(out.split())
    assert status == 1
    assert "error gate-stream" in text
    assert "(update_rms) differs at 5 of 8 sites (blocks 1 to 3). First at site 3 (mlp of block 1, blocks.1.mlp)" in text
    assert "(x1.2, limit +5 %)" in text
    assert "The change starts at site 3" in text


def test_a_new_error_fails_and_a_known_one_does_not(made, gate, scanner):
    scanner.findings = (explosion(),)
    status, out, _ = gate()
    assert status == 1
    assert "New error PC201 explosion: it grows" in " ".join(out.split())
    assert gate("--update-baseline")[0] == 0
    assert "- error PC201 explosion (site 3, block 1, blocks.1.mlp): it grows" in made.with_suffix(".md").read_text()
    assert gate()[0] == 0
    scanner.findings = ()
    status, out, _ = gate()
    assert status == 0
    assert "No longer found: PC201 explosion." in " ".join(out.split())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_tolerance_holds_for_what_is_not_finite(bad, made, gate, scanner):
    scanner.change = lambda one: dataclasses.replace(
        one, sites=(*one.sites[:2], dataclasses.replace(one.sites[2], stream_rms=bad), *one.sites[3:])
    )
    status, out, _ = gate("--tolerance", "900%")
    assert status == 1
    assert "error gate-nonfinite" in out
    assert "First at site 2" in " ".join(out.split())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nan", "--tolerance nan: must be finite and 0 or more"),
        ("nan%", "--tolerance nan%: must be finite and 0 or more"),
        ("inf", "--tolerance inf: must be finite and 0 or more"),
        ("-5%", "--tolerance -5%: must be finite and 0 or more"),
        ("5", '--tolerance 5: is 500 %; write "5%" or "500%"'),
        ("1000%", '--tolerance 1000%: accepts a factor of 11, which checks nothing; the largest tolerance is "900%"'),
        ("much", "--tolerance much: must be a share"),
        ("", "--tolerance : must be a share"),
        ("loss=", "--tolerance loss=: must be a share"),
        ("los=5%", "--tolerance los=5%: 'los' is neither a quantity (stream_rms, update_rms, "),
        ("update_ratio=5%", "'update_ratio' is neither a quantity"),
        ("layers.0.*=nan", "--tolerance layers.0.*=nan: must be finite and 0 or more"),
        ("=5%", "'' is neither a quantity"),
    ],
)
def test_a_tolerance_that_is_none_is_refused_before_the_scan(given, said, made, gate, scanner):
    assert refused(gate("--tolerance", given), said)
    assert scanner.scanned == []


def test_a_tolerance_is_for_all_for_a_quantity_or_for_modules(made, gate, scanner):
    scanner.change = louder
    for options, status in (
        (["--tolerance", "25%"], 0),
        (["--tolerance", "19%"], 1),
        (["--tolerance", "update_rms=25%"], 0),
        (["--tolerance", "grad_norm=25%"], 1),
        (["--tolerance", "*=25%"], 0),
        (["--tolerance", "*.mlp=25%"], 1),  # attention has changed too
        (["--tolerance", "*.mlp=25%", "--tolerance", "*.attention=25%"], 0),
        (["--tolerance", "*=25%", "--tolerance", "blocks.1.*=1%"], 1),  # the last that matches
    ):
        assert gate(*options)[0] == status, options


def test_the_gate_of_the_probe_counts_and_the_option_before_it(made, gate, scanner):
    scanner.change = louder
    probe = Path("tiny.toml")  # of the same name, so of the same target
    probe.write_text('base = "tiny"\n[gate]\ntolerance = "25%"\n')
    assert gate(target="tiny.toml")[0] == 0
    assert gate("--tolerance", "5%", target="tiny.toml")[0] == 1
    probe.write_text('base = "tiny"\n[gate]\nquantities = { update_rms = "25%" }\n')
    assert gate(target="tiny.toml")[0] == 0
    assert gate("--tolerance", "update_rms=5%", target="tiny.toml")[0] == 1
    probe.write_text('base = "tiny"\n[gate]\nmodules = { "blocks.*" = "25%" }\n')
    assert gate(target="tiny.toml")[0] == 0
    assert gate("--set", "gate.modules={}", target="tiny.toml")[0] == 1
    scanner.scanned.clear()
    probe.write_text('base = "tiny"\n[gate]\ntolerance = "-1%"\n')
    assert refused(gate(target="tiny.toml"), "tiny.toml: gate.tolerance", "must be finite and 0 or more")
    probe.write_text('base = "tiny"\n[gate]\nquantities = { los = "1%" }\n')
    assert refused(gate(target="tiny.toml"), "tiny.toml: ", "los")
    assert scanner.scanned == []


def test_the_gate_of_pyproject_counts_and_that_of_the_probe_before_it(made, gate, scanner):
    scanner.change = louder
    Path("pyproject.toml").write_text('[tool.propcheck.gate]\ntolerance = "25%"\n')
    assert gate()[0] == 0
    assert gate("--tolerance", "5%")[0] == 1
    Path("tiny.toml").write_text('base = "tiny"\n[gate]\ntolerance = "5%"\n')
    assert gate(target="tiny.toml")[0] == 1
    Path("pyproject.toml").write_text("[tool.propcheck.gate]\ntolerance = 5\n")
    scanner.scanned.clear()
    assert refused(gate(), "[tool.propcheck]: gate.tolerance", "is 500 %")
    assert scanner.scanned == []


BEFORE_THE_SCAN = {
    "target": (["--set", "name=other"], "target tiny (this run: other)"),
    "seeds": (["--seeds", "0,1"], "seeds 0 (this run: 0, 1)"),
    "mode": (["--eval"], "mode train (this run: eval)"),
    "arguments": (["--arg", "layers=3"], "arguments layers=2 (this run: layers=3)"),
}
AFTER_THE_SCAN = {
    "precision": (["--precision", "fp32"], "precision bf16 (this run: fp32)"),
    "tokens": (["--tokens", "9"], "inputs 1 x {tokens} zipf (this run: 1 x 9 zipf)"),
    "batch": (["--batch", "3"], "inputs 1 x {tokens} zipf (this run: 3 x {tokens} zipf)"),
    "source": (["--set", "inputs.source=uniform"], "inputs 1 x {tokens} zipf (this run: 1 x {tokens} uniform)"),
    "exponent": (["--set", "inputs.exponent=2"], "inputs.exponent 1 (this run: 2)"),
}


@pytest.mark.parametrize("kind", [*BEFORE_THE_SCAN, *AFTER_THE_SCAN])
def test_another_kind_of_run_is_refused_with_the_difference_and_taken_with_force(kind, gate, scanner):
    target = "tiny"
    base = []
    if kind == "arguments":
        Path("code.py").write_text("def build(layers): ...\n")
        target, base = "code.py:build", ["--arg", "layers=2"]
    assert gate("--update-baseline", *base, target=target)[0] == 0
    tokens = read_baseline(Path(BASELINE)).inputs.tokens
    scanner.scanned.clear()
    options, said = {**BEFORE_THE_SCAN, **AFTER_THE_SCAN}[kind]
    assert refused(
        gate("-q", *options, target=target),
        f"{BASELINE}: cannot be compared with this run: it was made with {said.format(tokens=tokens)}.",
    )
    assert bool(scanner.scanned) == (kind in AFTER_THE_SCAN)
    status, out, _ = gate("--force", *options, target=target)
    assert status == 0
    assert "Gate passed" in out


def test_several_differences_are_all_named(made, gate):
    mismatches = ("mode train (this run: eval)", "seeds 0 (this run: 1)")
    assert refused(gate("--seeds", "1", "--eval"), *mismatches, "--update-baseline", "--force")


def rewritten(path, **metadata):
    table = pq.read_table(path)
    changes = {f"propcheck.{key}".encode(): value.encode() for key, value in metadata.items()}
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **changes}), path)


BROKEN = {
    "empty": (lambda path: path.write_bytes(b""), "empty;"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-200]), "truncated or damaged"),
    "text": (lambda path: path.write_text("a baseline\n"), "not a Parquet file"),
    "foreign": (lambda path: pq.write_table(pa.table({"a": [1]}), path), "Parquet, but not written by propcheck"),
    "older": (lambda path: rewritten(path, schema_version="0"), "written by an older propcheck (schema 0; this one reads 1)"),
    "newer": (
        lambda path: rewritten(path, schema_version="2"),
        "written by a newer propcheck (schema 2; this one reads up to 1)",
    ),
    "changed": (lambda path: rewritten(path, run="{}"), "damaged or modified since propcheck wrote it"),
    "missing": (lambda path: path.unlink(), "no such baseline; create it with `propcheck gate TARGET --baseline"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is a directory, not a baseline"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_baseline_is_one_line_before_the_scan(kind, made, gate, scanner):
    breaks, said = BROKEN[kind]
    breaks(made)
    before = made.read_bytes() if made.is_file() else None
    assert refused(gate(), f"{BASELINE}: ", said, "--update-baseline")
    assert scanner.scanned == []
    assert (made.read_bytes() if made.is_file() else None) == before
    assert sorted(path.name for path in made.parent.iterdir()) in (["tiny.md", "tiny.parquet"], ["tiny.md"])


def test_what_is_broken_is_made_again(made, gate):
    for kind in ("empty", "cut short", "older", "newer"):
        BROKEN[kind][0](made)
        assert gate("--update-baseline")[0] == 0, kind
        assert gate()[0] == 0
    BROKEN["foreign"][0](made)  # somebody's data is not written over
    before = Path(BASELINE).read_bytes()
    assert refused(gate("--update-baseline"), "is a Parquet file but not a baseline; remove it")
    assert Path(BASELINE).read_bytes() == before


def test_an_older_schema_is_read_with_force(made, gate):
    rewritten(made, schema_version="0")
    assert refused(gate(), "written by an older propcheck")
    status, out, _ = gate("--force")
    assert status == 0
    assert "Gate passed" in out


def test_update_writes_both_files_says_what_changed_and_passes(gate, scanner):
    status, out, _ = gate("--update-baseline")
    assert status == 0
    text = " ".join(out.split())
    assert f"Baseline written: {BASELINE} (summary: baselines/tiny.md)." in text
    assert "Since the previous baseline" not in text
    assert [path.name for path in sorted(Path("baselines").iterdir())] == ["tiny.md", "tiny.parquet"]
    first = Path(BASELINE).read_bytes()
    stored = read_run(Path("reports/tiny"))
    assert read_baseline(Path(BASELINE)) == kept(stored)
    scanner.change = louder
    status, out, _ = gate("--update-baseline")
    assert status == 0
    assert "Since the previous baseline, 5 numbers changed by more than the tolerance." in " ".join(out.split())
    assert Path(BASELINE).read_bytes() != first
    assert gate()[0] == 0
    scanner.change = lambda one: one
    assert gate()[0] == 1
    gate("--update-baseline")
    assert Path(BASELINE).read_bytes() == first


def test_a_stored_run_becomes_a_baseline_and_nothing_is_scanned(made, gate, scanner):
    gate()
    scanner.scanned.clear()
    other = "other/tiny.parquet"
    assert gate("--update-baseline", target="reports/tiny", baseline=other)[0] == 0
    assert scanner.scanned == []
    assert Path(other).read_bytes() == made.read_bytes()


def test_a_run_with_a_nan_becomes_no_baseline_and_the_old_one_stays(made, gate, scanner):
    before = {path: path.read_bytes() for path in made.parent.iterdir()}
    scanner.change = lambda one: dataclasses.replace(
        one, sites=(dataclasses.replace(one.sites[0], sum_rms=math.nan, stream_rms=math.nan), *one.sites[1:])
    )
    cause = f"{BASELINE}: not written, because a run with NaN or infinity cannot be a baseline. NaN or infinity in stream_rms "
    assert refused(gate("--update-baseline", "-q"), cause)
    assert {path: path.read_bytes() for path in made.parent.iterdir()} == before


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ("baselines/tiny", "--baseline baselines/tiny: must end in .parquet with --update-baseline"),
        ("baselines/tiny.json", "must end in .parquet with --update-baseline"),
        ("file/tiny.parquet", "file is not a directory"),
    ],
)
def test_a_place_that_takes_no_baseline_is_refused_before_the_scan(baseline, said, gate, scanner):
    Path("file").touch()
    assert refused(gate("--update-baseline", baseline=baseline), said)
    assert scanner.scanned == []
    assert not Path("baselines").exists()


def test_outputs_that_the_command_itself_writes_are_refused(made, gate, scanner):
    for given in ("reports/tiny/run.json", f"json={BASELINE}", "baselines/tiny.md"):
        assert refused(gate("--update-baseline", "--output", given), "uses that file as well; name another")
    assert scanner.scanned == []


def stored(name, **changes):
    """A run directory, and the run in it."""
    one = run_of(additive(4), [parameter("w")], settings={"name": "tiny"}, **changes)
    write_run(one, Path(name))
    return one


def test_two_stored_runs_are_gated_and_options_of_a_scan_refused(gate, scanner):
    write_run(louder(stored("before")), Path("after"))
    status, out, err = gate(target="after", baseline="before")
    assert (status, err) == (1, "")
    assert "The change starts at site 3" in " ".join(out.split())
    assert gate(target="before", baseline="before")[0] == 0
    assert refused(
        gate("--tokens", "8", "--set", "a=b", "--eval", target="after", baseline="before"),
        "--set, --tokens, --eval: no effect, since every side is a run and nothing is scanned",
    )
    assert refused(gate("--out", "here", target="after", baseline="before"), "--out here: only for a target")
    assert scanner.scanned == []


def test_either_side_may_be_a_target(gate, scanner):
    assert gate("--out", "here", baseline="tiny")[0] == 0
    assert scanner.scanned == ["tiny", "tiny"]
    # The baseline is another target that was named: that it is another one is meant.
    assert gate("--out", "here", baseline="qwen3.8-27b", target="qwen3.8-27b-postnorm")[0] == 0
    assert gate(target="here", baseline="qwen3.8-27b-postnorm")[0] == 0
    assert {path.name for path in Path().iterdir()} == {"here"}  # the run of a baseline is kept nowhere


def test_a_run_directory_of_another_schema_is_refused(gate):
    stored("before")
    stored("after")
    document = json.loads(Path("before/run.json").read_text())
    for version, said in ((0, "older"), (2, "newer")):
        Path("before/run.json").write_text(json.dumps({**document, "schema_version": version}))
        assert refused(gate(target="after", baseline="before"), said)


def test_no_such_target_is_one_line(made, gate):
    assert refused(gate(target="tinny"), "tinny: no such file or bundled probe; did you mean tiny?")
    assert refused(gate(target="no.parquet"), "no.parquet")
    assert refused(gate(baseline="tinny"), "tinny: no such file or bundled probe")


@pytest.mark.parametrize("failing", [False, True])
def test_every_format_is_valid_and_all_are_written_at_once(failing, made, gate, scanner):
    if failing:
        scanner.change = louder
    files = {"table": "a.txt", "json": "b.json", "markdown": "c.md", "junit": "d.xml", "sarif": "e.sarif", "github": "f"}
    assert set(files) == set(FORMATS)
    outputs = [f"--output={kind}={name}" for kind, name in files.items()]
    texts = {}
    for kind in FORMATS:
        status, out, err = gate("-q", f"--output-format={kind}", *outputs)
        assert (status, err) == (int(failing), "")
        texts[kind] = Path(files[kind]).read_text()
        if kind != "table":  # whose width is the terminal's
            assert out == texts[kind]
    document = json.loads(texts["json"], parse_constant=pytest.fail)
    assert document["passed"] is not failing
    assert len(document["differences"]) == (5 if failing else 0)
    assert (document["start"] or {}).get("site") == (3 if failing else None)
    assert (document["run"]["target"], document["baseline"]["path"]) == ("tiny", BASELINE)
    failures = ET.fromstring(texts["junit"]).findall(".//failure")
    assert len(failures) == len(document["findings"]) == int(failing)
    log = json.loads(texts["sarif"], parse_constant=pytest.fail)
    assert [error.message for error in jsonschema.Draft4Validator(SARIF).iter_errors(log)] == []
    assert len(log["runs"][0]["results"]) == int(failing)
    assert texts["github"].count("::error ") == len(texts["github"].splitlines()) == int(failing)
    assert texts["markdown"].startswith(f"## propcheck gate: tiny {'failed' if failing else 'passed'}\n")
    assert f"Gate {'failed' if failing else 'passed'}: " in texts["table"]


def test_an_annotation_points_at_the_probe_or_at_the_code(gate, scanner):
    Path("my tiny.toml").write_text('base = "tiny"\n')
    Path("code.py").write_text("import torch\n\n\ndef build():\n    ...\n")
    for target, place in (("my tiny.toml", "file=my tiny.toml,line=1,"), ("code.py:build", "file=code.py,line=4,")):
        scanner.change = lambda one: one
        gate("--update-baseline", target=target)
        scanner.change = louder
        status, out, _ = gate("--output-format", "github", target=target)
        assert status == 1
        assert all(line.startswith(f"::error {place}title=gate-stream ") for line in out.splitlines())


PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_every_command_of_the_page_runs(scanner):
    Path("examples/ci").mkdir(parents=True)
    for name in ("examples/nanogpt.py", "examples/ci/model.toml"):
        shutil.copy(ROOT / name, name)
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("propcheck ")]
    assert len(commands) >= 5
    for words in commands:
        assert run([*words, "--no-plots"]) == 0, words


def test_the_tables_of_the_page_are_whole_and_its_settings_are_read(gate, scanner):
    shown = [one for one in FORMATS if f"| `{one}` | " in PAGE]
    assert sorted(shown) == sorted(FORMATS)
    (settings,) = blocks("toml")
    Path("mine.toml").write_text(f'base = "tiny"\n{settings}')
    assert gate("--update-baseline", target="mine.toml")[0] == 0
    assert read_run(Path("reports/mine")).settings["gate"]["quantities"] == {"loss": 0.01}


def test_quiet_is_silent_on_standard_error(made, gate):
    assert gate("--quiet")[2] == ""
    assert gate("--quiet", "--update-baseline")[2] == ""


@pytest.mark.parametrize("update", [[], ["--update-baseline"]])
def test_an_interrupted_scan_ends_with_130_and_leaves_everything(update, made, gate, scanner):
    gate()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    scanner.raises = KeyboardInterrupt()
    scanner.change = louder
    assert gate("-q", *update, "--output", "a.json") == (130, "", "")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_a_fault_of_the_models_code_is_one_line_and_no_regression(made, gate, scanner):
    scanner.raises = ZeroDivisionError("in forward")
    assert refused(gate("-q"), "in forward")
    assert made.exists()


SMALL = [
    "--set=model.layers=2",
    "--set=model.width=32",
    "--set=model.vocabulary=50",
    "--tokens=8",
    "--no-plots",
    "--threads=1",
    "-q",
]


def command(*arguments):
    return [sys.executable, "-m", "propcheck", "gate", "tiny", "--baseline", "b.parquet", *SMALL, *arguments]


def test_the_process_itself_ends_with_these_statuses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["gate", "tiny", "--baseline", "b.parquet", *SMALL, "--update-baseline"]) == 0
    capsys.readouterr()
    done = subprocess.run(command("--set=init.std=0.5"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "Gate failed" in done.stdout
    Path("b.parquet").write_bytes(b"")
    done = subprocess.run(command(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" not in done.stderr


def test_the_interrupt_of_a_terminal_ends_the_process_with_130(tmp_path):
    code = "import time\ndef build():\n    open('started', 'w').close()\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(code)
    words = [sys.executable, "-m", "propcheck", "gate", "slow.py:build", "--baseline", "b.parquet", "--update-baseline", "-q"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (tmp_path / "started").exists():
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "")
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"slow.py", "started"}


def test_a_run_is_not_written_over_the_directory_that_it_is_held_against(gate, scanner):
    assert run(["scan", "tiny", "--no-plots", "-q"]) == 0
    scanner.probe = None
    before = Path("reports/tiny/run.json").read_bytes()
    assert run(["gate", "tiny", "--baseline", "reports/tiny", "-q"]) == 2
    assert scanner.probe is None  # before the scan
    assert Path("reports/tiny/run.json").read_bytes() == before


def test_the_summary_beside_the_baseline_is_a_slip_that_is_named(gate, made):
    assert refused(gate("--baseline", "baselines/tiny.md"), "this is the summary; name the baseline, baselines/tiny.parquet")
