"""Depth profile of a run: the median over seeds of each site, the blocks in order, and the factor of each block.

Rules judge these curves and views print them, so "the factor per block" is defined here once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from propcheck.records import Run, SiteRecord
from propcheck.records.columns import float_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Curves are judged over the blocks after the first quarter of the depth. Before it even a healthy additive stream climbs
# steeply, by an amount that depends on the scale of the embedding alone.
SKIPPED_SHARE = 0.25
# Of those blocks, this share with the most extreme factors is left out, so that one or two jumps are not taken for compounding:
# a jump is a discontinuity (PC205).
TRIMMED_SHARE = 0.1
# Placements with a norm on the stream itself, after the addition.
NORM_ON_STREAM = frozenset({"post", "deepnorm", "pre+post", "sandwich+post", "reordered+post"})


def cached(
    function: Callable[Concatenate[Run, _Parameters], _Result],
) -> Callable[Concatenate[Run, _Parameters], _Result]:
    """Compute a function of a run once per run and arguments, and keep the result in ``Run.derived``."""

    @functools.wraps(function)
    def wrapper(run: Run, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        key = (function, args, tuple(kwargs.items()))
        if key not in run.derived:
            run.derived[key] = function(run, *args, **kwargs)
        result: _Result = run.derived[key]
        return result

    return wrapper


@dataclass(frozen=True, slots=True)
class Profile:
    """The sites of one stream or model in forward order, one record per site.

    Attributes
    ----------
    sites
        The sites; with several seeds, their medians.
    units
        The sites of each block. A site outside the blocks is a unit of its own, and so is every site if no site has a block.
    noun
        What a unit is: "block", or "site" if no site has a block.
    """

    sites: tuple[SiteRecord, ...]
    units: tuple[tuple[SiteRecord, ...], ...]
    noun: str

    def label(self, unit: int) -> int:
        """Return the number of a unit as the user knows it: its block, or its site."""
        first = self.units[unit][0]
        return first.site if first.block is None else first.block


@cached
def profile(run: Run, seed: int | None = None) -> Profile:
    """Arrange all sites of a run along the depth.

    Parameters
    ----------
    run
        The run.
    seed
        Seed to take; by default the median over the seeds of each value. Only finite values enter the median: a value that is
        finite for no seed stays NaN or infinite, and one that no seed observed stays None. ``nonfinite`` is the largest count.
    """
    return _profile(run.sites, seed)


@cached
def streams(run: Run, seed: int | None = None) -> tuple[Profile, ...]:
    """Return one profile per stream of a run: encoder and decoder, stages of a vision model, halves of a reversible one.

    A run whose sites do not record which sum they continue has one stream.

    Parameters
    ----------
    run
        The run.
    seed
        As for :func:`profile`.
    """
    start: dict[int, int] = {}  # site -> first site of its stream
    for rows in additions(run.sites):
        continued = rows[0].continues
        for row in rows:
            start.setdefault(row.site, rows[0].site if continued is None else start.get(continued, continued))
    if all(record.continues is None for record in run.sites):
        start = dict.fromkeys(start, 0)
    by_start: dict[int, list[SiteRecord]] = {}
    for record in run.sites:
        by_start.setdefault(start[record.site], []).append(record)
    return tuple(_profile(by_start[first], seed) for first in sorted(by_start))


def _profile(records: Sequence[SiteRecord], seed: int | None) -> Profile:
    by_site: dict[int, list[SiteRecord]] = {}
    for record in records:
        if seed is None or record.seed == seed:
            by_site.setdefault(record.site, []).append(record)
    sites = tuple(_median_record(by_site[site]) for site in sorted(by_site))
    if all(record.block is None for record in sites):
        return Profile(sites, tuple((record,) for record in sites), "site")
    units: list[tuple[SiteRecord, ...]] = []
    for block, group in itertools.groupby(sites, key=lambda record: record.block):
        members = tuple(group)
        units.extend([(record,) for record in members] if block is None else [members])
    return Profile(sites, tuple(units), "block")


def additions(sites: Sequence[SiteRecord]) -> list[tuple[SiteRecord, ...]]:
    """Group the rows of each addition: the updates of a parallel block share one stream and one sum.

    Parameters
    ----------
    sites
        Sites in order. If none records which sum it continues, each is an addition of its own.
    """
    groups: list[tuple[SiteRecord, ...]] = []
    recorded = any(record.continues is not None for record in sites)
    for record in sites:
        if recorded and groups and _same_addition(groups[-1][0], record):
            groups[-1] = (*groups[-1], record)
        else:
            groups.append((record,))
    return groups


def _same_addition(first: SiteRecord, second: SiteRecord) -> bool:
    return first.stream_rms is not None and all(
        getattr(first, name) == getattr(second, name) for name in ("seed", "continues", "block", "stream_rms", "sum_rms")
    )


def _median_record(records: Sequence[SiteRecord]) -> SiteRecord:
    if len(records) == 1:
        return records[0]
    values = {name: median([getattr(record, name) for record in records]) for name in float_columns(SiteRecord)}
    counts = [record.nonfinite for record in records if record.nonfinite is not None]
    return dataclasses.replace(records[0], nonfinite=max(counts) if counts else None, **values)  # type: ignore[arg-type]


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the finite values; without any, the first observed value; else None."""
    observed = [value for value in values if value is not None]
    finite = [value for value in observed if math.isfinite(value)]
    if finite:
        return statistics.median(finite)
    return observed[0] if observed else None


def log_ratio(value: float | None, reference: float | None) -> float | None:
    """Return ln(value / reference), or None unless both are positive and finite."""
    if value is None or reference is None or not (0 < value < math.inf and 0 < reference < math.inf):
        return None
    return math.log(value) - math.log(reference)


def safe_exp(value: float) -> float:
    """Return e^value, infinite if that overflows."""
    return math.inf if value > 709 else math.exp(value)


def unit_sums(curve: Profile) -> list[float | None]:
    """Return the RMS of the stream after each unit: ``sum_rms`` of its last site."""
    return [unit[-1].sum_rms for unit in curve.units]


def unit_gradients(curve: Profile) -> list[float | None]:
    """Return the gradient norm of the stream before each unit and after the last; length units + 1.

    The last entry is the gradient of the last sum. With a norm after each addition (``NORM_ON_STREAM``) it is None, since it
    lies on the other side of a norm than the others.
    """
    gradients = [unit[0].grad_stream_norm for unit in curve.units]
    last = curve.sites[-1] if curve.sites else None
    after = None if last is None or last.placement in NORM_ON_STREAM else last.grad_sum_norm
    return [*gradients, after]


def stream_steps(curve: Profile) -> dict[int, float]:
    """Return the natural log of the factor by which each unit but the first scales the stream, by unit index."""
    sums = unit_sums(curve)
    steps = {unit: log_ratio(sums[unit], sums[unit - 1]) for unit in range(1, len(sums))}
    return {unit: step for unit, step in steps.items() if step is not None}


def gradient_steps(curve: Profile) -> dict[int, float]:
    """Return the natural log of the factor by which each unit scales the gradient going backward, by unit index."""
    gradients = unit_gradients(curve)
    steps = {unit: log_ratio(gradients[unit], gradients[unit + 1]) for unit in range(len(gradients) - 1)}
    return {unit: step for unit, step in steps.items() if step is not None}


@dataclass(frozen=True, slots=True)
class Compounding:
    """The average factor per block and what it compounds to over the depth.

    Attributes
    ----------
    factor
        Geometric mean factor of the ``kept`` units.
    compounded
        ``factor`` ** units.
    kept
        Indices of the units that are averaged.
    """

    factor: float
    compounded: float
    kept: tuple[int, ...]


def compounding(steps: Mapping[int, float], units: int, *, rising: bool) -> Compounding | None:
    """Average the factors of the blocks after the first quarter, without the most extreme tenth.

    Parameters
    ----------
    steps
        Log factor by unit index.
    units
        Number of units of the model, observed or not: the depth over which the factor compounds.
    rising
        Whether to leave out the largest factors (to judge growth) or the smallest (to judge decay).

    Returns
    -------
    Compounding or None
        None if fewer than two factors remain, which show no trend.

    Notes
    -----
    For a power law, value ~ depth^p, the compounded factor is 4^(4p/3) at any depth: 2.52 for p = 1/2, 6.35 for p = 1.
    For an exponential it is r^n.
    """
    window = [unit for unit in sorted(steps) if unit >= units * SKIPPED_SHARE]
    trimmed = math.ceil(len(window) * TRIMMED_SHARE)
    ordered = sorted(window, key=lambda unit: steps[unit], reverse=rising)
    kept = tuple(sorted(ordered[trimmed:]))
    if len(kept) < 2:
        return None
    mean = statistics.fmean(steps[unit] for unit in kept)
    return Compounding(safe_exp(mean), safe_exp(mean * units), kept)
