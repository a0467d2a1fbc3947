"""The command line and the Python functions give the same documents for the same request, defaults included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import propcheck
from propcheck.api.options import SCAN_OPTIONS
from propcheck.cli.app import run
from propcheck.records.store import read_run
from propcheck.render.comparison_json import comparison_to_json, gate_to_json
from propcheck.render.json import to_json
from propcheck.render.terminal.sweep_table import sweep_json
from propcheck.testing import assert_healthy

PROBE = """
base = "tiny"
[model]
layers = 2
width = 32
vocabulary = 50
[init]
embedding_std = 0.0001
[inputs]
tokens = 8
"""

DEFAULTS = """
[tool.propcheck]
seeds = [3, 4]
ignore = ["PC1"]
threads = 1
fail-level = "warning"
[tool.propcheck.rules.PC205]
severity = "error"
[tool.propcheck.gate]
tolerance = "10%"
[tool.propcheck.gate.quantities]
loss = "20%"
"""

# Of a run these alone depend on when, where and how it was made.
VOLATILE = {"wall_seconds", "peak_rss_bytes", "memory_budget_bytes", "path"}


@pytest.fixture(autouse=True, params=["", DEFAULTS], ids=["no pyproject", "pyproject"])
def defaults(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(PROBE)
    Path("wide.toml").write_text(PROBE.replace("0.0001", "1.0"))
    Path("pyproject.toml").write_text(request.param)
    return request.param


def comparable(document):
    """Return a document without what depends on the occasion."""
    if isinstance(document, dict):
        return {key: comparable(value) for key, value in document.items() if key not in VOLATILE}
    return [comparable(item) for item in document] if isinstance(document, list) else document


@pytest.fixture
def typed(capsys):
    """Run a command line; return its status and its JSON document."""

    def typed(*arguments):
        status = run([*arguments, "--output-format", "json", "--no-plots", "-q"])
        return status, comparable(json.loads(capsys.readouterr().out))

    return typed


def called(text):
    return comparable(json.loads(text))


def test_a_scan(typed, defaults):
    status, document = typed("scan", "small.toml", "--set", "inputs.exponent=1.5", "--batch", "2")
    result = propcheck.scan("small.toml", set={"inputs.exponent": 1.5}, batch=2)
    assert called(to_json(result.record)) == document
    stored = read_run(Path("reports/small"))
    assert (result.record.config_hash, result.record.settings) == (stored.config_hash, stored.settings)
    assert result.notes == stored.notes
    assert any(note.startswith("Same settings as tiny, except ") for note in result.notes)
    assert document["run"]["seeds"] == ([3, 4] if defaults else [0])
    severities = {finding["rule"]: finding["severity"] for finding in document["findings"]}
    assert severities["PC205"] == ("error" if defaults else "warning")
    assert any(rule.startswith("PC1") for rule in severities) is not bool(defaults)
    assert status == int(bool(defaults))


def test_a_family_of_rules_is_selected(typed):
    _, document = typed("scan", "small.toml", "--select", "PC1,PC2", "--ignore", "pc1")
    result = propcheck.scan("small.toml", select=["PC1", "PC2"], ignore="pc1")
    assert called(to_json(result.record)) == document
    assert {finding["rule"][:3] for finding in document["findings"]} == {"PC2"}


def test_a_comparison(typed):
    _, document = typed("compare", "small.toml", "wide.toml", "--tokens", "9")
    result = propcheck.compare("small.toml", "wide.toml", tokens=9)
    assert called(comparison_to_json(result.record)) == document


def test_a_gate(typed, defaults):
    propcheck.scan("small.toml").save_baseline("small.parquet")
    for target, options, arguments in (
        ("small.toml", {}, []),
        ("small.toml", {"set": {"init.std": 0.5}}, ["--set", "init.std=0.5"]),
        ("wide.toml", {"force": True, "tolerance": {"loss": "1%"}}, ["--force", "--tolerance", "loss=1%"]),
    ):
        status, document = typed("gate", target, "--baseline", "small.parquet", *arguments)
        result = propcheck.gate(target, "small.parquet", **options)
        assert called(gate_to_json(result.record)) == document
        assert status == int(not result.passed)
        assert document["tolerance"] == (0.1 if defaults else 0.05)


def test_a_sweep(typed, tmp_path):
    status, document = typed("sweep", "small.toml", "--vary", "model.layers=1,0", "--vary", "residual.placement=pre,post")
    result = propcheck.sweep(
        "small.toml", vary={"model.layers": [1, 0], "residual.placement": ["pre", "post"]}, out=tmp_path / "cells"
    )
    own = called(sweep_json(result.record))
    for cell in (*own["cells"], *document["cells"]):
        reason = cell.pop("reason")  # it names the option of its front
        assert (reason is None) is (cell["status"] == "scanned")
        assert reason is None or "model.layers = 0 must be an integer >= 1" in reason
    assert own == document
    assert [cell.status for cell in result.cells] == ["scanned", "scanned", "failed", "failed"]
    assert status == 1


def test_assert_healthy_fails_by_the_fail_level_of_the_project(defaults):
    if defaults:
        with pytest.raises(AssertionError, match="at or above warning"):
            assert_healthy("small.toml")
    else:
        assert_healthy("small.toml")


def test_a_wrong_pyproject_is_refused_by_both(capsys):
    Path("pyproject.toml").write_text("[tool.propcheck]\nselect = ['PC9']\n")
    assert run(["scan", "small.toml"]) == 2
    said = capsys.readouterr().err.strip().removeprefix("propcheck: ")
    with pytest.raises(propcheck.PropcheckError) as refused:
        propcheck.scan("small.toml")
    assert str(refused.value) == said
    assert said.startswith("unknown rule PC9")


def test_both_fronts_have_the_options_of_the_table(capsys):
    import inspect

    keywords = [name for name in inspect.signature(propcheck.scan).parameters if name != "target"]
    assert sorted(keywords) == sorted(option.name for option in SCAN_OPTIONS)
    for command in ("scan", "compare", "gate", "sweep"):
        run([command, "--help"])
        text = capsys.readouterr().out
        assert all(f"{option.typed} " in text for option in SCAN_OPTIONS)
    for call in (
        lambda: propcheck.compare("small.toml", "wide.toml", tokns=1),
        lambda: propcheck.gate("small.toml", "wide.toml", tokns=1),
        lambda: propcheck.sweep("small.toml", vary={"model.layers": [1]}, tokns=1),
    ):
        with pytest.raises(TypeError, match="unexpected option 'tokns'"):
            call()
