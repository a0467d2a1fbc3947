"""Growth of a stream and of its gradient over the depth; :mod:`propcheck.analysis.growth` computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Law = Literal["power", "exponential", "either", "flat", "neither"]


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of one quantity over the blocks of one stream, in the direction in which it travels.

    Attributes
    ----------
    first, last
        Blocks where it starts and ends (sites, if the model has no known blocks). The stream's RMS is taken after a block, the
        gradient's norm before it.
    start, end
        Values there. ``end`` = ``start`` * ``factor`` ** ``steps``.
    steps
        Number of blocks in between.
    factor
        Geometric mean factor per block.
    growth_exponent
        1/blocks * ln(end / start), the growth measure of OLMo 2 (arXiv 2501.00656, section 3.2), without the embedding; 0 is
        ideal. ``blocks`` are all blocks of the stream.
    law
        power (of the depth), exponential, either (both fit equally well), flat, neither; None if there are too few blocks.
    exponent
        p of (depth + offset)^p, with the depth counted from the input: negative for a gradient that grows toward the input. If
        several pairs of p and offset fit equally well, p of depth^p, the average exponent.
    offset
        Number of blocks whose updates the embedding outweighs; 0 if no offset fits better, None if several do.
    rate
        Fitted factor per block of the exponential, in the direction of travel.
    fitted
        First and last block of the fit, numbered as ``first``. The first quarter of the depth is left out, since the scale of
        the embedding decides its steps.
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
        """``end / start``, infinite if that overflows."""
        change = math.log(self.end) - math.log(self.start)
        return math.inf if change > 709 else math.exp(change)


@dataclass(frozen=True, slots=True)
class StreamGrowth:
    """Growth of one stream, named by its first site; None where fewer than two values were observed."""

    site: int
    stream: Growth | None
    gradient: Growth | None
