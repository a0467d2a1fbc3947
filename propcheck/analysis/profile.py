"""A run along its depth: the median over seeds of each site, the blocks in order, and the factor of each block.

Rules judge these curves and views print them; both must mean the same by "the factor per block", so it is defined here.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.records import Run, SiteRecord
from propcheck.records.columns import float_columns

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VALUES = float_columns(SiteRecord)

# Curves are judged over the blocks after the first quarter of the depth: before it even a healthy additive stream climbs
# steeply, by an amount that only the scale of the embedding decides.
SKIPPED_SHARE = 0.25
# Of those blocks, this share with the most extreme factors is left out, so that one or two jumps are not taken for
# compounding: a jump is a discontinuity (PC205).
TRIMMED_SHARE = 0.1
# Placements with a norm on the stream itself, after the addition.
NORM_ON_STREAM = frozenset({"post", "deepnorm", "pre+post", "sandwich+post", "reordered+post"})


@dataclass(frozen=True, slots=True)
class Profile:
    """The sites of one model in forward order, one record a site.

    ``units`` groups them into blocks; where the scan could not tell blocks (no site has one), every site is a unit of its
    own. ``noun`` is "block" or "site" accordingly.
    """

    sites: tuple[SiteRecord, ...]
    units: tuple[tuple[SiteRecord, ...], ...]
    noun: str

    def label(self, unit: int) -> int:
        """Give the number under which the user knows a unit: its block, or its site."""
        first = self.units[unit][0]
        return first.site if first.block is None else first.block


def profile(run: Run, seed: int | None = None) -> Profile:
    """Arrange a run's sites along the depth.

    Parameters
    ----------
    run
        The run.
    seed
        Take this seed alone; by default the median over seeds of each value. The median is over the finite values; where a
        value is finite in no seed it stays NaN or infinite, where no seed observed it ``None``. ``nonfinite`` is the largest
        count.
    """
    by_site: dict[int, list[SiteRecord]] = {}
    for record in run.sites:
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


def streams(run: Run, seed: int | None = None) -> list[Profile]:
    """Arrange each stream of a run by itself: encoder and decoder, stages of a vision model, halves of a reversible one.

    Runs that do not say which sum a site continues (from before that was recorded) have one.
    """
    first: dict[int, int] = {}  # by site: the site at which its stream begins
    for rows in additions(run.sites):
        before = rows[0].continues
        for row in rows:
            first.setdefault(row.site, rows[0].site if before is None else first.get(before, before))
    if all(record.continues is None for record in run.sites):
        first = dict.fromkeys(first, 0)
    begins = sorted(set(first.values()))
    return [
        profile(dataclasses.replace(run, sites=tuple(r for r in run.sites if first[r.site] == begin)), seed) for begin in begins
    ]


def additions(sites: Sequence[SiteRecord]) -> list[tuple[SiteRecord, ...]]:
    """Put together the rows of each addition: the updates of a parallel block have one stream and one sum.

    Parameters
    ----------
    sites
        Of one seed, in order. Where none says what it continues (as before that was recorded), each is an addition of its own.
    """
    found: list[tuple[SiteRecord, ...]] = []
    told = any(record.continues is not None for record in sites)
    for record in sites:
        if told and found and _same_addition(found[-1][0], record):
            found[-1] = (*found[-1], record)
        else:
            found.append((record,))
    return found


def _same_addition(one: SiteRecord, other: SiteRecord) -> bool:
    return one.stream_rms is not None and all(
        getattr(one, name) == getattr(other, name) for name in ("seed", "continues", "block", "stream_rms", "sum_rms")
    )


def _median_record(records: Sequence[SiteRecord]) -> SiteRecord:
    if len(records) == 1:
        return records[0]
    values: dict[str, float | None] = {name: median([getattr(r, name) for r in records]) for name in _VALUES}
    counts = [r.nonfinite for r in records if r.nonfinite is not None]
    return dataclasses.replace(records[0], nonfinite=max(counts) if counts else None, **values)  # type: ignore[arg-type]


def median(values: Sequence[float | None]) -> float | None:
    """Median of the finite values; else the first that was observed; else ``None``."""
    observed = [v for v in values if v is not None]
    finite = [v for v in observed if math.isfinite(v)]
    if finite:
        return statistics.median(finite)
    return observed[0] if observed else None


def log_ratio(above: float | None, below: float | None) -> float | None:
    """Give ln(above / below), or ``None`` unless both are positive and finite."""
    if above is None or below is None or not (0 < above < math.inf and 0 < below < math.inf):
        return None
    return math.log(above) - math.log(below)


def safe_exp(value: float) -> float:
    """Give e^value, infinite where that overflows."""
    return math.inf if value > 709 else math.exp(value)


def unit_sums(curve: Profile) -> list[float | None]:
    """RMS of the stream after each block: ``sum_rms`` of its last site. Length: units."""
    return [unit[-1].sum_rms for unit in curve.units]


def unit_gradients(curve: Profile) -> list[float | None]:
    """Norm of the gradient of the stream before each block, and after the last. Length: units + 1.

    The last entry is the gradient of the last sum; it is ``None`` where a norm follows each addition (``NORM_ON_STREAM``),
    since it then lies on the other side of a norm than the others.
    """
    gradients = [unit[0].grad_stream_norm for unit in curve.units]
    last = curve.sites[-1] if curve.sites else None
    after = None if last is None or last.placement in NORM_ON_STREAM else last.grad_sum_norm
    return [*gradients, after]


def stream_steps(curve: Profile) -> dict[int, float]:
    """Natural log of the factor by which each block but the first scales the stream, by unit index."""
    sums = unit_sums(curve)
    steps = {j: log_ratio(sums[j], sums[j - 1]) for j in range(1, len(sums))}
    return {j: step for j, step in steps.items() if step is not None}


def gradient_steps(curve: Profile) -> dict[int, float]:
    """Natural log of the factor by which each block scales the gradient on its way back, by unit index."""
    gradients = unit_gradients(curve)
    steps = {j: log_ratio(gradients[j], gradients[j + 1]) for j in range(len(gradients) - 1)}
    return {j: step for j, step in steps.items() if step is not None}


@dataclass(frozen=True, slots=True)
class Compounding:
    """What a block does on average, and what that makes over the whole depth.

    ``factor`` is the geometric mean over ``kept`` (unit indices), ``compounded`` is factor ** blocks.
    """

    factor: float
    compounded: float
    kept: tuple[int, ...]


def compounding(steps: Mapping[int, float], units: int, *, rising: bool) -> Compounding | None:
    """Average the blocks' factors after the first quarter, without the most extreme tenth.

    Parameters
    ----------
    steps
        Log factor by unit index.
    units
        Units in the model, observed or not: what the factor is compounded over.
    rising
        Leave out the largest factors (to judge growth), else the smallest (to judge decay).

    Returns
    -------
    Compounding or None
        ``None`` where fewer than two factors are left: nothing can be said of a trend.

    Notes
    -----
    For a power law, value ~ depth^p, the compounded factor is 4^(4p/3) at any depth: 2.52 for p = 1/2, 6.35 for p = 1.
    For an exponential it is r^n.
    """
    window = [j for j in sorted(steps) if j >= units * SKIPPED_SHARE]
    trimmed = math.ceil(len(window) * TRIMMED_SHARE)
    ordered = sorted(window, key=lambda j: steps[j], reverse=rising)
    kept = tuple(sorted(ordered[trimmed:]))
    if len(kept) < 2:
        return None
    mean = statistics.fmean(steps[j] for j in kept)
    return Compounding(safe_exp(mean), safe_exp(mean * units), kept)
