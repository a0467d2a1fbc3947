"""Results as a JUnit report: one test case per check, which fails if it has a finding of a failing severity."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from propcheck.formatting import count
from propcheck.render.results import full_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Finding
    from propcheck.render.results import Check, Results

# Characters that XML 1.0 cannot represent, escaped or not (the production Char).
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(results: Results) -> str:
    """Write a JUnit report.

    Parameters
    ----------
    results
        Results of a command.

    Returns
    -------
    str
        An XML document with one suite. Findings that do not fail are in the ``system-out`` of their test case, the facts in
        that of the suite. ``time`` is in seconds, and left out if unknown.
    """
    cases = [_case(check, results) for check in results.checks]
    failures = sum(case.find("failure") is not None for case in cases)
    title = f"propcheck {results.command} {results.subject}"
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0"}
    if results.seconds is not None:
        counts["time"] = f"{results.seconds:.3f}"
    root = _element("testsuites", {"name": "propcheck", **counts})
    suite = _element("testsuite", {"name": title, **counts, "skipped": "0"})
    root.append(suite)
    suite.extend(cases)
    if results.facts:
        suite.append(_element("system-out", text="\n".join(results.facts)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(check: Check, results: Results) -> ET.Element:
    findings = [finding for finding in results.findings if finding.rule == check.id]
    failing = [finding for finding in findings if finding.severity in results.failing]
    others = [finding for finding in findings if finding.severity not in results.failing]
    # Viewers group test cases by package and class, split at the dots of classname.
    attributes = {"name": f"{check.id} {check.name}", "classname": f"propcheck.{results.command}"}
    if results.location is not None:
        attributes |= {"file": results.location.file, "line": str(results.location.line)}
    case = _element("testcase", attributes)
    if failing:
        # Only one failure element: some viewers hide or refuse several.
        rest = f" (and {count(len(failing) - 1, 'finding')} more)" if len(failing) > 1 else ""
        summary = {"message": failing[0].message + rest, "type": failing[0].severity}
        case.append(_element("failure", summary, _text(failing)))
    if others:
        case.append(_element("system-out", text=_text(others)))
    return case


def _text(findings: Sequence[Finding]) -> str:
    return "\n\n".join(f"{finding.severity}: {full_text(finding)}" for finding in findings)


def _element(tag: str, attributes: dict[str, str] | None = None, text: str | None = None) -> ET.Element:
    element = ET.Element(tag, {key: _allowed(value) for key, value in (attributes or {}).items()})
    element.text = None if text is None else _allowed(text)
    return element


def _allowed(text: str) -> str:
    return _FORBIDDEN.sub("", text)
