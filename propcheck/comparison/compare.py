"""Compare runs with the first one: what differs, and where it starts.

Nothing is judged here; whether a change is acceptable is for the gate.
"""

from __future__ import annotations

import dataclasses
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from propcheck.analysis.growth import gradient_growth, stream_growth
from propcheck.analysis.profile import profile, streams
from propcheck.comparison.comparable import mismatches
from propcheck.comparison.differences import compare_numbers
from propcheck.comparison.gate_findings import first_difference
from propcheck.comparison.match_findings import new_and_gone
from propcheck.comparison.match_runs import match_runs
from propcheck.comparison.match_sites import match_sites
from propcheck.comparison.quantities import QUANTITIES
from propcheck.comparison.start import find_start
from propcheck.config.fingerprint import setting_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.comparison.differences import Difference
    from propcheck.comparison.match_parameters import ParameterMatching
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import Finding, Growth, Place, Run, SiteRecord

_SITE_QUANTITIES = tuple(name for name, quantity in QUANTITIES.items() if quantity.noun == "site")


@dataclass(frozen=True, slots=True)
class QuantityChange:
    """One quantity of a run compared with the first run.

    Attributes
    ----------
    quantity
        What was compared.
    compared, differing
        At how many places it was compared, and at how many it is outside the tolerance.
    allowed
        The smallest and the largest factor that is accepted somewhere.
    first, most
        The first difference, in the direction in which the quantity spreads, and the largest; None without any.
    """

    quantity: Quantity
    compared: int
    differing: int
    allowed: tuple[float, float]
    first: Difference | None
    most: Difference | None


@dataclass(frozen=True, slots=True)
class PairwiseComparison:
    """A run compared with the first run.

    Attributes
    ----------
    label
        Letter of the run; the first run is A.
    relative
        Whether blocks were matched by relative depth, since the runs have different numbers of blocks.
    settings
        Keys of the probes that differ: dotted key, value in A, value in this run.
    changes
        One for each quantity that both runs have.
    parameters
        The matched parameters.
    new_findings, gone_findings
        Findings that only this run has, and that only A has; None if one of them has only sites.
    start
        Where the runs start to differ; None if they do not.
    notes
        Sentences about the comparison, such as blocks that only one run has.
    """

    label: str
    relative: bool
    settings: tuple[tuple[str, Any, Any], ...]
    changes: tuple[QuantityChange, ...]
    parameters: ParameterMatching
    new_findings: tuple[Finding, ...] | None
    gone_findings: tuple[Finding, ...] | None
    start: Place | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DepthRow:
    """One block of the run with the fewest blocks, and what corresponds to it in every run.

    Attributes
    ----------
    label
        Number of the block.
    at
        Relative depth, 0 to 1.
    sites
        Corresponding sites of each run; empty if it has none.
    """

    label: int
    at: float
    sites: tuple[tuple[SiteRecord, ...], ...]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Several runs side by side.

    Attributes
    ----------
    runs, labels
        The runs and their letters: A, B, C ...
    contrasts
        Every run but the first, compared with the first.
    rows
        All runs along the depth.
    noun
        What a row is: block or site.
    tolerance
        The default tolerance, as a share.
    """

    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    contrasts: tuple[PairwiseComparison, ...]
    rows: tuple[DepthRow, ...]
    noun: str
    tolerance: float

    @property
    def named(self) -> list[tuple[str, Run]]:
        """Each run with its letter and target, for plots; with its path if another run has the same target."""
        targets = [run.target for run in self.runs]
        names = [f"{run.target}, {run.path}" if run.path and targets.count(run.target) > 1 else run.target for run in self.runs]
        return [(f"{label}: {name}", run) for label, name, run in zip(self.labels, names, self.runs, strict=True)]


def compare(runs: Sequence[Run], tolerances: Tolerances) -> RunComparison:
    """Compare runs with the first one.

    Parameters
    ----------
    runs
        Two or more, with their findings.
    tolerances
        Differences within them do not count.
    """
    labels = tuple(_label(index) for index in range(len(runs)))
    rows, noun = _rows(runs)
    return RunComparison(
        runs=tuple(runs),
        labels=labels,
        contrasts=tuple(
            _compare_with_first(runs[0], run, label, tolerances) for run, label in zip(runs[1:], labels[1:], strict=True)
        ),
        rows=rows,
        noun=noun,
        tolerance=tolerances.share,
    )


def _label(index: int) -> str:
    letters = string.ascii_uppercase
    return letters[index] if index < len(letters) else f"{letters[index // 26 - 1]}{letters[index % 26]}"


def _compare_with_first(first: Run, run: Run, label: str, tolerances: Tolerances) -> PairwiseComparison:
    matched = match_runs(first, run, names=("A", label))
    numbers = compare_numbers(matched, tolerances, _SITE_QUANTITIES)
    # A NaN fails a gate in any case; in a comparison, it is no difference if both runs have it.
    differences = [each for each in numbers.differences if each.kind != "nonfinite" or repr(each.value) != repr(each.baseline)]
    numbers = dataclasses.replace(numbers, differences=tuple(differences))
    sites_only = matched.sites_only
    new, gone = (None, None) if sites_only else new_and_gone(first.findings, run.findings)
    conditions = [mismatch.describe(label) for mismatch in mismatches(run, first, named=True)]
    return PairwiseComparison(
        label=label,
        relative=matched.sites.relative,
        settings=tuple(setting_differences(first.settings, run.settings)) if first.settings and run.settings else (),
        changes=tuple(
            summarize_changes(quantity, numbers.compared[quantity], differences, numbers.allowed)
            for quantity in QUANTITIES
            if numbers.compared.get(quantity)
        ),
        parameters=matched.parameters,
        new_findings=new,
        gone_findings=gone,
        start=find_start(matched, numbers),
        notes=(
            *([f"A has {'; '.join(conditions)}."] if conditions else []),
            *filter(None, [sites_only]),
            *matched.sites.notes,
            *numbers.notes,
        ),
    )


def summarize_changes(
    quantity: Quantity, compared: int, differences: Sequence[Difference], allowed: Mapping[Quantity, tuple[float, float]]
) -> QuantityChange:
    """Summarize the differences of one quantity: how many there are, the first and the largest."""
    changed = [difference for difference in differences if difference.quantity == quantity]
    return QuantityChange(
        quantity=quantity,
        compared=compared,
        differing=len(changed),
        allowed=allowed[quantity],
        first=first_difference(changed) if changed else None,
        most=max(changed, key=lambda difference: difference.size) if changed else None,
    )


def _rows(runs: Sequence[Run]) -> tuple[tuple[DepthRow, ...], str]:
    """Align the runs along the depth of the one with the fewest blocks."""
    profiles = [profile(run) for run in runs]
    shortest = min(profiles, key=lambda each: len(each.units))
    counterparts = [  # by run: its site for each site of the shortest one
        {base.site: other for base, other in match_sites(shortest.sites, each.sites).common} for each in profiles
    ]
    last = max(len(shortest.units) - 1, 1)
    rows = [
        DepthRow(
            label=shortest.label(index),
            at=index / last,
            sites=tuple(tuple(sites[site.site] for site in unit if site.site in sites) for sites in counterparts),
        )
        for index, unit in enumerate(shortest.units)
    ]
    return tuple(rows), shortest.noun


def growths(run: Run) -> tuple[Growth | None, Growth | None]:
    """Return the growth of the stream and of its gradient, for the stream that runs through most blocks."""
    longest = max(streams(run), key=lambda each: len(each.units), default=profile(run))
    return stream_growth(longest), gradient_growth(longest)
