"""The pages made from code are fresh, and everything that a user can type has help."""

from __future__ import annotations

import runpy
import typing
from pathlib import Path

import pytest
import typer.main

from propcheck.cli.app import app
from propcheck.comparison.gate_findings import CHECKS
from propcheck.config.decoder import Placement
from propcheck.config.probe import Probe
from propcheck.config.pyproject import ToolSettings
from propcheck.config.schema_docs import tables
from propcheck.config.tolerances import Gated

DOCS = Path(__file__).parents[1] / "docs"


def commands():
    group = typer.main.get_command(app)
    return [("propcheck", group), *group.commands.items()]


@pytest.mark.parametrize("name", ["cli.md", "probe-keys.md"])
def test_a_generated_page_is_fresh(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    pages = runpy.run_path(str(DOCS / "reference.py"))["pages"]()
    assert (DOCS / name).read_text(encoding="utf-8") == pages[name], "run `make docs`"


@pytest.mark.parametrize(("name", "command"), commands())
def test_every_command_and_option_has_help(name, command):
    assert command.help, name
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_the_page_of_the_gate_has_every_check_and_every_quantity():
    text = (DOCS / "gate.md").read_text(encoding="utf-8")
    for check, says in CHECKS.items():
        assert f"| `{check}` | {says} |" in text
    for quantity in typing.get_args(Gated):
        assert f"`{quantity}`" in text


@pytest.mark.parametrize("schema", [Probe, ToolSettings])
def test_every_key_has_a_description(schema):
    for table in tables(schema):
        assert table.description or not table.name, table.name
        for key in table.keys:
            assert key.description.endswith("."), key.name


def test_the_glossary_has_every_placement():
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    for placement in typing.get_args(Placement):
        assert f"\n| `{placement}`" in text
