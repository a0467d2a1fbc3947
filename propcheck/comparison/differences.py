"""Find the numbers of a run that differ from its baseline by more than the tolerance, in either direction."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from propcheck.comparison.draws import compare_draws
from propcheck.comparison.paired_numbers import UNIT, is_loss_comparable, pair_losses, pair_parameters, pair_sites
from propcheck.comparison.quantities import BACKWARD, FORWARD, QUANTITIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from propcheck.comparison.draws import DrawComparison
    from propcheck.comparison.match_runs import MatchedRuns
    from propcheck.comparison.paired_numbers import NumberPair
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import Place

DifferenceKind = Literal["changed", "nonfinite", "unobserved", "observed"]

# With the same draws on the same machine, numbers are equal to the last bit; other threads or vector units move them by 3e-7
# (docs/gate.md). In half precision, another kind of processor moved them by 1e-3.
_EQUAL, _EQUAL_IN_HALF = 1e-6, 5e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """One number outside its tolerance.

    Attributes
    ----------
    quantity, place
        What differs, and where.
    kind
        ``changed``; ``nonfinite``: a NaN or an infinity; ``unobserved``, ``observed``: only the baseline, only the run has it.
    baseline, value
        Means over the seeds (geometric for positive numbers); None if not observed.
    ratio
        value / baseline; None unless both are finite and of the same sign.
    tolerance
        Factor that is accepted in either direction.
    position
        Orders places along the forward pass, in site numbers; the embedding is at -1, the head after all sites.
    """

    quantity: Quantity
    kind: DifferenceKind
    place: Place
    baseline: float | None
    value: float | None
    ratio: float | None
    tolerance: float
    position: int

    @property
    def size(self) -> float:
        """|ln ratio|; infinite without a ratio."""
        return math.inf if self.ratio is None else abs(math.log(self.ratio))


@dataclass(frozen=True, slots=True)
class NumberComparison:
    """All numbers of two runs, compared.

    Attributes
    ----------
    differences
        In the order of comparison.
    moved
        Position and place of every forward number that is not equal to rounding; empty unless draws and machine are the same.
    compared
        How many values of each quantity were compared.
    allowed
        The smallest and the largest factor that is accepted somewhere, for each quantity.
    chance
        The largest factor that chance explains somewhere, for each quantity.
    notes
        Sentences about the comparison.
    """

    differences: tuple[Difference, ...]
    moved: tuple[tuple[int, Place], ...]
    compared: Mapping[Quantity, int]
    allowed: Mapping[Quantity, tuple[float, float]]
    chance: Mapping[Quantity, float]
    notes: tuple[str, ...]

    def chance_of(self, metric: str) -> float:
        """Return the factor by which chance may move a number of this name.

        For a metric that is not compared, the largest of those that are; single parameters do not count.
        """
        factors = {name: factor for name, factor in self.chance.items() if name not in ("grad_norm", "parameter_rms")}
        candidates = [factor for name, factor in factors.items() if name == metric] or list(factors.values())
        return max(1.0, *candidates) if candidates else 1.0


def compare_numbers(
    matched: MatchedRuns, tolerances: Tolerances, quantities: Sequence[Quantity] = (*FORWARD, *BACKWARD)
) -> NumberComparison:
    """Compare the numbers of two runs.

    Parameters
    ----------
    matched
        The runs.
    tolerances
        By how much they may differ.
    quantities
        Columns of the sites to compare; initial values and gradients of parameters and the loss always are.
    """
    draws = compare_draws(matched)
    pairs, notes = _paired_numbers(matched, draws, quantities)
    allowed = [max(1 + tolerances.of(pair.quantity, pair.names), pair.chance_factor) for pair in pairs]
    ranges = _ranges(pairs, allowed)
    chance: dict[Quantity, float] = {}
    for pair in pairs:
        chance[pair.quantity] = max(chance.get(pair.quantity, 1.0), pair.chance_factor)
    differences = [
        _difference(pair, factor, max(tolerances.floor, pair.floor)) for pair, factor in zip(pairs, allowed, strict=True)
    ]
    return NumberComparison(
        differences=tuple(difference for difference in differences if difference is not None),
        moved=tuple(_moved(pairs, tolerances.floor, matched.run.precision)) if draws.exact else (),
        compared=Counter(pair.quantity for pair in pairs if pair.baseline or pair.run),
        allowed=ranges,
        chance=chance,
        notes=(
            *notes,
            *([note] if (note := draws.note(ranges)) else []),
            *_unused_globs(tolerances, matched),
        ),
    )


def _paired_numbers(
    matched: MatchedRuns, draws: DrawComparison, quantities: Sequence[Quantity]
) -> tuple[list[NumberPair], list[str]]:
    """Return the numbers that can be compared, and notes on those that cannot."""
    pairs: list[NumberPair] = []
    notes: list[str] = []
    if draws.shared_seeds and not draws.same_seeds:
        notes.append(f"Compared over the shared seeds: {', '.join(map(str, draws.shared_seeds))}.")
    for quantity in quantities:
        column = pair_sites(matched, draws, quantity)
        if column and not any(pair.baseline for pair in column):
            notes.append(f"The baseline has no {quantity}, so it is not compared.")
        else:
            pairs += column
    if draws.same_first_seed:
        pairs += pair_parameters(matched, draws)
    else:
        notes.append("Parameters are recorded for the first seed, which differs, so they are not compared.")
    losses = pair_losses(matched, draws)
    if losses is not None and is_loss_comparable(losses, matched, draws):
        pairs.append(losses)
    elif losses is not None:
        notes.append("The loss is not a cross-entropy and depends on the random draws, which differ, so it is not compared.")
    return pairs, notes


def _ranges(pairs: Iterable[NumberPair], allowed: Iterable[float]) -> dict[Quantity, tuple[float, float]]:
    ranges: dict[Quantity, tuple[float, float]] = {}
    for pair, factor in zip(pairs, allowed, strict=True):
        smallest, largest = ranges.get(pair.quantity, (factor, factor))
        ranges[pair.quantity] = (min(smallest, factor), max(largest, factor))
    return ranges


def _unused_globs(tolerances: Tolerances, matched: MatchedRuns) -> list[str]:
    names = {
        site.module for pair in matched.sites.pairs for site in (pair.base, pair.other) if site is not None and site.module
    }
    names |= {parameter.name for pair in matched.parameters.pairs for parameter in (pair.base, pair.other)}
    unused = [glob for glob in tolerances.modules if not any(fnmatchcase(name, glob) for name in names)]
    return [f"No module or parameter matches the tolerance for {', '.join(unused)}."] if unused else []


def _difference(pair: NumberPair, allowed: float, floor: float) -> Difference | None:
    """Return the difference of two numbers; None if they are within the tolerance or not observed in either run."""
    if not (pair.baseline or pair.run):
        return None
    baseline, value, ratio = _mean(pair.baseline), _mean(pair.run), None
    kind: DifferenceKind = "changed"
    if not _is_finite(pair):
        kind = "nonfinite"
    elif baseline is None or value is None:
        kind = "observed" if baseline is None else "unobserved"
    elif max(abs(baseline), abs(value)) <= floor:
        return None
    else:
        ratio = _ratio(baseline, value)
        if ratio is not None and abs(math.log(ratio)) <= math.log(allowed):  # written so that NaN is a difference
            return None
    return Difference(pair.quantity, kind, pair.place, baseline, value, ratio, allowed, pair.position)


def _is_finite(pair: NumberPair) -> bool:
    return all(map(math.isfinite, (*pair.baseline, *pair.run)))


def _ratio(baseline: float, value: float) -> float | None:
    """Return value / baseline; None if one is zero or the signs differ."""
    return value / baseline if baseline and value and (baseline > 0) == (value > 0) else None


def _moved(pairs: Iterable[NumberPair], floor: float, precision: str) -> Iterator[tuple[int, Place]]:
    """Yield position and place of the forward numbers that are not equal to rounding."""
    equal = _EQUAL if UNIT.get(precision) == UNIT["fp32"] else _EQUAL_IN_HALF
    for pair in pairs:
        baseline, value = _mean(pair.baseline), _mean(pair.run)
        if QUANTITIES[pair.quantity].direction != "forward" or not _is_finite(pair) or baseline is None or value is None:
            continue
        ratio = _ratio(baseline, value) if max(abs(baseline), abs(value)) > floor else None
        if ratio is not None and abs(math.log(ratio)) > equal:
            yield pair.position, pair.place


def _mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, the arithmetic mean of others, None of none."""
    if not values:
        return None
    if len(values) > 1 and all(0 < value < math.inf for value in values):
        return statistics.geometric_mean(values)
    return sum(values) / len(values)
