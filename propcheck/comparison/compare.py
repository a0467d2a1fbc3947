"""What differs between runs, and where it starts: each run beside the first one.

Nothing is judged here: the numbers and the first place at which they part. Whether a change is allowed is for a gate.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from propcheck.analysis import profile as depth
from propcheck.analysis.growth import gradient_growth, stream_growth
from propcheck.comparison.comparable import refusals, sites_alone
from propcheck.comparison.differences import BACKWARD, Deviations
from propcheck.comparison.gate_findings import first_of, size_of, won_and_lost
from propcheck.comparison.match_parameters import pair_parameters
from propcheck.comparison.match_sites import pair_sites
from propcheck.comparison.places import first_change
from propcheck.config.fingerprint import setting_differences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.comparison.differences import Difference
    from propcheck.comparison.match_parameters import ParameterPairing
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import Finding, Growth, Place, Run, SiteRecord

# In the order in which a table shows them.
COMPARED: tuple[Quantity, ...] = (
    "stream_rms",
    "update_rms",
    "update_ratio",
    *BACKWARD,
    "parameter_rms",
    "grad_norm",
    "loss",
)


@dataclass(frozen=True, slots=True)
class Change:
    """One quantity of a run beside that of the first run.

    Attributes
    ----------
    quantity
        What it is.
    compared, differing
        In how many places it was compared, and in how many it lies outside the tolerance.
    allowed
        The smallest and the largest factor that counts as no difference somewhere.
    first, most
        Where it first differs, in the direction in which it travels, and where most; None where it does not.
    """

    quantity: Quantity
    compared: int
    differing: int
    allowed: tuple[float, float]
    first: Difference | None
    most: Difference | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """One run beside the first.

    Attributes
    ----------
    label
        Of the run; the first is A.
    relative
        Whether blocks were matched by relative depth, as there are not as many.
    settings
        Keys of the probes that differ: dotted key, value in A, value here.
    changes
        One for each quantity that both have.
    parameters
        Which parameters belong together.
    won, lost
        Findings that only this run has, and that only A has; None where one of the two is sites alone.
    start
        Where the two part; None where no place differs.
    notes
        Sentences: which blocks or sublayers one of the two lacks, and how it was compared.
    """

    label: str
    relative: bool
    settings: tuple[tuple[str, Any, Any], ...]
    changes: tuple[Change, ...]
    parameters: ParameterPairing
    won: tuple[Finding, ...] | None
    lost: tuple[Finding, ...] | None
    start: Place | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One block (``unit`` of the run with the fewest) with what each run has there, in the order of the runs.

    ``sites`` are the sites of a run that belong to it, () where it lacks them; ``at`` is the relative depth, 0 to 1.
    """

    label: int
    at: float
    sites: tuple[tuple[SiteRecord, ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs side by side.

    Attributes
    ----------
    runs, labels
        The runs and what they are called: A, B, C ...
    contrasts
        One for each run but the first.
    rows
        Block by block.
    noun
        What a row is: block or site.
    tolerance
        The share by which a number must differ to count.
    """

    runs: tuple[Run, ...]
    labels: tuple[str, ...]
    contrasts: tuple[Contrast, ...]
    rows: tuple[Row, ...]
    noun: str
    tolerance: float

    @property
    def named(self) -> list[tuple[str, Run]]:
        """Each run with its label and target, as pictures name it; with its path where several have one target."""
        targets = [run.target for run in self.runs]
        names = [f"{run.target}, {run.path}" if run.path and targets.count(run.target) > 1 else run.target for run in self.runs]
        return [(f"{label}: {name}", run) for label, name, run in zip(self.labels, names, self.runs, strict=True)]


def compare(runs: Sequence[Run], tolerances: Tolerances) -> Comparison:
    """Set runs side by side.

    Parameters
    ----------
    runs
        Two or more, with their findings. The first is what the others are held against.
    tolerances
        From which difference on a number counts as changed.
    """
    labels = tuple(_label(index) for index in range(len(runs)))
    rows, noun = _rows(runs)
    return Comparison(
        runs=tuple(runs),
        labels=labels,
        contrasts=tuple(_contrast(runs[0], run, label, tolerances) for run, label in zip(runs[1:], labels[1:], strict=True)),
        rows=rows,
        noun=noun,
        tolerance=tolerances.share,
    )


def _label(index: int) -> str:
    letters = string.ascii_uppercase
    return letters[index] if index < len(letters) else f"{letters[index // 26 - 1]}{letters[index % 26]}"


def _contrast(first: Run, run: Run, label: str, tolerances: Tolerances) -> Contrast:
    profiles = (depth.profile(first), depth.profile(run))
    sites = pair_sites(profiles[0].sites, profiles[1].sites, names=("A", label))
    alone = sites_alone(first, run)
    parameters = pair_parameters(*((), ()) if alone else (first.parameters, run.parameters), sites.pairs)
    columns = [quantity for quantity in COMPARED if quantity not in ("parameter_rms", "grad_norm", "loss")]
    deviations = Deviations(run, first, tolerances, sites, parameters, columns)
    # To a gate a NaN is a failure wherever it is; beside one that has it too it is no difference.
    deviations.found = [one for one in deviations.found if one.how != "nonfinite" or repr(one.value) != repr(one.baseline)]
    won, lost = (None, None) if alone else won_and_lost(first.findings, run.findings)
    return Contrast(
        label=label,
        relative=sites.relative,
        settings=tuple(setting_differences(first.settings, run.settings)) if first.settings and run.settings else (),
        changes=tuple(
            change(quantity, deviations.compared[quantity], deviations.found, deviations.allowed)
            for quantity in COMPARED
            if deviations.compared[quantity]
        ),
        parameters=parameters,
        won=won,
        lost=lost,
        start=first_change(deviations, sites.pairs, (*parameters.missing, *parameters.new)),
        notes=(*_other_runs(run, first, label), *([alone] if alone else []), *sites.notes, *deviations.notes),
    )


def _other_runs(run: Run, first: Run, label: str) -> list[str]:
    """Say what a table of settings does not: in which ways two runs saw other things."""
    differing = refusals(run, first, named=True)
    return [f"A has {'; '.join(differing).replace('(here ', f'({label} ')}."] if differing else []


def change(
    quantity: Quantity, compared: int, differences: Sequence[Difference], allowed: Mapping[Quantity, tuple[float, float]]
) -> Change:
    """Sum up a quantity: where it first differs and where most."""
    found = [one for one in differences if one.quantity == quantity]
    return Change(
        quantity=quantity,
        compared=compared,
        differing=len(found),
        allowed=allowed[quantity],
        first=first_of(found) if found else None,
        most=max(found, key=size_of) if found else None,
    )


def _rows(runs: Sequence[Run]) -> tuple[tuple[Row, ...], str]:
    """Lay the runs along the depth of the one with the fewest blocks."""
    profiles = [depth.profile(run) for run in runs]
    shortest = min(profiles, key=lambda one: len(one.units))
    beside: list[dict[int, SiteRecord]] = []  # by run: the site that belongs to one of the shortest
    for one in profiles:
        pairs = pair_sites(shortest.sites, one.sites).pairs
        beside.append({pair.base.site: pair.other for pair in pairs if pair.base is not None and pair.other is not None})
    last = max(len(shortest.units) - 1, 1)
    rows = [
        Row(
            label=shortest.label(index),
            at=index / last,
            sites=tuple(tuple(found[r.site] for r in unit if r.site in found) for found in beside),
        )
        for index, unit in enumerate(shortest.units)
    ]
    return tuple(rows), shortest.noun


def growths(run: Run) -> tuple[Growth | None, Growth | None]:
    """Return by which law the stream of a run grows and its gradient: of the stream that runs through most blocks."""
    curve = max(depth.streams(run), key=lambda one: len(one.units), default=depth.profile(run))
    return stream_growth(curve), gradient_growth(curve)
