"""Match the parameters of two runs by name, else by place in the model, including parameters that were fused or split."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.match_sites import SitePair
    from propcheck.records import ParameterRecord

# How far the largest magnitude, in standard deviations, and the mean, in standard errors, of one draw may move when it is
# rescaled. Rounding to half precision moved the first by 1.5/256 at most. Two independent draws of a tensor agree within 3/256
# in the first one time in seven, and within 0.1 in the second one time in eighteen.
_FULL_PRECISION = {"float32", "float64"}
_ABSMAX_MOVES, _ABSMAX_MOVES_IN_HALF = 1e-3, 3 / 256
_MEAN_MOVES = 0.1


@dataclass(frozen=True, slots=True)
class ParameterPair:
    """One parameter in two runs; ``same_name`` says whether the names agree, and with them the random draws."""

    base: ParameterRecord
    other: ParameterRecord
    same_name: bool


@dataclass(frozen=True, slots=True)
class ParameterMatching:
    """The matched parameters of two runs.

    Attributes
    ----------
    pairs
        Parameters of the same name, and those that are the only one of their role and shape at a place.
    regrouped
        Parameters of the base run whose place has equally many elements in other tensors, such as fused queries, keys and
        values.
    missing, new
        The rest of the base run, and of the other run.
    """

    pairs: tuple[ParameterPair, ...]
    regrouped: tuple[ParameterRecord, ...]
    missing: tuple[ParameterRecord, ...]
    new: tuple[ParameterRecord, ...]


def match_parameters(
    base: Sequence[ParameterRecord], other: Sequence[ParameterRecord], sites: Sequence[SitePair]
) -> ParameterMatching:
    """Match trained and frozen parameters; buffers are left out.

    Parameters
    ----------
    base, other
        The rows of ``parameters.parquet``.
    sites
        The matched sites: a parameter without a partner of its name is looked for in the same branch.
    """
    base = [parameter for parameter in base if parameter.kind == "parameter"]
    other = [parameter for parameter in other if parameter.kind == "parameter"]
    pairs, unmatched, other_unmatched = _match_by_name(base, other)
    regrouped: list[ParameterRecord] = []
    missing: list[ParameterRecord] = []
    new: list[ParameterRecord] = []
    for group, other_group in _by_place(unmatched, other_unmatched, sites):
        matched = _match_by_role_and_shape(group, other_group)
        pairs += matched
        paired = {id(parameter) for pair in matched for parameter in (pair.base, pair.other)}
        rest, other_rest = ([each for each in side if id(each) not in paired] for side in (group, other_group))
        if sum(parameter.numel for parameter in rest) == sum(parameter.numel for parameter in other_rest):
            regrouped += rest
        else:
            missing += rest
            new += other_rest
    return ParameterMatching(tuple(pairs), tuple(regrouped), tuple(missing), tuple(new))


def _match_by_name(
    base: Sequence[ParameterRecord], other: Sequence[ParameterRecord]
) -> tuple[list[ParameterPair], list[ParameterRecord], list[ParameterRecord]]:
    """Return the pairs of the same name and shape, and what is left of either run. Tied parameters have several names."""
    by_name = {name: parameter for parameter in other for name in parameter.name.split(" = ")}
    pairs: list[ParameterPair] = []
    taken: set[str] = set()
    unmatched: list[ParameterRecord] = []
    for parameter in base:
        partner = next((by_name[name] for name in parameter.name.split(" = ") if name in by_name), None)
        if partner is None or partner.name in taken or partner.shape != parameter.shape:
            unmatched.append(parameter)
        else:
            pairs.append(ParameterPair(parameter, partner, same_name=True))
            taken.add(partner.name)
    return pairs, unmatched, [parameter for parameter in other if parameter.name not in taken]


def _by_place(
    base: Sequence[ParameterRecord], other: Sequence[ParameterRecord], sites: Sequence[SitePair]
) -> list[tuple[list[ParameterRecord], list[ParameterRecord]]]:
    """Group the parameters of both runs by site and by whether they are trained."""
    base_site = {pair.other.site: pair.base.site for pair in sites if pair.base is not None and pair.other is not None}
    groups: dict[object, tuple[list[ParameterRecord], list[ParameterRecord]]] = defaultdict(lambda: ([], []))
    for parameter in base:
        groups[parameter.site, parameter.requires_grad][0].append(parameter)
    for parameter in other:
        place = None if parameter.site is None else base_site.get(parameter.site, ("new", parameter.site))
        groups[place, parameter.requires_grad][1].append(parameter)
    return list(groups.values())


def _match_by_role_and_shape(base: Sequence[ParameterRecord], other: Sequence[ParameterRecord]) -> list[ParameterPair]:
    """Match parameters that are the only one of their role and shape in both groups."""

    def unique(parameters: Sequence[ParameterRecord]) -> dict[object, ParameterRecord]:
        amounts = Counter((parameter.role, parameter.shape) for parameter in parameters)
        return {(each.role, each.shape): each for each in parameters if amounts[each.role, each.shape] == 1}

    candidates, partners = unique(base), unique(other)
    return [ParameterPair(candidates[key], partners[key], same_name=False) for key in candidates if key in partners]


def count_redrawn(parameters: ParameterMatching) -> tuple[int, int]:
    """Count the random parameters with other draws in the second run, and all random parameters.

    A weight is drawn from its name. So the same code has the same draws, and code with another std has them up to a factor;
    renamed parameters have new draws.
    """
    random = [pair for pair in parameters.pairs if pair.base.std]
    redrawn = [pair for pair in random if not (pair.same_name and _is_same_draw(pair.base, pair.other))]
    regrouped = sum(bool(parameter.std) for parameter in parameters.regrouped)
    return len(redrawn) + regrouped, len(random) + regrouped


def _is_same_draw(base: ParameterRecord, other: ParameterRecord) -> bool:
    """Whether two tensors are equal up to a factor; true if one is constant.

    Then their largest magnitudes are equally many standard deviations, and their means equally many standard errors.
    """
    if not base.std or not other.std or not base.absmax or not other.absmax:
        return True
    ratio = base.absmax / base.std * other.std / other.absmax
    limit = max(_ABSMAX_MOVES if each.dtype in _FULL_PRECISION else _ABSMAX_MOVES_IN_HALF for each in (base, other))
    means = [each.mean / each.std * math.sqrt(each.numel) for each in (base, other) if each.mean is not None and each.std]
    mean_moved = abs(means[0] - means[1]) if len(means) == 2 else 0.0
    return not abs(ratio - 1) > limit and not mean_moved > _MEAN_MOVES  # written so that NaN counts as the same draw
