"""Which parameters of two runs are the same: by name, else by their place in the model, also where they were fused."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.match_sites import SitePair
    from propcheck.records import ParameterRecord


@dataclass(frozen=True, slots=True)
class ParameterPair:
    """One parameter in two runs. ``named`` says that both have the same name, so that its draws are paired too."""

    base: ParameterRecord
    other: ParameterRecord
    named: bool


@dataclass(frozen=True, slots=True)
class ParameterPairing:
    """The parameters of two runs, put together.

    Attributes
    ----------
    pairs
        Those that are in both, under the same name or as the only one of a shape and role at a place.
    regrouped
        Those that are in both in another arrangement: as many elements at one place, such as queries, keys and values in one.
    missing, new
        The others, of the base and of the other run.
    """

    pairs: tuple[ParameterPair, ...]
    regrouped: tuple[ParameterRecord, ...]
    missing: tuple[ParameterRecord, ...]
    new: tuple[ParameterRecord, ...]


def pair_parameters(
    base: Sequence[ParameterRecord], other: Sequence[ParameterRecord], sites: Sequence[SitePair]
) -> ParameterPairing:
    """Put together the trained and frozen parameters of two runs; buffers are none.

    Parameters
    ----------
    base, other
        The rows of ``parameters.parquet``.
    sites
        The sites that belong together: a parameter whose name is not in both is looked for in the same branch.
    """
    mine = [one for one in base if one.kind == "parameter"]
    theirs = [one for one in other if one.kind == "parameter"]
    by_name = {alias: one for one in theirs for alias in one.name.split(" = ")}
    pairs: list[ParameterPair] = []
    taken: set[str] = set()
    rest: list[ParameterRecord] = []
    for one in mine:
        found = next((by_name[alias] for alias in one.name.split(" = ") if alias in by_name), None)
        if found is None or found.name in taken or found.shape != one.shape:
            rest.append(one)
        else:
            pairs.append(ParameterPair(one, found, named=True))
            taken.add(found.name)
    left = [one for one in theirs if one.name not in taken]
    same = {pair.other.site: pair.base.site for pair in sites if pair.base is not None and pair.other is not None}
    groups: dict[object, tuple[list[ParameterRecord], list[ParameterRecord]]] = defaultdict(lambda: ([], []))
    for one in rest:
        groups[one.site, one.requires_grad][0].append(one)
    for one in left:
        where = None if one.site is None else same.get(one.site, ("new", one.site))
        groups[where, one.requires_grad][1].append(one)
    regrouped: list[ParameterRecord] = []
    missing: list[ParameterRecord] = []
    new: list[ParameterRecord] = []
    for ours, others in groups.values():
        alike = _alike(ours, others)
        pairs += [ParameterPair(one, two, named=False) for one, two in alike]
        paired = {id(one) for pair in alike for one in pair}
        gone, come = ([one for one in side if id(one) not in paired] for side in (ours, others))
        if sum(one.numel for one in gone) == sum(one.numel for one in come):
            regrouped += gone
        else:
            missing += gone
            new += come
    return ParameterPairing(tuple(pairs), tuple(regrouped), tuple(missing), tuple(new))


def _alike(ours: Sequence[ParameterRecord], others: Sequence[ParameterRecord]) -> list[tuple[ParameterRecord, ParameterRecord]]:
    """Match what is the only one of its role and shape on both sides."""

    def only(records: Sequence[ParameterRecord]) -> dict[object, ParameterRecord]:
        amounts = Counter((one.role, one.shape) for one in records)
        return {(one.role, one.shape): one for one in records if amounts[one.role, one.shape] == 1}

    mine, theirs = only(ours), only(others)
    return [(mine[key], theirs[key]) for key in mine if key in theirs]


def redrawn(pairing: ParameterPairing) -> tuple[int, int]:
    """Count the parameters whose values are other draws, of how many: those of other names, and those that no scale explains.

    Weights are drawn from their names, so that a run of the same code has the same draws, and one that scales them (another
    std) has the same up to a factor.
    """
    drawn = [pair for pair in pairing.pairs if pair.base.std]
    others = [pair for pair in drawn if not (pair.named and _same_draw(pair.base, pair.other))]
    regrouped = sum(bool(one.std) for one in pairing.regrouped)
    return len(others) + regrouped, len(drawn) + regrouped


# By chance two draws of a tensor agree in the first to 3/256 in one of seven, and in the second in one of eighteen.
_FARTHEST = {"float32": 1e-3, "float64": 1e-3}
_FARTHEST_IN_HALF = 3 / 256
_MEAN = 0.1


def _same_draw(base: ParameterRecord, other: ParameterRecord) -> bool:
    """Whether two tensors are one up to a factor.

    Then their largest values lie equally many standard deviations out, and their means equally many standard errors off. Drawn
    in half precision, with another scale, a draw rounds otherwise: the first was seen to move by 1.5/256. A constant, or what
    is not finite, is no draw.
    """
    if not base.std or not other.std or not base.absmax or not other.absmax:
        return True
    ratio = base.absmax / base.std * other.std / other.absmax
    farthest = max(_FARTHEST.get(one.dtype, _FARTHEST_IN_HALF) for one in (base, other))
    means = [one.mean / one.std * math.sqrt(one.numel) for one in (base, other) if one.mean is not None and one.std]
    moved = abs(means[0] - means[1]) if len(means) == 2 else 0.0
    return not abs(ratio - 1) > farthest and not moved > _MEAN  # NaN is no draw
