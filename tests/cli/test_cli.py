"""The command line's contract: what is printed where, exit statuses, one line an error.

The scan itself is stood in for by a run written by hand, except in the last test.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import propcheck.rules
from propcheck.cli.app import run
from propcheck.records import EngineInfo, Finding, InputInfo, LossInfo, ModelInfo, Place, Run, SiteRecord
from propcheck.records.store import read_run

ROOT = Path(__file__).parents[2]


def finding(severity):
    return Finding("PC201", "explosion", severity, Place(site=1, block=0), "sum_rms", 2.0, 1.0, "it grows", "scale it")


RUN = Run(
    path=None,
    target="tiny",
    model=ModelInfo("Decoder", parameters=10, blocks=1, sites=2, width=4, placement="pre"),
    precision="bf16",
    inputs=InputInfo(batch=1, tokens=8, source="zipf"),
    seeds=(0,),
    engine=EngineInfo("resident", 1.0, 2**30, threads=1, device="cpu", memory_budget_bytes=2**31),
    versions={"torch": "2"},
    loss=LossInfo(value=float("nan"), uniform=2.0),
    config_hash="0" * 64,
    command=None,
    sites=tuple(
        SiteRecord(0, site, 0, kind, f"blocks.0.{kind}", "pre", stream_rms=1.0, update_rms=1.0, sum_rms=2**0.5, sum_norm=8**0.5)
        for site, kind in enumerate(("attention", "mlp"))
    ),
    parameters=(),
)


class Scanner:
    """Stands in for propcheck.api.measurement.measure and propcheck.rules.judge; remembers what it was asked."""

    findings: tuple[Finding, ...] = ()
    raises: BaseException | None = None
    probe = None
    request = None
    judged: dict[str, object]
    measured = RUN

    def measure(self, request):
        self.probe, self.request = request.probe, request
        if self.raises is not None:
            raise self.raises
        return self.measured

    def judge(self, run, **options):
        assert run is self.measured
        self.judged = options
        return self.findings


@pytest.fixture
def scanner(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stand_in = Scanner()
    monkeypatch.setattr("propcheck.api.measurement.measure", stand_in.measure)
    monkeypatch.setattr(propcheck.rules, "judge", stand_in.judge)
    return stand_in


def test_a_scan_writes_its_run_and_prints_the_table(scanner, capsys):
    assert run(["scan", "tiny"]) == 0
    assert {path.name for path in Path("reports/tiny").iterdir()} >= {"sublayers.parquet", "parameters.parquet", "run.json"}
    assert len(list(Path("reports/tiny").glob("*.png"))) == 2
    out, err = capsys.readouterr()
    assert "2 sites" in out
    assert "reports/tiny" in out
    assert err == ""
    assert scanner.request.command == "propcheck scan tiny"
    assert scanner.request.target == "tiny"


def test_json_is_all_that_stdout_carries(scanner, capsys):
    scanner.findings = (finding("warning"),)
    assert run(["scan", "tiny", "--output-format", "json", "--no-plots", "--out", "here"]) == 0
    out, err = capsys.readouterr()
    assert err == "propcheck: wrote here\n"
    document = json.loads(out, parse_constant=pytest.fail)
    assert document["run"]["path"] == "here"
    assert document["loss"]["value"] == "NaN"
    assert [one["rule"] for one in document["findings"]] == ["PC201"]
    assert not list(Path("here").glob("*.png"))


def test_notes_are_on_stderr_where_the_table_is_not_on_a_terminal(scanner, capsys):
    scanner.measured = dataclasses.replace(RUN, notes=("It is so.",))
    assert run(["scan", "tiny", "--no-plots", "--output-format", "json"]) == 0
    assert capsys.readouterr().err.startswith("propcheck: It is so.\n")
    assert run(["scan", "tiny", "--no-plots"]) == 0
    assert capsys.readouterr().err == "propcheck: It is so.\n"
    assert run(["scan", "tiny", "--no-plots", "-q"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "It is so." in out


@pytest.mark.usefixtures("capsys")
def test_arguments_of_the_callable_are_toml_values_or_plain_words(scanner):
    arguments = ["--arg", "layers=3", "--arg", "kind=gelu", "--arg", "widths=[1, 2]", "--arg", "tied=true"]
    assert run(["scan", "my.py:build", "--no-plots", *arguments]) == 0
    assert scanner.probe.python.args == {"layers": 3, "kind": "gelu", "widths": [1, 2], "tied": True}
    assert scanner.probe.python.target.endswith("/my.py:build")
    assert Path("reports/my-build/run.json").exists()


def test_quiet_leaves_stderr_empty(scanner, capsys):
    assert run(["scan", "tiny", "--quiet", "--no-plots", "--output-format", "json"]) == 0
    assert capsys.readouterr().err == ""
    assert scanner.request.progress is None


def test_the_progress_bar_is_silent_when_stderr_is_no_terminal(scanner, capsys):
    del scanner
    import rich.console

    from propcheck.progress import Bar

    bar = Bar(rich.console.Console(stderr=True))
    bar.start(2.0)
    bar.update("forward", 0, 1, 1.0)
    bar.stop()
    assert capsys.readouterr() == ("", "")


def test_the_progress_bar_shows_phase_and_block_on_a_terminal():
    import io

    import rich.console

    from propcheck.progress import Bar

    stream = io.StringIO()
    bar = Bar(rich.console.Console(file=stream, force_terminal=True, width=100))
    bar.start(4.0)
    bar.update("backward", 3, 64, 3.0)
    bar.stop()
    bar.stop()
    assert "backward" in stream.getvalue()
    assert "block 3 of 64" in stream.getvalue()
    assert "75%" in stream.getvalue()


@pytest.mark.parametrize(
    ("worst", "level", "status"),
    [
        (None, "note", 0),
        ("note", None, 0),
        ("warning", None, 0),
        ("error", None, 1),
        ("error", "error", 1),
        ("warning", "warning", 1),
        ("error", "warning", 1),
        ("note", "warning", 0),
        ("note", "note", 1),
        ("error", "never", 0),
    ],
)
@pytest.mark.usefixtures("capsys")
def test_the_status_follows_the_fail_level(scanner, worst, level, status):
    scanner.findings = (finding(worst),) if worst else ()
    assert run(["scan", "tiny", "--no-plots", *(["--fail-level", level] if level else [])]) == status


@pytest.mark.usefixtures("capsys")
def test_options_override_the_probe_and_come_after_set(scanner):
    options = "--set inputs.tokens=9 --precision fp32 --tokens 16 --batch 3 --seeds 0..2,7 --memory 5GiB --device cuda:1 --eval"
    options += " --shadow fp32"
    assert run(["scan", "tiny", "--no-plots", *options.split()]) == 0
    probe = scanner.probe
    assert (probe.precision.preset, probe.inputs.tokens, probe.inputs.batch) == ("fp32", 16, 3)
    assert (probe.scan.seeds, probe.scan.memory_bytes) == ((0, 1, 2, 7), 5 * 2**30)
    assert (probe.scan.device, probe.scan.mode, probe.scan.shadow) == ("cuda:1", "eval", "fp32")


@pytest.mark.usefixtures("capsys")
def test_pictures_of_an_earlier_run_do_not_stay_beside_a_new_one(tmp_path):
    small = [f"--set=model.{key}={value}" for key, value in (("layers", 2), ("width", 32), ("vocabulary", 50))]
    command = ["scan", "tiny", *small, "--tokens", "8", "-q", "--out", str(tmp_path)]
    run(command)
    assert {"forward.png", "backward.png"} < {path.name for path in tmp_path.iterdir()}
    run([*command, "--no-plots"])
    assert {path.name for path in tmp_path.iterdir()} == {
        "run.json",
        "sublayers.parquet",
        "parameters.parquet",
        "norms.parquet",
    }
    assert read_run(tmp_path).settings["model"]["width"] == 32


@pytest.mark.usefixtures("scanner")
def test_a_threshold_for_a_rule_that_has_none_is_refused(capsys):
    assert run(["scan", "tiny", "--set", "rules.PC209.threshold=5"]) == 2
    assert capsys.readouterr().err == "propcheck: rules.PC209.threshold: PC209 has no threshold; remove the key\n"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("PC104.threshold=0", " = 0 must be above 1 (factor by which a scale is off its siblings"),
        ("PC205.threshold=1", " = 1 must be above 1 (factor by which a step of the stream differs"),
        ("PC306.threshold=0.5", " = 0.5 must be above 1 (factor by which a step of the gradient differs"),
        ("PC202.threshold=0", " = 0 must be above 1 (factor that the average block's decay compounds to over the depth)"),
        ("PC204.threshold=0", " = 0 must be above 0 (update_rms / stream_rms)"),
        ("PC207.threshold=-1", " = -1 must be above 0 (fraction of the update's non-zero elements"),
        ("PC502.threshold=5", ": PC502 has no threshold; remove the key"),
    ],
)
def test_a_threshold_that_cannot_be_judged_by_is_refused_before_the_scan(scanner, capsys, key, said):
    assert run(["scan", "tiny", "--set", f"rules.{key}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"propcheck: rules.{key.partition('=')[0]}{said}")
    assert error.count("\n") == 1
    assert scanner.probe is None


@pytest.mark.parametrize("value", ["", ",,", " , "])
@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_option_that_names_no_rule_is_refused(scanner, capsys, option, value):
    assert run(["scan", "tiny", option, value]) == 2
    assert capsys.readouterr().err.startswith(f"propcheck: {option} {value!r}: names no rule")
    assert scanner.probe is None


@pytest.mark.usefixtures("capsys")
def test_empty_parts_of_a_list_of_rules_are_dropped(scanner):
    assert run(["scan", "tiny", "--no-plots", "--select", "PC201,,PC202,"]) == 0
    assert scanner.judged["select"] == ("PC201", "PC202")


@pytest.mark.usefixtures("capsys")
def test_rules_are_selected_and_set(scanner):
    options = ["--select", "PC201,PC202", "--select", "PC301", "--ignore", "PC202", "--set", "rules.PC201.threshold=3"]
    assert run(["scan", "tiny", "--no-plots", *options]) == 0
    assert scanner.judged["select"] == ("PC201", "PC202", "PC301")
    assert scanner.judged["ignore"] == ("PC202",)
    assert scanner.judged["settings"]["PC201"].threshold == 3
    assert run(["scan", "tiny", "--no-plots"]) == 0
    assert (scanner.judged["select"], scanner.judged["ignore"]) == ((), ())


@pytest.mark.usefixtures("capsys")
def test_pyproject_gives_defaults_that_options_and_the_probe_overrule(scanner, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.propcheck]\nseeds = [5]\nmemory = '2GiB'\nout = 'runs/x'\nfail-level = 'note'\nthreads = 3\n"
    )
    scanner.findings = (finding("note"),)
    assert run(["scan", "tiny", "--no-plots", "--memory", "1GiB"]) == 1
    assert (scanner.probe.scan.seeds, scanner.probe.scan.memory) == ((5,), "1GiB")
    assert scanner.request.threads == 3
    assert (tmp_path / "runs/x/run.json").exists()
    assert run(["scan", "tiny", "--no-plots", "--fail-level", "error", "--out", "y", "--threads", "1"]) == 0
    assert scanner.request.threads == 1
    assert (tmp_path / "y/run.json").exists()
    assert run(["scan", "qwen3.8-27b", "--no-plots"]) == 1
    assert scanner.probe.scan.seeds == (0,)  # the file says so


@pytest.mark.usefixtures("capsys")
def test_pyproject_says_how_rules_judge_and_options_and_the_probe_overrule_it(scanner, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.propcheck]\nselect = ['PC201', 'PC205']\nignore = ['token-collapse']\n"
        "[tool.propcheck.rules.PC201]\nthreshold = 20\nseverity = 'note'\n[tool.propcheck.rules.PC205]\nseverity = 'note'\n"
    )
    assert run(["scan", "tiny", "--no-plots"]) == 0
    assert (scanner.judged["select"], scanner.judged["ignore"]) == (("PC201", "PC205"), ("token-collapse",))
    assert (scanner.judged["settings"]["PC201"].threshold, scanner.judged["settings"]["PC201"].severity) == (20, "note")
    assert run(["scan", "tiny", "--no-plots", "--select", "PC301", "--set", "rules.PC201.threshold=30"]) == 0
    assert scanner.judged["select"] == ("PC301",)
    assert scanner.judged["settings"]["PC201"].threshold == 30
    assert scanner.judged["settings"]["PC205"].severity == "note"
    (tmp_path / "pyproject.toml").write_text("[tool.propcheck]\nignore = ['PC999']\n")
    assert run(["scan", "tiny", "--no-plots"]) == 2


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[tool.propcheck]\nfail_level = 'note'", "unknown key fail_level; did you mean fail-level?"),
        ("[tool.propcheck]\nmemory = 5", 'memory = 5: must be "auto" or a size with its unit, as in "5GiB" or "800MB"'),
        ("[tool.propcheck]\ndetail = 'row'", 'detail = "row" must be one of "block", "site"'),
        ("[tool.propcheck]\nthreads = 0", "threads = 0 must be an integer >= 1 and <= 1024"),
        ("tool.propcheck = 3", "3 must be a table"),
    ],
)
@pytest.mark.usefixtures("scanner")
def test_a_wrong_pyproject_is_named(tmp_path, capsys, table, said):
    (tmp_path / "pyproject.toml").write_text(table)
    assert run(["scan", "tiny"]) == 2
    assert capsys.readouterr().err == f"propcheck: {tmp_path}/pyproject.toml: [tool.propcheck]: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "missing command; propcheck --help lists them"),
        ("scna tiny", "scna"),
        ("scan", "argument"),
        ("scan tiny --foo", "--foo"),
        ("scan tiny other", "other"),
        ("scan tiny --tokens x", "--tokens"),
        ("scan tiny --tokens 1", "--tokens: inputs.tokens = 1 must be an integer >= 2"),
        ("scan tiny --precision bf17", "bf17"),
        ("scan tiny --seeds 1,x", "--seeds 1,x: must be integers, e.g. 0,1 or 0..4"),
        ("scan tiny --seeds 3..1", "--seeds: scan.seeds = [] must be a list of at least one"),
        ("scan tiny --seeds 0..99999999999", "--seeds 0..99999999999: 0..99999999999 is more than 10000 seeds"),
        ("scan tiny --threads 100000", "--threads"),
        ("scan tiny --memory 5", '--memory: scan.memory = "5": must be "auto" or a size with its unit'),
        ("scan tin", "tin: no such file or bundled probe; did you mean tiny?"),
        ("scan tiny --arg width=3", "--arg width=3: arguments apply to package.module:callable or path/to/file.py:callable"),
        ("scan a.py:f --arg width", "--arg width: must be key=value, as in width=64"),
        ("scan a.py:f --arg a.b=1", "--arg a.b=1: must be key=value, as in width=64"),
        ("scan a.py:f --arg width=[a]", '--arg width=[a]: [a] is not a TOML value; strings in a list need quotes: ["a"]'),
        ("scan gpt2 --tokens 2000", "--tokens: inputs.tokens = 2000 exceeds model.positions = 1024"),
        ("scan tiny --set a\nb", "must be key=value"),
        ("scan tiny --output-format xml", "xml"),
    ],
)
@pytest.mark.usefixtures("scanner")
def test_a_bad_command_line_is_one_line_and_status_2(capsys, arguments, said):
    assert run(arguments.split(" ") if arguments else []) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("propcheck: ")
    assert err.count("\n") == 1
    assert said in err


def test_an_output_directory_that_cannot_be_is_refused_before_the_scan(scanner, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["scan", "tiny", "--out", "file/x"]) == 2
    assert capsys.readouterr().err == f"propcheck: file/x: {tmp_path}/file is not a directory\n"
    assert scanner.probe is None


@pytest.mark.parametrize("options", ["--select PC999", "--ignore PC999", "--set rules.PC999.threshold=1"])
def test_an_unknown_rule_is_refused_before_the_scan(scanner, capsys, options):
    assert run(["scan", "tiny", *options.split()]) == 2
    assert capsys.readouterr().err.startswith("propcheck: unknown rule PC999")
    assert scanner.probe is None


def test_an_interrupted_scan_is_130_and_leaves_nothing(scanner, tmp_path, capsys):
    scanner.raises = KeyboardInterrupt()
    assert run(["scan", "tiny"]) == 130
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_an_unforeseen_error_is_one_line_unless_debugged(scanner, capsys):
    scanner.raises = ZeroDivisionError("division\nby zero")
    assert run(["scan", "tiny"]) == 2
    said = "propcheck: ZeroDivisionError: division by zero"
    assert capsys.readouterr().err == f"{said} (a bug in propcheck; --debug shows the traceback)\n"
    assert run(["scan", "tiny", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(said + "\n")


def test_probes_lists_what_is_bundled(capsys):
    assert run(["probes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gpt2", "llama-7b", "qwen3.8-27b", "qwen3.8-27b-postnorm", "tiny"]
    assert all(len(line) <= 80 for line in lines)


def test_rules_are_listed_and_explained(capsys):
    assert run(["rules"]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["PC201", "explosion"] in [line[:2] for line in listed]
    assert {line[2] for line in listed} <= {"error", "warning", "note"}
    for identifier in ("PC204", "dominant-update"):
        assert run(["rules", identifier]) == 0
        assert capsys.readouterr().out.startswith("## PC204 dominant-update\n")
    assert run(["rules", "PC20"]) == 2
    assert capsys.readouterr().err.startswith("propcheck: unknown rule PC20; did you mean PC2")


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"propcheck {importlib.metadata.version('propcheck')}\n"


def python(code, **options):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, **options)


def test_help_imports_nothing_heavy():
    heavy = {"torch", "numpy", "pandas", "pyarrow", "matplotlib", "transformers", "rich", "propcheck.config.probe"}
    code = (
        f"import sys; from propcheck.cli.app import run; run(['scan', '--help']); sys.exit(str({heavy!r} & set(sys.modules)))"
    )
    assert python(code).stderr == "set()\n"


@pytest.mark.parametrize("arguments", ["--help", "scan --help"])
def test_help_answers_at_once(arguments):
    """Under 0.3 s of processor time, the best of five: what the clock says depends on what else the machine does."""
    seconds = []
    command = [sys.executable, "-m", "propcheck", *arguments.split()]
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.3


@pytest.mark.parametrize(
    ("redirection", "said"), [(">/dev/full", "standard output: No space left on device"), (">&-", "standard output is closed")]
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
def test_standard_output_that_takes_nothing_is_said(redirection, said):
    command = f"{sys.executable} -m propcheck rules {redirection}"
    ended = subprocess.run(["sh", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"propcheck: {said}\n")


@pytest.mark.parametrize("command", ["keys", "--help"])
def test_a_reader_that_has_gone_is_no_error(command):
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "propcheck", command], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert ended.stderr == ""


def test_a_real_scan_from_the_command_line(tmp_path, monkeypatch, capsys):
    """A small decoder, end to end: the numbers that follow from its sizes alone, and the same again the second time."""
    import math

    import pandas as pd

    monkeypatch.chdir(tmp_path)
    small = ["model.layers=4", "model.width=64", "model.ffn.width=96", "model.vocabulary=64", "inputs.tokens=24"]
    options = [part for assignment in small for part in ("--set", assignment)]
    tables = []
    for _ in range(2):
        status = run(["scan", "tiny", *options, "--seeds", "0,1", "--no-plots", "--output-format", "json"])
        document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
        tables.append(pd.read_parquet("reports/tiny/sublayers.parquet"))
    assert status == int(any(one["severity"] == "error" for one in document["findings"]))
    assert document["run"]["model"] | {"parameters": 0, "class": ""} == {
        "class": "",
        "parameters": 0,
        "blocks": 4,
        "sites": 8,
        "width": 64,
        "placement": "pre",
    }
    assert document["loss"]["uniform"] == pytest.approx(math.log(64))
    rows = document["sublayers"]
    assert [(row["seed"], row["site"]) for row in rows] == [(seed, site) for seed in (0, 1) for site in range(8)]
    mixers = ["linear_attention"] * 3 + ["attention"]
    assert [row["sublayer"] for row in rows[:8]] == [kind for mixer in mixers for kind in (mixer, "mlp")]
    for row in rows:
        assert row["sum_norm"] == pytest.approx(row["sum_rms"] * 8, rel=1e-6)  # sqrt(width) = 8
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def test_a_check_of_the_gate_is_explained_like_a_rule(capsys):
    assert run(["rules", "gate-gradient"]) == 0
    assert capsys.readouterr().out.startswith("gate-gradient: A gradient norm differs")
