"""Whether a run is as its baseline was: every number two-sided and within a tolerance, and the same findings.

A failure is a :class:`propcheck.records.Finding`, as a scan's is: one for each quantity, which says where the change starts.
The single numbers are in :attr:`Gate.differences`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis import profile as depth
from propcheck.analysis.variants import settings_note
from propcheck.comparison import gate_findings as findings
from propcheck.comparison.comparable import other_machine, sites_alone
from propcheck.comparison.differences import Deviations
from propcheck.comparison.match_parameters import pair_parameters
from propcheck.comparison.match_sites import pair_sites
from propcheck.comparison.places import first_change
from propcheck.config.fingerprint import setting_differences
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.comparison.differences import Difference
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import Finding, Place, Run


@dataclass(frozen=True, slots=True)
class Gate:
    """What a gate says.

    Attributes
    ----------
    run, baseline
        What was compared.
    findings
        Errors fail the gate; notes do not.
    differences
        Every number outside its tolerance.
    start
        Where the change begins; None where nothing changed or no place is known.
    compared
        How many values of each quantity were compared.
    tolerance
        The share that passes where no other is given.
    allowed
        Of each quantity the smallest and the largest factor that passes somewhere.
    versions
        What else is not as it was: libraries, device, threads. It explains the last digits.
    notes
        Sentences about the comparison.
    written
        The baseline file that was written in place of judging by it.
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


def gate(run: Run, baseline: Run, tolerances: Tolerances) -> Gate:
    """Compare a run with its baseline.

    Parameters
    ----------
    run
        The run to judge, with its findings.
    baseline
        The run that it should be like. Whether the two can be compared, :func:`propcheck.comparison.comparable.refusals` says.
    tolerances
        What may differ.
    """
    both = (depth.profile(baseline).sites, depth.profile(run).sites)
    sites = pair_sites(*both, by_number=True, names=("the baseline", "this run"))
    alone = sites_alone(baseline, run)
    parameters = pair_parameters(*((), ()) if alone else (baseline.parameters, run.parameters), sites.pairs)
    deviations = Deviations(run, baseline, tolerances, sites, parameters)
    return Gate(
        run=run,
        baseline=baseline,
        findings=(
            *findings.nonfinite(deviations.found),
            *findings.structure(sites.pairs, parameters, sites.notes),
            *findings.changed(deviations.found, deviations.compared),
            *([] if alone else findings.finding_set(baseline.findings, run.findings, deviations.by_chance)),
        ),
        differences=tuple(deviations.found),
        start=first_change(deviations, sites.pairs, (*parameters.missing, *parameters.new)),
        compared=dict(deviations.compared),
        tolerance=tolerances.share,
        allowed=deviations.allowed,
        versions=tuple(other_machine(run, baseline)),
        notes=(*([alone] if alone else []), *_other_settings(run, baseline), *deviations.notes),
    )


def _other_settings(run: Run, baseline: Run) -> list[str]:
    """Say which keys of the probe differ: most often they are the change."""
    found = setting_differences(run.settings, baseline.settings) if run.settings and baseline.settings else []
    return [settings_note("the baseline", found)] if found else []


def check_fit(itself: Gate) -> None:
    """Refuse a run as a baseline that would not pass beside itself: it has a NaN or an infinity.

    Parameters
    ----------
    itself
        The gate of a run with itself as its baseline.
    """
    if not itself.passed:
        raise PropcheckError(f"{itself.baseline.path}: not written, since the run is no baseline. {itself.findings[0].message}")
