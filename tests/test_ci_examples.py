"""The files of examples/ci do what they say, as far as that shows without the services that they are for.

Their commands are run in a copy of the examples, on the model as it is and on one that was broken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

import propcheck
from propcheck.comparison import gate as gating
from propcheck.config.probe import load_probe
from propcheck.config.tolerances import Tolerances
from propcheck.records.baseline import read_baseline
from propcheck.render.baseline_summary import baseline_summary

ROOT = Path(__file__).parents[1]
CI = ROOT / "examples" / "ci"
WORKFLOW = yaml.safe_load((CI / "github-actions.yml").read_text(encoding="utf-8"))
# The residual projections are no longer scaled by the depth: each update is x2.83 = sqrt(2 x 4 layers) what it was.
SCALED, UNSCALED = "std=0.02 / math.sqrt(2 * layers)", "std=0.02"


def ignored(_, names):
    return [name for name in names if name == "__pycache__"]


@pytest.fixture
def checkout(tmp_path):
    """A repository that holds the examples alone."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=ignored)
    return folder


def broken(checkout):
    file = checkout / "examples" / "nanogpt.py"
    text = file.read_text()
    assert text.count(SCALED) == 1
    file.write_text(text.replace(SCALED, UNSCALED))


def shell(command, folder, **environment):
    """Run a command as a job would: its propcheck, nothing of this process's settings."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PATH": path, **quiet, **who, **environment},
    )


def git(folder, *arguments):
    done = shell(["git", *arguments], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(job):
    return {step["name"]: step for step in WORKFLOW["jobs"][job]["steps"] if "name" in step}


def run_step(job, name, checkout):
    """Run the `run:` of a step as a runner does: a shell that stops at the first failure, a summary file of the step's own."""
    summary = checkout.parent / "summary"
    done = shell(["bash", "-e", "-c", steps(job)[name]["run"]], checkout, **WORKFLOW["env"], GITHUB_STEP_SUMMARY=str(summary))
    return done, summary


def test_the_baseline_is_of_the_probe_beside_it_and_its_summary_is_fresh():
    run, probe = read_baseline(CI / "baselines" / "model.parquet"), load_probe(str(CI / "model.toml"))
    assert run.seeds == tuple(probe.scan.seeds) == (0, 1, 2, 3, 4)
    assert run.target == "examples/ci/model.toml"
    assert (CI / "baselines" / "model.md").read_text() == baseline_summary(run)
    assert sum(file.stat().st_size for file in (CI / "baselines").iterdir()) < 50_000


def test_the_workflow_is_whole():
    # PyYAML reads the key `on` as true, as YAML 1.1 has it.
    assert set(WORKFLOW[True]) == {"push", "pull_request", "workflow_dispatch"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {name: (ROOT / path).exists() for name, path in WORKFLOW["env"].items() if name != "PROPCHECK"} == {
        "PROBE": True,
        "BASELINE": True,
    }
    assert re.fullmatch(r"propcheck @ git\+https://\S+@COMMIT", WORKFLOW["env"]["PROPCHECK"])
    jobs = WORKFLOW["jobs"]
    # The two jobs shut each other out, and the input that they ask for is there.
    asked = "inputs.update-baseline"
    assert [jobs[name]["if"] for name in ("gate", "update-baseline")] == [f"${{{{ !{asked} }}}}", f"${{{{ {asked} }}}}"]
    assert WORKFLOW[True]["workflow_dispatch"]["inputs"]["update-baseline"]["type"] == "boolean"
    assert jobs["gate"]["permissions"] == {"contents": "read", "security-events": "write", "actions": "read"}
    assert jobs["update-baseline"]["permissions"] == {"contents": "write"}
    for job in jobs.values():
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        assert 0 < job["timeout-minutes"] <= 30
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"[\w-]+/[\w/-]+@v\d+", step.get("uses", "a/b@v1"))
            # What an expression puts into a script is run by the shell, whoever wrote it: variables take it there instead.
            assert "${{" not in step.get("run", "")


def test_what_is_installed_is_what_the_baseline_was_made_with():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    expected = [
        f"python -m pip install torch=={pins['torch']} --index-url https://download.pytorch.org/whl/cpu",
        'python -m pip install "$PROPCHECK"',
    ]
    for job in WORKFLOW["jobs"]:
        assert steps(job)["Install"]["run"].splitlines() == expected
    made = read_baseline(CI / "baselines" / "model.parquet").versions
    assert (made["torch"].partition("+")[0], made["propcheck"]) == (pins["torch"], propcheck.__version__)


def test_the_committed_baseline_is_what_its_own_command_writes(checkout):
    """The target too; of the numbers the last digits, which are the processor's."""
    place = checkout / "examples" / "ci" / "baselines" / "model.parquet"
    before = read_baseline(place)
    command = ["propcheck", "gate", "examples/ci/model.toml", "--baseline", str(place), "--update-baseline", "--no-plots", "-q"]
    done = shell(command, checkout)
    assert done.returncode == 0, done.stderr
    after = read_baseline(place)
    assert (after.settings, after.target, after.inputs, after.seeds) == (
        before.settings,
        before.target,
        before.inputs,
        before.seeds,
    )
    assert [one.update_rms for one in after.sites] == pytest.approx([one.update_rms for one in before.sites], rel=1e-5)


def test_reports_are_taken_from_where_the_gate_writes_them_also_when_it_fails():
    gate = steps("gate")
    written = re.findall(r"--out(?:put)? (propcheck-gate/\S+)", gate["Gate"]["run"])
    taken = {step["with"].get("path") or step["with"]["sarif_file"] for step in gate.values() if "with" in step}
    assert taken == {"propcheck-gate/run", "propcheck-gate/junit.xml", "propcheck-gate/results.sarif"}
    assert taken < set(written)
    after = list(gate)[list(gate).index("Gate") + 1 :]
    assert len(after) == 4
    for name in after:
        assert "!cancelled()" in gate[name]["if"] or "failure()" in gate[name]["if"]
        (file,) = re.findall(r"hashFiles\('(.*?)'\)", gate[name]["if"])  # status 2 writes none
        assert any(file.startswith(one) for one in written)


def test_the_workflow_passes_on_the_model_as_it_is(checkout):
    done, _ = run_step("gate", "Gate", checkout)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    files = {path.name for path in (checkout / "propcheck-gate").iterdir()}
    assert files == {"run", "summary.md", "junit.xml", "results.sarif"}
    assert (checkout / "propcheck-gate" / "run" / "run.json").exists()
    summary = checkout.parent / "summary"
    summary.write_text("of another command\n")
    done, _ = run_step("gate", "Job summary", checkout)
    assert done.returncode == 0
    before, _, mine = summary.read_text().partition("\n")
    assert before == "of another command"
    assert mine.startswith("## propcheck gate: examples/ci/model.toml passed\n")


def test_the_workflow_fails_on_a_broken_model_and_annotates_the_probe(checkout):
    broken(checkout)
    done, _ = run_step("gate", "Gate", checkout)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    assert lines
    assert len(lines) + done.stdout.count("::notice ") + done.stdout.count("::warning ") == len(done.stdout.splitlines())
    assert all(line.startswith("::error file=examples/ci/model.toml,line=1,title=gate-") for line in lines)
    # Every update is larger, the first one too; the stream is from the first sum on.
    (update,) = [line for line in lines if "(update_rms)" in line]
    assert "at 8 of 8 sites" in update
    assert "First at site 0 (attention of block 0, h.0.attn)" in update
    assert "x2.83" in update
    folder = checkout / "propcheck-gate"
    assert r"The change starts at h.0.attn.c\_proj.weight" in (folder / "summary.md").read_text()
    assert len(ET.parse(folder / "junit.xml").findall(".//failure")) == len(
        {line.split("title=")[1].split()[0] for line in lines}
    )
    assert len(json.loads((folder / "results.sarif").read_text())["runs"][0]["results"]) == len(done.stdout.splitlines())


def test_the_other_job_makes_the_baseline_again_and_pushes_it(checkout, tmp_path):
    git(tmp_path, "init", "-q", "--bare", "remote")
    git(checkout, "init", "-q", "-b", "main")
    git(checkout, "remote", "add", "origin", str(tmp_path / "remote"))
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    git(checkout, "push", "-q", "-u", "origin", "main")
    broken(checkout)
    git(checkout, "commit", "-q", "-a", "-m", "meant")
    for name in ("Make the baseline again", "Job summary", "Commit"):
        done, summary = run_step("update-baseline", name, checkout)
        assert done.returncode == 0, done.stderr
    assert "Baseline written: " in summary.read_text()
    assert " changed by more than the tolerance." in summary.read_text()
    pushed = git(tmp_path / "remote", "log", "-1", "--format=%s", "--name-only", "main").split("\n\n")
    assert pushed[0] == "Make the propcheck baseline again"
    assert pushed[1].split() == ["examples/ci/baselines/model.md", "examples/ci/baselines/model.parquet"]
    # Nothing to commit is no failure.
    done, _ = run_step("update-baseline", "Commit", checkout)
    assert done.returncode == 0, done.stderr


def test_the_shell_version_passes_the_status_on_and_says_what_it_means(checkout):
    script = ["sh", "examples/ci/gate.sh", "--no-plots"]
    done = shell(script, checkout)
    assert done.returncode == 0, done.stderr
    assert "Gate passed: " in done.stdout
    assert "gate.sh" not in done.stderr
    broken(checkout)
    done = shell(script, checkout, REPORTS="elsewhere")
    assert done.returncode == 1
    assert "The change starts at h.0.attn.c_proj.weight" in " ".join(done.stdout.split())
    assert done.stderr.splitlines()[-1].endswith(
        "if that is meant: sh examples/ci/gate.sh --update-baseline, and commit both files"
    )
    assert {path.name for path in (checkout / "elsewhere").iterdir()} == {"run", "summary.md", "junit.xml", "results.sarif"}


def test_a_broken_baseline_is_no_regression(checkout):
    baseline = checkout / "examples" / "ci" / "baselines" / "model.parquet"
    baseline.write_bytes(baseline.read_bytes()[:1000])
    done = shell(["sh", "examples/ci/gate.sh"], checkout)
    assert (done.returncode, done.stdout) == (2, "")
    said, meant = done.stderr.splitlines()
    assert said.startswith("propcheck: examples/ci/baselines/model.parquet: ")
    assert "--update-baseline" in said
    assert meant.startswith("gate.sh: nothing was judged; the line of propcheck above says why (no baseline yet: ")
    assert not (checkout / "propcheck-gate").exists()


def hook():
    (repository,) = yaml.safe_load((CI / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    return repository, hook


def test_the_pre_commit_hook_is_what_the_framework_asks_for():
    # https://pre-commit.com/#repository-local-hooks: a local hook has id, name, entry, language, and files or types.
    repository, one = hook()
    assert repository == {"repo": "local", "hooks": [one]}
    assert {"id", "name", "entry", "language", "files", "pass_filenames"} == set(one)
    # language: script runs a file of the repository, so it is there and may be run.
    assert one["language"] == "script"
    assert os.access(ROOT / one["entry"], os.X_OK)
    assert one["pass_filenames"] is False
    gated = ["examples/nanogpt.py", "examples/ci/model.toml", "examples/ci/baselines/model.parquet"]
    others = ["README.md", "examples/vit.py", "examples/ci/README.md", "propcheck/nanogpt.py"]
    assert [bool(re.search(one["files"], name)) for name in gated + others] == [True] * 3 + [False] * 4
    (paths,) = re.findall(r"^model='(.*)'$", (ROOT / one["entry"]).read_text(), re.MULTILINE)
    assert all(any(name == path or name.startswith(f"{path}/") for path in paths.split()) for name in gated)


def test_the_pre_commit_hook_judges_what_is_staged(checkout):
    entry = hook()[1]["entry"]
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "first")
    # Nothing of the model: no scan, in no time. Not even a propcheck is needed.
    (checkout / "README.md").write_text("new")
    git(checkout, "add", "README.md")
    done = shell([str(checkout / entry)], checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # The broken model is in the working tree only, the one that is staged has a comment more.
    file = checkout / "examples" / "nanogpt.py"
    file.write_text(file.read_text() + "# a comment\n")
    git(checkout, "add", ".")
    broken(checkout)
    done = shell([str(checkout / entry)], checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    git(checkout, "add", ".")
    done = shell([str(checkout / entry)], checkout / "examples")
    assert done.returncode == 1
    assert "The change starts at h.0.attn.c_proj.weight" in " ".join(done.stdout.split())
    assert git(checkout, "status", "--porcelain").split("\n")[:-1] == ["A  README.md", "M  examples/nanogpt.py"]  # no more


def test_the_test_suite_of_the_example_passes_and_fails(checkout):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "examples/ci/test_model.py"]
    done = shell(command, checkout)
    assert done.returncode == 0, done.stdout
    broken(checkout)
    done = shell(command, checkout)
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "error gate-stream " in done.stdout


def test_the_page_gives_the_tolerances_that_five_seeds_have_here():
    text = " ".join((CI / "README.md").read_text().split())
    shown = re.search(r"x([\d.]+) to x([\d.]+) for updates, x([\d.]+) to x([\d.]+) for the gradients of a branch", text)
    run = read_baseline(CI / "baselines" / "model.parquet")
    # The values of each seed stand in for other draws of the one before, under other names.
    after = dict(zip(run.seeds, (*run.seeds[1:], run.seeds[0]), strict=True))
    sites = tuple(dataclasses.replace(site, seed=after[site.seed]) for site in run.sites)
    renamed = tuple(dataclasses.replace(one, name=f"x.{one.name}") for one in run.parameters)
    found = gating.gate(dataclasses.replace(run, sites=sites, parameters=renamed), run, Tolerances())
    assert found.passed
    for quantity, expected in (("update_rms", shown.groups()[:2]), ("param_grad_norm", shown.groups()[2:])):
        assert found.allowed[quantity] == pytest.approx([float(one) for one in expected], abs=0.006)


def test_the_page_names_every_file_of_the_example():
    text = (CI / "README.md").read_text()
    for name in (path.name for path in CI.iterdir() if path.name not in ("README.md", "__pycache__")):
        assert f"({name})" in text or f"({name}/model.md)" in text, name
