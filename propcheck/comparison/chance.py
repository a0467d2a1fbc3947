"""How far two means over seeds may differ by chance, from the scatter of the logarithms over the seeds."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Student's t at 99.9 % (two-sided) by degrees of freedom, since few seeds give a poor estimate of the scatter (the tests check
# it against the integral of the density). From 9 degrees on it is below 5 standard errors, which is the least that is required:
# a gate makes hundreds of comparisons, and 5 standard errors leave one of them in 1.7 million to chance.
_STUDENT = {1: 636.62, 2: 31.599, 3: 12.924, 4: 8.610, 5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041}
_STANDARD_ERRORS = 5.0


def chance_bound(scatter: float, freedom: int, sample_sizes: Sequence[int]) -> float:
    """Return how far two means may differ by chance, in natural logarithms.

    Parameters
    ----------
    scatter
        Standard deviation of the logarithm over the seeds.
    freedom
        Degrees of freedom of that estimate, at least 1.
    sample_sizes
        Number of values in each mean; a single number for the mean of paired differences.
    """
    errors = max(_STUDENT.get(freedom, _STANDARD_ERRORS), _STANDARD_ERRORS)
    return errors * scatter * math.sqrt(sum(1 / size for size in sample_sizes))


def log_scatter(*samples: Sequence[float]) -> float | None:
    """Return the pooled standard deviation of the logarithm within the samples.

    None unless some sample has two or more values, all positive and finite.
    """
    logs = [
        [math.log(value) for value in sample] for sample in samples if len(sample) > 1 and all(0 < v < math.inf for v in sample)
    ]
    if not logs:
        return None
    freedom = sum(len(sample) - 1 for sample in logs)
    return math.sqrt(sum((len(sample) - 1) * statistics.variance(sample) for sample in logs) / freedom)


def paired_scatter(base: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Return the standard deviation over seeds of ln(other / base).

    It leaves out what a seed does to both runs through the inputs and weights that they share. None unless both have the same
    two or more seeds, and all values are positive and finite.
    """
    if base.keys() != other.keys() or len(base) < 2 or not all(0 < v < math.inf for v in (*base.values(), *other.values())):
        return None
    return statistics.stdev(math.log(other[seed] / base[seed]) for seed in base)


def pooled_scatter(scatters: Iterable[float]) -> float:
    """Return the root mean square of several scatters, since few seeds give a poor estimate at a single place."""
    values = list(scatters)
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0
