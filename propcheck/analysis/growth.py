"""By which law a stream grows over its blocks, and its gradient on the way back.

A power of the depth is what additions of like size make; a constant factor a block is an exponential, whatever its end value.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.analysis.profile import SKIPPED_SHARE, safe_exp, unit_sums
from propcheck.formatting import number, places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile

Law = Literal["power", "exponential", "either", "flat", "neither"]

# Two points lie on any law; a fit of two numbers to fewer than four says nothing.
_FEWEST = 4
# A curve that the fitted law changes by less than a tenth over the blocks that are judged is called flat.
_FLAT = math.log(1.1)
# A law holds if it leaves at most a tenth of the variance (R^2 of 0.9), and is the better one if what it leaves, as a root mean
# square, is at most 0.7 of what the other leaves. Both numbers, and the one above, are this tool's own.
_LEFT = 0.1
_BETTER = 0.7
# An embedding as large as the updates of many blocks bends the power law to (depth + offset)^p; one that weighs less than a
# block does not, and one of more than so many times all blocks leaves a stream that is flat. Steeper than this additions make
# none: aligned updates give 1, gated branches -1 backward; without that bound any exponential would fit.
_LEAST_OFFSET = 1.0
_LARGEST_OFFSET = 4.0
_STEEPEST = 1.5
# Offset and exponent make up for one another. Where those that fit alike differ by more than this, neither is known.
_KNOWN = 0.1


@dataclass(frozen=True, slots=True)
class Growth:
    """One quantity over the blocks of one stream, in the direction in which it travels.

    Attributes
    ----------
    first, last
        Where it starts and ends, numbers of blocks (of sites, where blocks could not be told): of the stream's RMS after them,
        of the gradient's norm before them.
    start, end
        The values there. ``end`` = ``start`` * ``factor`` ** ``steps``.
    steps
        Blocks between.
    factor
        Geometric mean a block.
    growth_exponent
        1/blocks * ln(end / start), OLMo 2's measure of growth (arXiv 2501.00656, section 3.2), the embedding left out; 0 is
        ideal. ``blocks`` are all of the stream.
    law
        power (of the depth), exponential, either (they fit alike), flat, neither; ``None`` where blocks are too few.
    exponent
        p of (depth + offset)^p, the depth counted from the input: of a gradient that grows toward the input it is negative.
        Where several p fit alike, each with an offset of its own, that of depth^p, which is what they make on average.
    offset
        Blocks whose updates the embedding outweighs; 0 unless that fits better, ``None`` where it fits better and several do.
    rate
        The fitted factor a block of the exponential, in the direction of travel.
    fitted
        First and last block of the fit, numbered as ``first``. Those of the first quarter of the depth are left out, whose
        steps the scale of the embedding decides.
    """

    first: int
    last: int
    start: float
    end: float
    steps: int
    factor: float
    growth_exponent: float
    law: Law | None = None
    exponent: float | None = None
    offset: float | None = None
    rate: float | None = None
    fitted: tuple[int, int] | None = None

    @property
    def total(self) -> float:
        """``end / start``."""
        return safe_exp(math.log(self.end) - math.log(self.start))

    def described(self, noun: str) -> str:
        """Say the law in words: ``as depth^0.5, a power law, over blocks 16 to 63``; empty where there is none to say."""
        if self.law is None or self.exponent is None or self.rate is None or self.fitted is None:
            return ""
        over = f"over {places(noun, self.fitted)}"
        depth = f"(depth + {self.offset:.0f})" if self.offset else "depth"
        power = f"{depth}^{self.exponent:.2f}{' on average' if self.offset is None else ''}"
        return {
            "power": f"as {power}, a power law, {over}",
            "exponential": f"as {factor(self.rate)}^{noun}, an exponential, {over}",
            "either": f"as a power law or an exponential, too short to tell, {over}",
            "flat": f"flat {over}",
            "neither": f"by no one law {over}",
        }[self.law]


def factor(value: float) -> str:
    """Write a factor a block: near 1 the fourth decimal is what compounds, 1.003^64 is 1.2."""
    return f"{value:.4f}".rstrip("0").rstrip(".") if 0.9 < value < 1.1 else number(value)


def stream_growth(curve: Profile) -> Growth | None:
    """From the sum of the first block to that of the last; ``None`` unless two were observed."""
    return _growth(curve, [(j, j + 1, value) for j, value in enumerate(unit_sums(curve))])


def gradient_growth(curve: Profile) -> Growth | None:
    """From the gradient before the last block back to that before the second; ``None`` unless two were observed."""
    return _growth(curve, [(j, j, unit[0].grad_stream_norm) for j, unit in enumerate(curve.units) if j][::-1])


def _growth(curve: Profile, values: Sequence[tuple[int, int, float | None]]) -> Growth | None:
    """``values`` are unit, blocks before the place of the value, and value, in the direction of travel."""
    usable = [(j, depth, math.log(value)) for j, depth, value in values if value is not None and 0 < value < math.inf]
    if len(usable) < 2:
        return None
    (first, _, start), (last, _, end) = usable[0], usable[-1]
    steps, units = abs(last - first), len(curve.units)
    whole = Growth(
        first=curve.label(first),
        last=curve.label(last),
        start=math.exp(start),
        end=math.exp(end),
        steps=steps,
        factor=safe_exp((end - start) / steps),
        growth_exponent=(end - start) / units,
    )
    fitted = [(j, depth, value) for j, depth, value in usable if depth > units * SKIPPED_SHARE]
    if len(fitted) < _FEWEST:
        return whole
    depths, logs = [float(depth) for _, depth, _ in fitted], [value for _, _, value in fitted]
    offset, exponent, beside_power = _power(depths, logs, units)
    slope, beside_exponential = _line(depths, logs)
    toward_end = 1 if last > first else -1
    ends = sorted((fitted[0][0], fitted[-1][0]))
    return dataclasses.replace(
        whole,
        law=_law(logs, slope * abs(depths[-1] - depths[0]), beside_power, beside_exponential),
        exponent=exponent,
        offset=offset,
        rate=safe_exp(toward_end * slope),
        fitted=(curve.label(ends[0]), curve.label(ends[1])),
    )


def _power(depths: Sequence[float], logs: Sequence[float], units: int) -> tuple[float | None, float, float]:
    """Fit ln v = p ln(depth + offset) + c: the offset, p, and the root mean square of what the fit leaves."""

    def fit(offset: float) -> tuple[float, float, float]:
        return offset, *_line([math.log(depth + offset) for depth in depths], logs)

    plain = fit(0.0)
    # Every tenth of a doubling, for what fits alike; then between the neighbours of the best, as its exponent is told to 0.01.
    doublings = max(0.0, math.log2(_LARGEST_OFFSET * units / _LEAST_OFFSET))
    tried = [fit(_LEAST_OFFSET * 2 ** (tenth / 10)) for tenth in range(round(10 * doublings) + 1)]
    shifted = [one for one in tried if _is_shift(one)]
    if not shifted:
        return plain
    near = min(shifted, key=lambda one: one[2])
    around = [fit(near[0] * 2 ** (step / 1000)) for step in range(-100, 101)]
    best = min((near, *(one for one in around if _is_shift(one))), key=lambda one: one[2])
    # What is best at the lower bound is no embedding, but how the places within a block are counted.
    if not best[2] < _BETTER * plain[2] or best[0] <= _LEAST_OFFSET:
        return plain
    alike = [one[1] for one in shifted if _BETTER * one[2] <= best[2]] or [best[1]]
    return best if max(alike) - min(alike) <= _KNOWN else (None, plain[1], best[2])


def _is_shift(fitted: tuple[float, float, float]) -> bool:
    return fitted[0] >= _LEAST_OFFSET and abs(fitted[1]) <= _STEEPEST


def _law(logs: Sequence[float], change: float, beside_power: float, beside_exponential: float) -> Law:
    """Choose the law from the root mean squares of what each leaves; ``change`` is what the fit makes over the blocks."""
    if abs(change) < _FLAT and beside_exponential < _FLAT:
        return "flat"
    if min(beside_power, beside_exponential) ** 2 > _LEFT * statistics.pvariance(logs):
        return "neither"
    if beside_power <= _BETTER * beside_exponential:
        return "power"
    return "exponential" if beside_exponential <= _BETTER * beside_power else "either"


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a straight line by least squares: its slope, and the root mean square of what it leaves."""
    slope, intercept = statistics.linear_regression(x, y)
    left = [b - intercept - slope * a for a, b in zip(x, y, strict=True)]
    return slope, math.sqrt(statistics.fmean(value * value for value in left))
