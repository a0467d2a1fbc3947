"""Growth law of a stream over the blocks, and of its gradient backward: power of the depth, exponential, or flat.

Updates of equal size give a power of the depth. A constant factor per block is an exponential, whatever its end value.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.profile import SKIPPED_SHARE, cached, safe_exp, streams, unit_sums
from propcheck.formatting import number, places
from propcheck.records import Growth, StreamGrowth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import Law, Run

# Two points lie on any law; a fit of two numbers to fewer than four points is meaningless.
_MIN_POINTS = 4
# A curve is flat if its fitted law changes it by less than a tenth over the blocks of the fit.
_FLAT = math.log(1.1)
# A law fits if it leaves at most a tenth of the variance (R^2 of 0.9). It fits better than the other one if its residual (root
# mean square) is at most 0.7 of the other's. These two numbers and _FLAT are this tool's own choice.
_MAX_UNEXPLAINED = 0.1
_BETTER = 0.7
# An embedding as large as the updates of many blocks bends the power law to (depth + offset)^p. One smaller than the updates of
# one block does not, and one larger than those of four times all blocks leaves the stream flat. Additions cannot give a steeper
# law than this: aligned updates give 1, gated branches -1 backward. Without that bound any exponential would fit.
_MIN_OFFSET = 1.0
_MAX_OFFSET_SHARE = 4.0
_MAX_EXPONENT = 1.5
# Offset and exponent compensate for each other. If the exponents that fit equally well differ by more than this, neither is
# reported.
_EXPONENT_TOLERANCE = 0.1


def describe(growth: Growth, noun: str) -> str:
    """Describe the law in words, ``as depth^0.5, a power law, over blocks 16 to 63``; empty if there is none.

    Parameters
    ----------
    growth
        The growth of a stream or of its gradient.
    noun
        "block" or "site".
    """
    if growth.law is None or growth.exponent is None or growth.rate is None or growth.fitted is None:
        return ""
    over = f"over {places(noun, growth.fitted)}"
    depth = f"(depth + {growth.offset:.0f})" if growth.offset else "depth"
    power = f"{depth}^{growth.exponent:.2f}{' on average' if growth.offset is None else ''}"
    return {
        "power": f"as {power}, a power law, {over}",
        "exponential": f"as {factor(growth.rate)}^{noun}, an exponential, {over}",
        "either": f"as a power law or an exponential (too few {noun}s to tell), {over}",
        "flat": f"flat {over}",
        "neither": f"as neither a power law nor an exponential {over}",
    }[growth.law]


def with_growth(run: Run) -> Run:
    """Return a run with the growth of each of its streams, computed unless the run has it."""
    if run.growth:
        return run
    return dataclasses.replace(run, growth=growths(run))


@cached
def growths(run: Run) -> tuple[StreamGrowth, ...]:
    """Return the growth of each stream of a run, in the order of :func:`propcheck.analysis.profile.streams`."""
    return run.growth or tuple(
        StreamGrowth(curve.sites[0].site, stream_growth(curve), gradient_growth(curve)) for curve in streams(run)
    )


def factor(value: float) -> str:
    """Format a factor per block; near 1 with four decimals, since 1.003^64 is 1.2."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if 0.9 < value < 1.1 else number(value)


def stream_growth(curve: Profile) -> Growth | None:
    """Return the growth of the sum's RMS from the first block to the last; None unless two values were observed."""
    return _growth(curve, [(unit, unit + 1, value) for unit, value in enumerate(unit_sums(curve))])


def gradient_growth(curve: Profile) -> Growth | None:
    """Return the growth of the stream's gradient from the last block back to the second; None unless two were observed."""
    values = [(unit, unit, sites[0].grad_stream_norm) for unit, sites in enumerate(curve.units)]
    return _growth(curve, values[:0:-1])


def _growth(curve: Profile, values: Sequence[tuple[int, int, float | None]]) -> Growth | None:
    """Fit the growth of ``values``: unit, number of blocks before it, and value, in the direction of travel."""
    usable = [(unit, depth, math.log(value)) for unit, depth, value in values if value is not None and 0 < value < math.inf]
    if len(usable) < 2:
        return None
    (first, _, start), (last, _, end) = usable[0], usable[-1]
    steps, units = abs(last - first), len(curve.units)
    growth = Growth(
        first=curve.label(first),
        last=curve.label(last),
        start=math.exp(start),
        end=math.exp(end),
        steps=steps,
        factor=safe_exp((end - start) / steps),
        growth_exponent=(end - start) / units,
    )
    fitted = [(unit, depth, value) for unit, depth, value in usable if depth > units * SKIPPED_SHARE]
    if len(fitted) < _MIN_POINTS:
        return growth
    depths, logs = [float(depth) for _, depth, _ in fitted], [value for _, _, value in fitted]
    offset, exponent, power_residual = _fit_power(depths, logs, units)
    slope, exponential_residual = _fit_line(depths, logs)
    direction = 1 if last > first else -1
    low, high = sorted((fitted[0][0], fitted[-1][0]))
    return dataclasses.replace(
        growth,
        law=_law(logs, slope * abs(depths[-1] - depths[0]), power_residual, exponential_residual),
        exponent=exponent,
        offset=offset,
        rate=safe_exp(direction * slope),
        fitted=(curve.label(low), curve.label(high)),
    )


def _fit_power(depths: Sequence[float], logs: Sequence[float], units: int) -> tuple[float | None, float, float]:
    """Fit ln v = p ln(depth + offset) + c; return the offset, p, and the residual as a root mean square."""

    def fit(offset: float) -> tuple[float, float, float]:
        return offset, *_fit_line([math.log(depth + offset) for depth in depths], logs)

    plain = fit(0.0)
    # First a coarse grid, ten offsets per doubling; then a fine one around the best, as the exponent is reported to 0.01.
    doublings = max(0.0, math.log2(_MAX_OFFSET_SHARE * units / _MIN_OFFSET))
    coarse = [fit(_MIN_OFFSET * 2 ** (tenth / 10)) for tenth in range(round(10 * doublings) + 1)]
    valid = [candidate for candidate in coarse if _is_valid_shift(candidate)]
    if not valid:
        return plain
    nearest = min(valid, key=lambda candidate: candidate[2])
    fine = [fit(nearest[0] * 2 ** (step / 1000)) for step in range(-100, 101)]
    best = min((nearest, *(candidate for candidate in fine if _is_valid_shift(candidate))), key=lambda fitted: fitted[2])
    # A best offset at the lower bound is no embedding, but the way in which places within a block are counted.
    if not best[2] < _BETTER * plain[2] or best[0] <= _MIN_OFFSET:
        return plain
    exponents = [candidate[1] for candidate in valid if _BETTER * candidate[2] <= best[2]] or [best[1]]
    return best if max(exponents) - min(exponents) <= _EXPONENT_TOLERANCE else (None, plain[1], best[2])


def _is_valid_shift(fitted: tuple[float, float, float]) -> bool:
    return fitted[0] >= _MIN_OFFSET and abs(fitted[1]) <= _MAX_EXPONENT


def _law(logs: Sequence[float], change: float, power_residual: float, exponential_residual: float) -> Law:
    """Choose the law from the residuals of both fits; ``change`` is that of the fitted line over the blocks."""
    if abs(change) < _FLAT and exponential_residual < _FLAT:
        return "flat"
    if min(power_residual, exponential_residual) ** 2 > _MAX_UNEXPLAINED * statistics.pvariance(logs):
        return "neither"
    if power_residual <= _BETTER * exponential_residual:
        return "power"
    return "exponential" if exponential_residual <= _BETTER * power_residual else "either"


def _fit_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a straight line by least squares; return its slope and the residual as a root mean square."""
    slope, intercept = statistics.linear_regression(x, y)
    residuals = [b - intercept - slope * a for a, b in zip(x, y, strict=True)]
    return slope, math.sqrt(statistics.fmean(residual * residual for residual in residuals))
