"""Findings as workflow commands of GitHub Actions: annotations on the file that stands for the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.render.results import told

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.records import Finding, Severity
    from propcheck.render.results import Results

_COMMANDS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def to_github(results: Results) -> str:
    """Write one annotation a finding, the worst first as the findings come.

    Parameters
    ----------
    results
        What was found.

    Returns
    -------
    str
        One workflow command a line; empty where nothing was found. Of each kind GitHub shows ten a step beside the code; the
        step's log shows all.
    """
    return "".join(_command(finding, results) + "\n" for finding in results.findings)


def _command(finding: Finding, results: Results) -> str:
    properties = {"title": f"{finding.rule} {finding.name}"}
    if results.location is not None:
        properties = {"file": results.location.file, "line": str(results.location.line), **properties}
    return f"::{_COMMANDS[finding.severity]} {_properties(properties)}::{_data(told(finding))}"


# What GitHub decodes, and nothing else: escapeData and escapeProperty of its own toolkit, packages/core/src/command.ts in
# github.com/actions/toolkit.
def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _properties(values: Mapping[str, str]) -> str:
    return ",".join(f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in values.items())
