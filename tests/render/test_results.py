"""Results of a scan, and the file that annotations point at."""

import dataclasses
import sys

import pytest
from hostile import CHECKS, finding, results
from synthetic import factors, run_of

from propcheck import rules
from propcheck.errors import PropcheckError
from propcheck.render.results import full_text, scan_results
from propcheck.render.source_location import Location, location_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_scan_has_a_check_for_each_rule_that_was_judged():
    run = run_of(factors(64, forward=1.1))
    run = dataclasses.replace(run, findings=rules.judge(run))
    found = scan_results(run, ("error",), location=None)
    assert (found.command, found.subject, found.seconds, found.findings) == ("scan", "synthetic", 12.5, run.findings)
    assert [check.id for check in found.checks] == [rule.id for rule in rules.ALL]
    check = next(check for check in found.checks if check.id == "PC301")
    assert (check.name, check.severity) == ("exploding-gradient", rules.find("PC301").severity)
    assert check.help == rules.explain("PC301")
    assert "Findings: 1 error, 0 warnings, 0 notes." in found.facts


def test_rules_that_were_left_out_are_no_checks():
    run = run_of(factors(4))
    ids = [check.id for check in scan_results(run, (), location=None, select=["PC201", "vanishing-gradient"]).checks]
    assert ids == ["PC201", "PC302"]
    ids = [check.id for check in scan_results(run, (), location=None, select=["PC201", "PC302"], ignore=["PC201"]).checks]
    assert ids == ["PC302"]
    with pytest.raises(PropcheckError, match="unknown rule PC9"):
        scan_results(run, (), location=None, select=["PC9"])


def test_a_finding_of_no_check_is_refused():
    with pytest.raises(ValueError, match="findings without a check: X9"):
        results([finding("X9")])
    with pytest.raises(ValueError, match="two checks have the same id"):
        results([], checks=(*CHECKS, CHECKS[0]))


def test_a_finding_is_told_with_what_follows_from_it():
    assert full_text(finding()) == "It grows.\nScale it."
    assert full_text(finding(also=("PC302 at 41 sites", "PC205 at 1 site"))) == (
        "It grows.\nScale it.\nAlso: PC302 at 41 sites, PC205 at 1 site."
    )


def test_a_probe_file_and_a_config_are_their_own_place(folder):
    (folder / "my probes").mkdir()
    (folder / "my probes/a.toml").touch()
    (folder / "llama").mkdir()
    (folder / "llama/config.json").touch()
    assert location_of("my probes/a.toml") == Location("my probes/a.toml", 1)
    assert location_of(str(folder / "my probes/a.toml")) == Location("my probes/a.toml", 1)
    assert location_of("./my probes/../llama/config.json") == Location("llama/config.json", 1)
    assert location_of("llama") == location_of("llama/") == Location("llama/config.json", 1)


CODE = '''
"""A module."""
from other import elsewhere


class Model:
    def build(self): ...


@cache
def build(
    layers=2,
):
    def nested(): ...


if True:
    def build(layers=3): ...
else:
    late = lambda: 1

try:
    typed: object = build
except ImportError:
    async def rescued(): ...
'''


@pytest.mark.parametrize(
    ("name", "line"),
    [("Model", 6), ("build", 18), ("late", 20), ("typed", 23), ("rescued", 25), ("elsewhere", 1), ("nested", 1)],
)
def test_a_callable_is_where_it_is_defined(folder, name, line):
    (folder / "pkg/sub").mkdir(parents=True)
    for file in ("model.py", "pkg/sub/model.py"):
        (folder / file).write_text(CODE)
    assert location_of(f"model.py:{name}") == Location("model.py", line)
    assert location_of(f"{folder}/pkg/sub/model.py:{name}") == Location("pkg/sub/model.py", line)
    assert location_of(f"pkg.sub.model:{name}") == Location("pkg/sub/model.py", line)
    assert "pkg.sub.model" not in sys.modules


def test_a_package_is_its_init_and_may_lie_where_python_looks(folder, monkeypatch):
    (folder / "src/pkg").mkdir(parents=True)
    (folder / "src/pkg/__init__.py").write_text("\ndef build(): ...\n")
    assert location_of("pkg:build") is None
    monkeypatch.syspath_prepend(str(folder / "src"))
    assert location_of("pkg:build") == Location("src/pkg/__init__.py", 2)


def test_what_is_not_below_the_working_directory_has_no_place(folder, monkeypatch):
    (folder / "work").mkdir()
    (folder / "a.toml").touch()
    (folder / "m.py").write_text("def build(): ...\n")
    installed = folder / "work/.venv/site-packages"
    installed.mkdir(parents=True)
    (installed / "installed.py").write_text("def build(): ...\n")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.chdir(folder / "work")
    targets = (
        "../a.toml",
        "../m.py:build",
        "nowhere.toml",
        "nowhere.py:f",
        "json:loads",
        "tiny",
        "installed:build",
        "a b:c",
        ".:x",
        "",
    )
    assert {target: location_of(target) for target in targets} == dict.fromkeys(targets)


def test_a_file_that_is_no_python_has_a_first_line(folder):
    (folder / "broken.py").write_text("def (:\n")
    (folder / "latin.py").write_bytes(b"x = '\xff'\n")
    assert location_of("broken.py:f") == Location("broken.py", 1)
    assert location_of("latin.py:x") == Location("latin.py", 1)


def test_a_bundled_probe_is_a_file_only_in_a_checkout(monkeypatch):
    from propcheck.config.resolve import bundled_probes

    path = bundled_probes()["tiny"]
    monkeypatch.chdir(path.parent.parent)
    assert location_of("tiny") == Location("probes/tiny.toml", 1)
