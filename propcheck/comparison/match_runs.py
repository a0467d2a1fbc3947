"""Match everything of two runs that is compared: their sites and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.profile import profile
from propcheck.comparison.comparable import sites_only
from propcheck.comparison.match_parameters import match_parameters
from propcheck.comparison.match_sites import match_sites

if TYPE_CHECKING:
    from propcheck.comparison.match_parameters import ParameterMatching
    from propcheck.comparison.match_sites import SiteMatching
    from propcheck.records import Run


@dataclass(frozen=True, slots=True)
class MatchedRuns:
    """Two runs, their matched sites and their matched parameters; none of the latter if a run has only sites."""

    baseline: Run
    run: Run
    sites: SiteMatching
    parameters: ParameterMatching

    @property
    def sites_only(self) -> str | None:
        """A note if findings, parameters and loss cannot be compared."""
        return sites_only(self.baseline, self.run)


def match_runs(baseline: Run, run: Run, *, names: tuple[str, str], by_number: bool = False) -> MatchedRuns:
    """Match two runs.

    Parameters
    ----------
    baseline, run
        The two runs.
    names
        Their names in notes.
    by_number
        See :func:`propcheck.comparison.match_sites.match_sites`.
    """
    sites = match_sites(profile(baseline).sites, profile(run).sites, by_number=by_number, names=names)
    parameters = ((), ()) if sites_only(baseline, run) else (baseline.parameters, run.parameters)
    return MatchedRuns(baseline, run, sites, match_parameters(*parameters, sites.pairs))
