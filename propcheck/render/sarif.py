"""Results as a SARIF 2.1.0 log for code scanning services.

Standard: https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/sarif-v2.1.0-errata01-os-complete.html
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from propcheck import __version__
from propcheck.records.document import dumps
from propcheck.render.results import full_text

if TYPE_CHECKING:
    from propcheck.records import Finding, Place
    from propcheck.render.results import Check, Results
    from propcheck.render.source_location import Location

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def to_sarif(results: Results) -> str:
    """Write a SARIF log of one run.

    Parameters
    ----------
    results
        Results of a command.

    Returns
    -------
    str
        Strict JSON without a final newline; a non-finite number is the string "NaN", "Infinity" or "-Infinity". Facts and
        failing severities are properties of the run, and the place of a finding is a property of its result.
    """
    index = {check.id: position for position, check in enumerate(results.checks)}
    fingerprints = _fingerprints(results)
    run = {
        "tool": {"driver": {"name": "propcheck", "version": __version__, "rules": [_rule(check) for check in results.checks]}},
        # The part before the last slash distinguishes the logs of one commit: each target is an analysis of its own.
        "automationDetails": {"id": f"propcheck/{results.command}/{results.subject}/"},
        "columnKind": "unicodeCodePoints",
        "results": [
            _result(finding, index[finding.rule], results.location, fingerprint)
            for finding, fingerprint in zip(results.findings, fingerprints, strict=True)
        ],
        "properties": {"facts": list(results.facts), "failing": list(results.failing), "seconds": results.seconds},
    }
    return dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "name": check.name,
        "shortDescription": _message(check.name.replace("-", " ").capitalize()),
        "fullDescription": _message(check.summary),
        "help": {**_message(check.help.replace("**", "")), "markdown": _braced(check.help)},
        "defaultConfiguration": {"level": check.severity},
    }


def _result(finding: Finding, rule: int, location: Location | None, fingerprint: str) -> dict[str, Any]:
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": _message(full_text(finding)),
        # GitHub refuses a log with a location that has no file: "expected a physical location".
        **({} if location is None else {"locations": [_location(location, finding.site)]}),
        # GitHub uses only the second. If it is missing, the upload hashes the text of the line, which is the same for all
        # findings of a file (github.com/github/codeql issue 6367, github.com/microsoft/sarif-sdk pull request 2985).
        "partialFingerprints": {"propcheckFinding/v1": fingerprint, "primaryLocationLineHash": fingerprint},
        "properties": {
            "metric": finding.metric,
            "value": finding.value,
            "expected": finding.expected,
            "place": None if finding.site is None else dataclasses.asdict(finding.site),
            "source": finding.source,
        },
    }


def _location(location: Location, place: Place | None) -> dict[str, Any]:
    physical = {
        # A relative reference: it cannot contain a space, and a colon would end a scheme.
        "artifactLocation": {"uri": quote(os.fsencode(location.file)), "uriBaseId": "%SRCROOT%"},
        "region": {"startLine": location.line},
    }
    logical = _logical(place) if place is not None else []
    return {"physicalLocation": physical, **({"logicalLocations": logical} if logical else {})}


def _logical(place: Place) -> list[dict[str, str]]:
    """Return the parts of a place, the outermost first."""
    parts = (
        ("block", None if place.block is None else f"block {place.block}"),
        ("sublayer", place.sublayer),
        ("site", None if place.site is None else f"site {place.site}"),
        ("module", place.module),
        ("parameter", place.parameter),
    )
    return [{"kind": kind, "name": name, "fullyQualifiedName": name} for kind, name in parts if name]


def _fingerprints(results: Results) -> list[str]:
    """Identify each finding by what is stable between runs: rule, metric and place, but not values and wording."""
    seen: dict[str, int] = {}
    fingerprints = []
    for finding in results.findings:
        place = None if finding.site is None else dataclasses.asdict(finding.site)
        key = json.dumps([results.command, results.subject, finding.rule, finding.metric, place])
        seen[key] = seen.get(key, 0) + 1
        fingerprints.append(hashlib.sha256(f"{key}:{seen[key]}".encode()).hexdigest())
    return fingerprints


def _message(text: str) -> dict[str, str]:
    return {"text": _braced(text)}


def _braced(text: str) -> str:
    """Escape braces, which would start a placeholder (section 3.11.5)."""
    return text.replace("{", "{{").replace("}", "}}")
