"""Results of a command for machine-readable formats: its checks, its findings, and a file for annotations to point at.

The GitHub, JUnit and SARIF renderers take nothing else, so scan, compare and gate look the same there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck import rules
from propcheck.render.summary import summary_lines

if TYPE_CHECKING:
    from collections.abc import Collection

    from propcheck.records import Finding, Run, Severity
    from propcheck.render.source_location import Location

Command = Literal["scan", "compare", "gate"]


@dataclass(frozen=True, slots=True)
class Check:
    """A rule or another check that was made, with or without findings.

    Attributes
    ----------
    id, name
        ``PC201``, ``explosion``.
    severity
        Default severity; a finding may have another.
    summary
        One or two sentences of plain text.
    help
        Markdown.
    """

    id: str
    name: str
    severity: Severity
    summary: str
    help: str


@dataclass(frozen=True, slots=True)
class Results:
    """The checks and findings of one command.

    Parameters
    ----------
    command
        The command.
    subject
        The target, as the user named it.
    location
        File for annotations to point at; None if the target has none below the working directory.
    checks
        All checks, each id once.
    findings
        Findings, each of one of the checks.
    failing
        Severities that give exit status 1.
    facts
        Sentences of the summary.
    seconds
        Wall time; None if unknown.

    Raises
    ------
    ValueError
        If a finding belongs to no check, or two checks have the same id.
    """

    command: Command
    subject: str
    location: Location | None
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    failing: tuple[Severity, ...]
    facts: tuple[str, ...] = ()
    seconds: float | None = None

    def __post_init__(self) -> None:
        ids = [check.id for check in self.checks]
        if len(set(ids)) < len(ids):
            raise ValueError(f"two checks have the same id: {', '.join(ids)}")
        if unknown := sorted({finding.rule for finding in self.findings} - set(ids)):
            raise ValueError(f"findings without a check: {', '.join(unknown)}")


def scan_results(
    run: Run,
    failing: tuple[Severity, ...],
    *,
    location: Location | None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Results:
    """Return the results of a scan.

    Parameters
    ----------
    run
        The run, with its findings.
    failing
        Severities that give exit status 1.
    location
        :func:`propcheck.render.source_location.location_of` of ``run.target``.
    select, ignore
        Rules selected and ignored in :func:`propcheck.rules.judge`.
    """
    return Results(
        command="scan",
        subject=run.target,
        location=location,
        checks=tuple(rule_check(rule) for rule in rules.chosen(select, ignore)),
        findings=run.findings,
        failing=failing,
        facts=tuple(summary_lines(run)),
        seconds=run.engine.wall_seconds,
    )


def rule_check(rule: rules.Rule) -> Check:
    """Return the check of a rule."""
    return Check(id=rule.id, name=rule.name, severity=rule.severity, summary=rule.sees, help=rules.explain(rule.id))


def full_text(finding: Finding) -> str:
    """Return the message, remedy and consequences of a finding as plain text."""
    also = f"\nAlso: {', '.join(finding.also)}." if finding.also else ""
    return f"{finding.message}\n{finding.remedy}{also}"
