"""Forward and backward gain of each residual addition on a stream of RMS 1; :mod:`propcheck.analysis.theory` uses them.

All are mean squares or squared norms: S of the stream, f of what a branch adds when it reads RMS 1, b of the gradient that it
sends back.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.profile import NORM_ON_STREAM, TRIMMED_SHARE, additions

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import NormRecord, Run, SiteRecord

# Placements whose branches read the stream behind the norm on it, so that it has one size there. Where it begins, what they
# add is taken as proportional to it, as it is of a linear branch.
BARE = frozenset({"post", "deepnorm"})
# A gradient that is the sum's to this precision is that of a copy of the stream, made for the addition alone (a cast, a
# scaling), or its branch sends nothing back.
_SAME = 1e-5
# A kind has a gain of its own where it was measured at so many additions.
_LEAST = 2
# Sublayers that mix tokens, and over how many of the nearest of them their gain is taken: a quarter, at least five.
_MIXERS = frozenset({"attention", "linear_attention", "ssm"})
_NEAR_SHARE = 0.25
_NEAREST = 5


@dataclass(frozen=True, slots=True)
class Addition:
    """One residual addition of one seed.

    Attributes
    ----------
    rows
        Its sites, several in a parallel block.
    kind
        Additions of one kind have one gain: placement, kinds of sublayer, place in the block.
    scale
        What its branch's output owes to its own initial values, squared: the gain of the norm that wrote it, else the standard
        deviation of its residual projection over the median of its kind.
    factor
        Squared factor on the stream, in N(a x + F).
    behind
        Mean square behind the norm on the stream that follows; ``None`` where none does.
    """

    rows: tuple[SiteRecord, ...]
    kind: tuple[Hashable, ...]
    scale: float
    factor: float
    behind: float | None

    @property
    def stream(self) -> float | None:
        """Measured S at the addition, the factor included."""
        return square(self.rows[0].stream_rms)

    @property
    def gradient(self) -> float | None:
        """Measured square of the gradient of the sum."""
        return square(self.rows[0].grad_sum_norm)

    @property
    def copied(self) -> bool:
        """Whether the stream's gradient is that of a copy of it, without what its branch sends back."""
        stream, total = self.rows[0].grad_stream_norm, self.rows[0].grad_sum_norm
        return stream is not None and total is not None and math.isclose(stream, total, rel_tol=_SAME)

    @property
    def width(self) -> int | None:
        """Width of the stream."""
        norm, rms = self.rows[0].stream_norm, self.rows[0].stream_rms
        return round((norm / rms) ** 2) if norm and rms and math.isfinite(norm / rms) else None

    @property
    def mixes(self) -> bool:
        """Whether its branch mixes tokens."""
        return any(row.sublayer in _MIXERS for row in self.rows)

    def unit(self, stream: float) -> float:
        """Give what f and b are multiplied with, for a stream of that S at the addition."""
        return self.scale * (stream / self.factor if self.rows[0].placement in BARE else 1.0)

    def added(self) -> float | None:
        """Measure f."""
        updates = [square(row.update_rms) for row in self.rows]
        if self.stream is None or not (unit := self.unit(self.stream)) or any(update is None for update in updates):
            return None
        return sum(update for update in updates if update is not None) / unit

    def sent_back(self, before: Addition | None) -> float | None:
        """Measure b; ``before`` is the addition whose sum this one continues."""
        entering = self._entering(before)
        if self.stream is None or not self.gradient or entering is None or not (unit := self.unit(self.stream)):
            return None
        return (entering / self.gradient - self.factor) * self.stream / self.factor / unit

    def passed(self, after: Addition | None) -> float | None:
        """Measure what the norm behind it passes of a squared gradient, over gain^2 / S: 1 where tokens are alike in size."""
        if self.behind is None or after is None or after.copied or after.width != self.width:
            return None
        total, entering = square(self.rows[0].sum_rms), square(after.rows[0].grad_stream_norm)
        return self.gradient * total / (self.behind * entering) if self.gradient and total and entering else None

    def _entering(self, before: Addition | None) -> float | None:
        """Square the gradient of the stream with all that reads it; that of a copy says less than that of the sum before."""
        if not self.copied:
            return square(self.rows[0].grad_stream_norm)
        if before is None or before.width != self.width:
            return None
        total = square(before.rows[0].sum_rms)
        if before.behind is None or before.gradient is None:
            return before.gradient
        return None if total is None else before.gradient * total / before.behind


def chain_of(run: Run, stream: Profile, seed: int) -> list[Addition]:
    """Arrange the additions of one stream of one seed in order."""
    norms = [norm for norm in run.norms if norm.seed == seed and norm.site is not None]
    written = {norm.site: _behind(norm) for norm in norms if norm.place == "written" and norm.site is not None}
    following = {norm.site: _behind(norm) for norm in norms if norm.place == "stream" and norm.site is not None}
    spreads = _projections(run)
    roles = {record.site: position for unit in stream.units for position, record in enumerate(unit)}
    groups = additions(stream.sites)
    kinds = [(rows[0].placement, *(row.sublayer for row in rows), roles[rows[0].site]) for rows in groups]
    middles: dict[tuple[Hashable, ...], list[float]] = {}
    for rows, kind in zip(groups, kinds, strict=True):
        middles.setdefault(kind, []).extend(spreads[row.site] for row in rows if row.site in spreads)
    chain: list[Addition] = []
    for rows, kind in zip(groups, kinds, strict=True):
        gain, spread = _mean(rows, written), _mean(rows, spreads)
        middle = statistics.median(middles[kind]) if middles[kind] else None
        if gain is None:
            gain = (spread / middle) ** 2 if spread is not None and middle else 1.0
        behind = following.get(rows[-1].site, 1.0) if rows[0].placement in NORM_ON_STREAM else None
        chain.append(Addition(rows, kind, gain, 1.0, behind))
    return _with_factors(chain)


def _with_factors(chain: list[Addition]) -> list[Addition]:
    """Find the factor on the stream: one for all additions behind a norm on it, but for those that have none."""
    own: list[float | None] = [None] * len(chain)
    for index, (before, one) in enumerate(itertools.pairwise(chain), 1):
        arriving = square(before.rows[0].sum_rms) if before.behind is None else before.behind
        if one.stream and arriving and _scaled(one):
            own[index] = one.stream / arriving
    found = [ratio for ratio in own if ratio is not None]
    if not found:
        return chain
    usual = statistics.median(found)
    plain = [ratio is not None and abs(math.log(ratio)) < abs(math.log(ratio / usual)) for ratio in own]
    return [
        dataclasses.replace(one, factor=usual) if _scaled(one) and not without else one
        for one, without in zip(chain, plain, strict=True)
    ]


def typical(chain: Sequence[Addition], values: Sequence[float | None]) -> list[float | None]:
    """Give each addition the gain of its kind, a trimmed mean over those where it was measured.

    Of sublayers that mix tokens it is that over the nearest of them: they pass on what tokens have in common, and tokens
    become more alike over the depth, their gradients on the way back, so that such a gain drifts. From a single one, a law
    would be a copy: ``None``, as where none was measured.
    """
    found: dict[tuple[Hashable, ...], list[tuple[int, float]]] = {}
    for index, (one, value) in enumerate(zip(chain, values, strict=True)):
        if value is not None:
            found.setdefault(one.kind, []).append((index, value))
    gains: list[float | None] = []
    for index, one in enumerate(chain):
        members = found.get(one.kind, [])
        if one.mixes:
            near = max(_NEAREST, math.ceil(len(members) * _NEAR_SHARE))
            members = sorted(members, key=lambda member: abs(member[0] - index))[:near]
        gains.append(_middle([value for _, value in members]) if len(members) >= _LEAST else None)
    return gains


def _middle(values: Sequence[float]) -> float:
    """Average without the most extreme tenth at either end: one that is odd does not count, and what compounds is a mean."""
    trimmed = math.ceil(len(values) * TRIMMED_SHARE) if len(values) > 2 else 0
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def square(value: float | None) -> float | None:
    """Square what was observed and is finite."""
    return value * value if value is not None and math.isfinite(value * value) else None


def _scaled(one: Addition) -> bool:
    """Whether the stream may have a factor for the addition alone."""
    return one.rows[0].placement in NORM_ON_STREAM - {"post"}


def _projections(run: Run) -> dict[int, float]:
    """Give the standard deviation of the matrices that write a site's update; of a stack of experts, the median."""
    found: dict[int, list[float]] = {}
    for record in run.parameters:
        if record.writes and record.site is not None and record.std is not None and math.isfinite(record.std):
            found.setdefault(record.site, []).append(record.std)
    return {site: statistics.median(values) for site, values in found.items()}


def _behind(norm: NormRecord) -> float:
    """Give the mean square of what leaves a norm: of its gain, less what epsilon damps; 1/width of it for a length of 1."""
    gain = 1.0 if norm.gain is None else norm.gain
    if norm.kind == "length":
        return gain * gain / norm.width
    entering = square(norm.input_rms)
    kept = entering / (entering + norm.eps) if entering and norm.eps else 1.0
    return gain * gain * kept


def _mean(rows: Sequence[SiteRecord], values: Mapping[int, float]) -> float | None:
    found = [values[row.site] for row in rows if row.site in values]
    return statistics.fmean(found) if len(found) == len(rows) else None
