"""What one command found, in the form that machines read: the checks that were made and the findings, with a file to point at.

The renderers for GitHub, JUnit and SARIF know this and nothing else, so that scan, compare and gate look alike there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck import rules
from propcheck.analysis import profile as depth
from propcheck.render.terminal.run_table import summary_lines

if TYPE_CHECKING:
    from collections.abc import Collection

    from propcheck.records import Finding, Run, Severity
    from propcheck.render.source_location import Location

Command = Literal["scan", "compare", "gate"]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that was judged, whether it found anything or not.

    ``severity`` is the default one; a finding may have another. ``summary`` is plain text of a sentence or two, ``help`` is
    Markdown.
    """

    id: str
    name: str
    severity: Severity
    summary: str
    help: str


@dataclass(frozen=True, slots=True)
class Results:
    """What one command judged and found.

    Parameters
    ----------
    command
        The command.
    subject
        What was judged, as the user named it.
    location
        The file that stands for it, which annotations point at; None where there is none below the working directory.
    checks
        Everything that was judged, each id once.
    findings
        What was found, each by one of the checks.
    failing
        The severities that give status 1.
    facts
        Sentences that sum it up.
    seconds
        Wall time; None where it is not known.

    Raises
    ------
    ValueError
        A finding is of no check: it would be in no test case and of no rule.
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
        known = [check.id for check in self.checks]
        if len(set(known)) < len(known):
            raise ValueError(f"a check is there twice: {', '.join(known)}")
        if unknown := sorted({finding.rule for finding in self.findings} - set(known)):
            raise ValueError(f"findings of no check: {', '.join(unknown)}")


def scan_results(
    run: Run,
    failing: tuple[Severity, ...],
    *,
    location: Location | None,
    select: Collection[str] = (),
    ignore: Collection[str] = (),
) -> Results:
    """Give the results of a scan.

    Parameters
    ----------
    run
        The run, with its findings.
    failing
        The severities that give status 1.
    location
        As :func:`propcheck.render.source_location.location_of` gives it for ``run.target``.
    select, ignore
        As they were given to :func:`propcheck.rules.judge`.
    """
    return Results(
        command="scan",
        subject=run.target,
        location=location,
        checks=tuple(rule_check(rule) for rule in rules.chosen(select, ignore)),
        findings=run.findings,
        failing=failing,
        facts=tuple(summary_lines(run, depth.profile(run))),
        seconds=run.engine.wall_seconds,
    )


def rule_check(rule: rules.Rule) -> Check:
    """Give a rule as a check."""
    return Check(id=rule.id, name=rule.name, severity=rule.severity, summary=rule.sees, help=rules.explain(rule.id))


def told(finding: Finding) -> str:
    """Say all that a finding says, in plain text: what and where, what to do, and what follows from it."""
    also = f"\nAlso: {', '.join(finding.also)}." if finding.also else ""
    return f"{finding.message}\n{finding.remedy}{also}"
