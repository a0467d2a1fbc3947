"""Findings as annotations for GitHub Actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.render.results import full_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.records import Finding, Severity
    from propcheck.render.results import Results

_COMMANDS: dict[Severity, str] = {"error": "error", "warning": "warning", "note": "notice"}


def to_github(results: Results) -> str:
    """Write one annotation per finding, in the order of the findings.

    Parameters
    ----------
    results
        Results of a command.

    Returns
    -------
    str
        One workflow command per line; empty without findings. GitHub shows ten annotations of each kind per step next to the
        code, and all of them in the log.
    """
    return "".join(_command(finding, results) + "\n" for finding in results.findings)


def _command(finding: Finding, results: Results) -> str:
    properties = {"title": f"{finding.rule} {finding.name}"}
    if results.location is not None:
        properties = {"file": results.location.file, "line": str(results.location.line), **properties}
    return f"::{_COMMANDS[finding.severity]} {_properties(properties)}::{_data(full_text(finding))}"


# Escapes exactly what GitHub decodes: escapeData and escapeProperty in packages/core/src/command.ts of
# github.com/actions/toolkit.
def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _properties(values: Mapping[str, str]) -> str:
    return ",".join(f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in values.items())
