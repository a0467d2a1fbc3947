"""Forward and backward gain of the branch of each residual addition; :mod:`propcheck.analysis.theory` uses them.

All are mean squares or squared norms: S of the stream, f of the update of a branch that reads RMS 1, b of the gradient that it
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

# Placements whose branches read the stream after the norm on it, where its size is fixed. Where the stream begins, their update
# is assumed proportional to it, as that of a linear branch is.
BARE = frozenset({"post", "deepnorm"})
# If the gradient of the stream equals that of the sum to this precision, it is that of a copy made for the addition alone (a
# cast, a scaling), or the branch sends nothing back.
_SAME = 1e-5
# Additions of a kind that must be measured for a typical gain of the kind.
_MIN_MEASURED = 2
# Sublayers that mix tokens. Their gain is averaged over the nearest quarter of them, at least five.
_MIXERS = frozenset({"attention", "linear_attention", "ssm"})
_NEAR_SHARE = 0.25
_MIN_NEAR = 5


@dataclass(frozen=True, slots=True)
class AdditionGain:
    """One residual addition of one seed.

    Attributes
    ----------
    rows
        Its sites; a parallel block has several.
    kind
        Placement, kinds of sublayer, and place in the block; additions of one kind have the same gain.
    scale
        Squared scale of the update from its initial values: the gain of the norm that wrote it, else the standard deviation of
        its residual projection relative to the median of its kind.
    factor
        Squared factor a on the stream, in N(a x + F).
    behind
        Mean square after the norm on the stream that follows the addition; None if there is none.
    """

    rows: tuple[SiteRecord, ...]
    kind: tuple[Hashable, ...]
    scale: float
    factor: float
    behind: float | None

    @property
    def stream(self) -> float | None:
        """Measured S at the addition, with the factor."""
        return square(self.rows[0].stream_rms)

    @property
    def gradient(self) -> float | None:
        """Measured squared gradient norm of the sum."""
        return square(self.rows[0].grad_sum_norm)

    @property
    def copied(self) -> bool:
        """Whether the gradient of the stream is that of a copy of it, without the part from the branch."""
        stream, total = self.rows[0].grad_stream_norm, self.rows[0].grad_sum_norm
        return stream is not None and total is not None and math.isclose(stream, total, rel_tol=_SAME)

    @property
    def width(self) -> int | None:
        """Width of the stream."""
        norm, rms = self.rows[0].stream_norm, self.rows[0].stream_rms
        return round((norm / rms) ** 2) if norm and rms and math.isfinite(norm / rms) else None

    @property
    def mixes(self) -> bool:
        """Whether the branch mixes tokens."""
        return any(row.sublayer in _MIXERS for row in self.rows)

    def unit(self, stream: float) -> float:
        """Return the factor of f and b for a stream with this S at the addition."""
        return self.scale * (stream / self.factor if self.rows[0].placement in BARE else 1.0)

    def added(self) -> float | None:
        """Return the measured f, or None."""
        updates = [square(row.update_rms) for row in self.rows]
        if self.stream is None or not (unit := self.unit(self.stream)) or any(update is None for update in updates):
            return None
        return sum(update for update in updates if update is not None) / unit

    def sent_back(self, before: AdditionGain | None) -> float | None:
        """Return the measured b, or None; ``before`` is the addition whose sum this one continues."""
        entering = self._entering(before)
        if self.stream is None or not self.gradient or entering is None or not (unit := self.unit(self.stream)):
            return None
        return (entering / self.gradient - self.factor) * self.stream / self.factor / unit

    def passed(self, after: AdditionGain | None) -> float | None:
        """Return the measured gradient factor of the norm after the addition, squared, relative to gain^2 / S; None if unknown.

        It is 1 if all tokens have the same size.
        """
        if self.behind is None or after is None or after.copied or after.width != self.width:
            return None
        total, entering = square(self.rows[0].sum_rms), square(after.rows[0].grad_stream_norm)
        return self.gradient * total / (self.behind * entering) if self.gradient and total and entering else None

    def _entering(self, before: AdditionGain | None) -> float | None:
        """Return the squared gradient of the stream over all paths; for a copy, derived from that of the sum before."""
        if not self.copied:
            return square(self.rows[0].grad_stream_norm)
        if before is None or before.width != self.width:
            return None
        total = square(before.rows[0].sum_rms)
        if before.behind is None or before.gradient is None:
            return before.gradient
        return None if total is None else before.gradient * total / before.behind


def chain_of(run: Run, stream: Profile, seed: int) -> list[AdditionGain]:
    """Return the additions of one stream of one seed in order."""
    norms = [norm for norm in run.norms if norm.seed == seed and norm.site is not None]
    written = {norm.site: _output_square(norm) for norm in norms if norm.place == "written" and norm.site is not None}
    following = {norm.site: _output_square(norm) for norm in norms if norm.place == "stream" and norm.site is not None}
    stds = _projection_stds(run)
    roles = {record.site: position for unit in stream.units for position, record in enumerate(unit)}
    groups = additions(stream.sites)
    kinds = [(rows[0].placement, *(row.sublayer for row in rows), roles[rows[0].site]) for rows in groups]
    stds_of_kind: dict[tuple[Hashable, ...], list[float]] = {}
    for rows, kind in zip(groups, kinds, strict=True):
        stds_of_kind.setdefault(kind, []).extend(stds[row.site] for row in rows if row.site in stds)
    chain: list[AdditionGain] = []
    for rows, kind in zip(groups, kinds, strict=True):
        gain, std = _mean(rows, written), _mean(rows, stds)
        median = statistics.median(stds_of_kind[kind]) if stds_of_kind[kind] else None
        if gain is None:
            gain = (std / median) ** 2 if std is not None and median else 1.0
        behind = following.get(rows[-1].site, 1.0) if rows[0].placement in NORM_ON_STREAM else None
        chain.append(AdditionGain(rows, kind, gain, 1.0, behind))
    return _with_factors(chain)


def _with_factors(chain: list[AdditionGain]) -> list[AdditionGain]:
    """Infer the factor on the stream: the median of all additions that may have one, except those nearer to none."""
    ratios: list[float | None] = [None] * len(chain)
    for index, (before, addition) in enumerate(itertools.pairwise(chain), 1):
        arriving = square(before.rows[0].sum_rms) if before.behind is None else before.behind
        if addition.stream and arriving and _may_scale(addition):
            ratios[index] = addition.stream / arriving
    measured = [ratio for ratio in ratios if ratio is not None]
    if not measured:
        return chain
    factor = statistics.median(measured)
    unscaled = [ratio is not None and abs(math.log(ratio)) < abs(math.log(ratio / factor)) for ratio in ratios]
    return [
        dataclasses.replace(addition, factor=factor) if _may_scale(addition) and not plain else addition
        for addition, plain in zip(chain, unscaled, strict=True)
    ]


def typical(chain: Sequence[AdditionGain], values: Sequence[float | None]) -> list[float | None]:
    """Return the typical gain of each addition: the trimmed mean of the measured gains of its kind.

    For sublayers that mix tokens the mean is over the nearest ones. They pass on what tokens have in common, and tokens become
    more alike over the depth (their gradients going backward), so such a gain drifts. The gain is None if fewer than two were
    measured: a law from a single one would be a copy of it.
    """
    measured: dict[tuple[Hashable, ...], list[tuple[int, float]]] = {}
    for index, (addition, value) in enumerate(zip(chain, values, strict=True)):
        if value is not None:
            measured.setdefault(addition.kind, []).append((index, value))
    gains: list[float | None] = []
    for index, addition in enumerate(chain):
        members = measured.get(addition.kind, [])
        if addition.mixes:
            near = max(_MIN_NEAR, math.ceil(len(members) * _NEAR_SHARE))
            members = sorted(members, key=lambda member: abs(member[0] - index))[:near]
        gains.append(_trimmed_mean([value for _, value in members]) if len(members) >= _MIN_MEASURED else None)
    return gains


def _trimmed_mean(values: Sequence[float]) -> float:
    """Average without the most extreme tenth at either end: what compounds is a mean, but outliers must not count."""
    trimmed = math.ceil(len(values) * TRIMMED_SHARE) if len(values) > 2 else 0
    return statistics.fmean(sorted(values)[trimmed : len(values) - trimmed])


def square(value: float | None) -> float | None:
    """Return the square of a value, or None if it was not observed or the square is not finite."""
    return value * value if value is not None and math.isfinite(value * value) else None


def _may_scale(addition: AdditionGain) -> bool:
    """Return whether the addition may have a factor on the stream."""
    return addition.rows[0].placement in NORM_ON_STREAM - {"post"}


def _projection_stds(run: Run) -> dict[int, float]:
    """Return the standard deviation of the residual projection of each site; for a stack of experts, the median."""
    stds: dict[int, list[float]] = {}
    for record in run.parameters:
        if record.writes and record.site is not None and record.std is not None and math.isfinite(record.std):
            stds.setdefault(record.site, []).append(record.std)
    return {site: statistics.median(values) for site, values in stds.items()}


def _output_square(norm: NormRecord) -> float:
    """Return the mean square of a norm's output: that of its gain, reduced by epsilon; for a unit length, divided by width."""
    gain = 1.0 if norm.gain is None else norm.gain
    if norm.kind == "length":
        return gain * gain / norm.width
    entering = square(norm.input_rms)
    kept = entering / (entering + norm.eps) if entering and norm.eps else 1.0
    return gain * gain * kept


def _mean(rows: Sequence[SiteRecord], values: Mapping[int, float]) -> float | None:
    present = [values[row.site] for row in rows if row.site in values]
    return statistics.fmean(present) if len(present) == len(rows) else None
