"""How far two values may lie apart: what the user allows, and what chance does where seeds tell it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What a gate compares: columns of sublayers.parquet; of each parameter the RMS of its elements, sqrt(mean^2 + std^2), and
# ``grad_norm``; and the first loss. The ratio of update and stream follows from these, and is for people to look at.
Gated = Literal[
    "stream_rms",
    "update_rms",
    "grad_stream_norm",
    "grad_update_norm",
    "param_grad_norm",
    "parameter_rms",
    "grad_norm",
    "loss",
]
Quantity = Gated | Literal["update_ratio"]

# A factor of ten either way: a gate that lets more pass than this judges nothing.
_MOST = 9.0
# Student's t at 99.9 % (two-sided) by degrees of freedom: with few seeds their own scatter is hardly known (the tests hold it
# against the integral of the density). From 9 on it is below five standard errors, and those are what is asked for: a gate
# makes hundreds of comparisons, and five leave one of them in 1.7 million to chance.
_STUDENT = {1: 636.62, 2: 31.599, 3: 12.924, 4: 8.610, 5: 6.869, 6: 5.959, 7: 5.408, 8: 5.041}
_STANDARD_ERRORS = 5.0


def parse_tolerance(value: Any) -> float:
    """Read ``"5%"``, ``"0.05"`` or 0.05 as the share by which a value may grow, or shrink by the same factor.

    Raises
    ------
    ValueError
        It is none, is negative or not finite, or lets everything pass.
    """
    text = value.strip() if isinstance(value, str) else value
    percent = isinstance(text, str) and text.endswith("%")
    if isinstance(value, bool) or not isinstance(text, str | int | float):
        raise ValueError('must be a share such as "5%" or 0.05')  # noqa: TRY004 - pydantic turns a ValueError into one line
    try:
        share = float(text.removesuffix("%")) / (100 if percent else 1) if isinstance(text, str) else float(text)
    except ValueError:
        raise ValueError('must be a share such as "5%" or 0.05') from None
    if not 0 <= share < math.inf:  # NaN too
        raise ValueError('must be 0 or more, and finite, as in "5%"')
    if not percent and share >= 1:
        raise ValueError(f'is {100 * share:g} %; write it as "{share:g}%" or "{100 * share:g}%", whichever is meant')
    if share > _MOST:
        raise ValueError(f'lets a factor of {1 + share:g} pass, so it gates nothing; "{100 * _MOST:g}%" is the most')
    return share


@dataclass(frozen=True, slots=True)
class Tolerances:
    """What the user allows.

    Attributes
    ----------
    share
        0.05 lets values pass that are up to 5 % larger, or smaller by the same factor.
    quantities
        Shares of single quantities, which count before ``share``.
    modules
        Shares by glob over module paths and parameter names, which count before both; of several that match, the last.
    floor
        Values of at most this magnitude on both sides are taken for zero.
    """

    share: float = 0.05
    quantities: Mapping[Quantity, float] = field(default_factory=dict)
    modules: Mapping[str, float] = field(default_factory=dict)
    floor: float = 1e-12

    def of(self, quantity: Quantity, names: Iterable[str | None]) -> float:
        """Return the share for a quantity at a place with these names."""
        given = [name for name in names if name is not None]
        matching = [share for glob, share in self.modules.items() if any(fnmatchcase(name, glob) for name in given)]
        return matching[-1] if matching else self.quantities.get(quantity, self.share)


def chance(scatter: float, freedom: int, averaged: Sequence[int]) -> float:
    """Return how far two means may differ by chance, in natural logarithms.

    Parameters
    ----------
    scatter
        Standard deviation of the logarithm over the seeds.
    freedom
        Degrees of freedom that it was estimated with, at least 1.
    averaged
        How many values each mean is of; one number where it is the mean of differences.
    """
    errors = max(_STUDENT.get(freedom, _STANDARD_ERRORS), _STANDARD_ERRORS)
    return errors * scatter * math.sqrt(sum(1 / amount for amount in averaged))


def scatter(*sides: Sequence[float]) -> float | None:
    """Return the standard deviation of the logarithm within the sides, pooled; None unless one has two positive values."""
    logs = [[math.log(value) for value in side] for side in sides if len(side) > 1 and all(0 < v < math.inf for v in side)]
    if not logs:
        return None
    freedom = sum(len(side) - 1 for side in logs)
    return math.sqrt(sum((len(side) - 1) * statistics.variance(side) for side in logs) / freedom)


def scatter_together(base: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Return the standard deviation of the logarithm of other / base over the seeds that both have.

    What a seed does to both sides, by its inputs and by the weights that they share, is not in it. None unless the seeds are
    the same, two or more, and all values positive and finite.
    """
    if base.keys() != other.keys() or len(base) < 2 or not all(0 < v < math.inf for v in (*base.values(), *other.values())):
        return None
    return statistics.stdev(math.log(other[seed] / base[seed]) for seed in base)


def pooled(scatters: Iterable[float]) -> float:
    """Return the root mean square of several: a single place's own is hardly known from a few seeds."""
    values = list(scatters)
    return math.sqrt(statistics.fmean(value * value for value in values)) if values else 0.0
