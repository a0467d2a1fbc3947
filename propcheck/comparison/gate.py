"""Judge a run by its baseline: every number within its tolerance, the same sites and parameters, no new finding.

A failure is a :class:`propcheck.records.Finding`, one for each quantity; :attr:`GateResult.differences` has every number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.variants import settings_note
from propcheck.comparison.comparable import environment_mismatches
from propcheck.comparison.differences import compare_numbers
from propcheck.comparison.gate_findings import change_findings, nonfinite_findings, rule_findings, structure_findings
from propcheck.comparison.match_runs import match_runs
from propcheck.comparison.start import find_start
from propcheck.config.fingerprint import setting_differences
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.comparison.differences import Difference
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import Finding, Place, Run


@dataclass(frozen=True, slots=True)
class GateResult:
    """The verdict of a gate.

    Attributes
    ----------
    run, baseline
        What was compared.
    findings
        Errors fail the gate; notes do not.
    differences
        Every number outside its tolerance.
    start
        Where the change starts; None if nothing changed, or nothing that has a place.
    compared
        How many values of each quantity were compared.
    tolerance
        The default tolerance, as a share.
    allowed
        The smallest and the largest factor that is accepted somewhere, for each quantity.
    versions
        Versions, device and threads that differ; they explain the last digits.
    notes
        Sentences about the comparison.
    written
        The baseline file, if it was written instead of being compared with.
    """

    run: Run
    baseline: Run
    findings: tuple[Finding, ...]
    differences: tuple[Difference, ...]
    start: Place | None
    compared: Mapping[Quantity, int]
    tolerance: float
    allowed: Mapping[Quantity, tuple[float, float]]
    versions: tuple[str, ...]
    notes: tuple[str, ...]
    written: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(finding.severity == "error" for finding in self.findings)


def gate(run: Run, baseline: Run, tolerances: Tolerances) -> GateResult:
    """Compare a run with its baseline.

    Parameters
    ----------
    run
        The run to judge, with its findings.
    baseline
        The expected run. :func:`propcheck.comparison.comparable.check_comparable` checks that the two can be compared.
    tolerances
        By how much numbers may differ.
    """
    matched = match_runs(baseline, run, names=("the baseline", "this run"), by_number=True)
    numbers = compare_numbers(matched, tolerances)
    findings = [
        *nonfinite_findings(numbers.differences),
        *structure_findings(matched.sites, matched.parameters),
        *change_findings(numbers.differences, numbers.compared),
    ]
    if not matched.sites_only:
        # Wider tolerances of single quantities and modules do not excuse a new finding.
        findings += rule_findings(
            baseline.findings, run.findings, lambda metric: max(1 + tolerances.share, numbers.chance_of(metric))
        )
    return GateResult(
        run=run,
        baseline=baseline,
        findings=tuple(findings),
        differences=numbers.differences,
        start=find_start(matched, numbers),
        compared=dict(numbers.compared),
        tolerance=tolerances.share,
        allowed=numbers.allowed,
        versions=tuple(environment_mismatches(run, baseline)),
        notes=(*filter(None, [matched.sites_only]), *_setting_notes(run, baseline), *numbers.notes),
    )


def _setting_notes(run: Run, baseline: Run) -> list[str]:
    """Name the keys of the probe that differ: most often they are the change."""
    changed = setting_differences(run.settings, baseline.settings) if run.settings and baseline.settings else []
    return [settings_note("the baseline", changed)] if changed else []


def check_fit(itself: GateResult) -> None:
    """Check that a run can be a baseline.

    Parameters
    ----------
    itself
        The gate of the run with itself as its baseline.

    Raises
    ------
    PropcheckError
        The run has a NaN or an infinity, so it would fail against itself.
    """
    if not itself.passed:
        raise PropcheckError(
            f"{itself.baseline.path}: not written, because a run with NaN or infinity cannot be a baseline. "
            f"{itself.findings[0].message}"
        )
