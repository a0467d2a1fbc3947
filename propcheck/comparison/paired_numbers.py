"""Pair the numbers of two matched runs: at each site, of each parameter, and the loss, with the factor left to chance."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.profile import profile
from propcheck.comparison.chance import chance_bound, pooled_scatter
from propcheck.comparison.places import parameter_place, parameter_positions, site_place
from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from propcheck.comparison.draws import BySeed, DrawComparison
    from propcheck.comparison.match_parameters import ParameterPair
    from propcheck.comparison.match_runs import MatchedRuns
    from propcheck.config.tolerances import Quantity
    from propcheck.records import ParameterRecord, Run

# Unit in the last place of the training dtype. The gradient of a vector (a bias, a norm's gain) is a sum over all tokens. That
# of a key's bias is zero in exact arithmetic: rounding left 2e-5 of its branch's gradient in bf16 and 2e-9 in fp32, where no
# other vector was below 1e-3; a tenth of a unit lies between. Some kernels also accumulate in half precision: the number of
# threads moved the gradient of a LayerNorm's bias by 25 % in bf16, over 2048 tokens. Matrix products accumulate in fp32.
UNIT = {"fp32": 2.0**-23, "bf16": 2.0**-8, "bf16-mixed": 2.0**-8, "fp16": 2.0**-11}
_ROUNDING_RESIDUE = 0.1
_HALF_PRECISION_VECTOR_FACTOR = 1.5
# The standard deviation of n draws is off by 1/sqrt(2n), and by up to twice that for heavy tails.
_STANDARD_ERRORS = 5.0


@dataclass(frozen=True, slots=True)
class NumberPair:
    """One number of two runs.

    Attributes
    ----------
    quantity, place, position
        What it is, where, and its order in the forward pass (:func:`propcheck.comparison.places.parameter_positions`).
    names
        Module paths or parameter names that a tolerance may match.
    baseline, run
        Its values, one per seed; empty if it was not observed.
    chance_factor
        The factor, in either direction, that chance explains.
    floor
        Magnitude that rounding explains.
    """

    quantity: Quantity
    place: Place
    position: int
    names: tuple[str | None, ...]
    baseline: tuple[float, ...]
    run: tuple[float, ...]
    chance_factor: float
    floor: float = 0.0


def pair_sites(matched: MatchedRuns, draws: DrawComparison, quantity: Quantity) -> list[NumberPair]:
    """Pair one quantity at every site that has it in at least one run."""
    common = matched.sites.common
    columns = [_by_site(run, quantity, seeds) for run, seeds in zip((matched.baseline, matched.run), draws.seeds, strict=True)]
    values = [(columns[0].get(base.site, {}), columns[1].get(other.site, {})) for base, other in common]
    return [
        NumberPair(
            quantity=quantity,
            place=site_place(other),
            position=other.site,
            names=(other.module, base.module),
            baseline=tuple(expected.values()),
            run=tuple(actual.values()),
            chance_factor=draws.factor(quantity, limit),
        )
        for (base, other), (expected, actual), limit in zip(common, values, draws.limits(values), strict=True)
        if expected or actual
    ]


def _by_site(run: Run, quantity: Quantity, seeds: Collection[int]) -> dict[int, BySeed]:
    """Return the observed values of these seeds, by site and seed."""
    values: dict[int, BySeed] = defaultdict(dict)
    for site in run.sites:
        value = getattr(site, quantity) if site.seed in seeds else None
        if value is not None:
            values[site.site][site.seed] = value
    return values


def pair_parameters(matched: MatchedRuns, draws: DrawComparison) -> Iterator[NumberPair]:
    """Pair the initial RMS and the gradient norm of every parameter; the records are those of the first seed."""
    pairs = matched.parameters.pairs
    positions = parameter_positions(matched.run)
    residues = _rounding_residues(matched)
    spread = pooled_scatter(pair.base.grad_spread for pair in pairs if pair.base.grad_spread is not None)
    for pair in pairs:
        number = functools.partial(
            NumberPair,
            place=parameter_place(pair.other),
            position=positions[pair.other.name],
            names=(pair.other.name, pair.base.name),
        )
        initial = (_rms(pair.base), _rms(pair.other))
        if None not in initial:
            factor = draws.factor("parameter_rms", _initial_limit(pair, draws))
            yield number("parameter_rms", baseline=_observed(initial[0]), run=_observed(initial[1]), chance_factor=factor)
        if pair.base.grad_state is None or pair.other.grad_state is None:
            continue
        # The norm is that of the first seed, the spread that of all.
        spreads = [each.grad_spread for each in (pair.base, pair.other) if each.grad_spread is not None]
        limit = chance_bound(max((*spreads, spread)), draws.freedom, (1, 1)) if draws.scattered else 0.0
        floor = 0.0
        if len(pair.base.shape) < 2:
            floor = residues.get(pair.base.site, residues[None])
            if _unit(matched.run) > UNIT["fp32"]:
                limit = max(limit, math.log(_HALF_PRECISION_VECTOR_FACTOR))
        yield number(
            "grad_norm",
            baseline=_observed(pair.base.grad_norm),
            run=_observed(pair.other.grad_norm),
            chance_factor=draws.factor("grad_norm", limit),
            floor=floor,
        )


def _observed(value: float | None) -> tuple[float, ...]:
    return () if value is None else (value,)


def _rounding_residues(matched: MatchedRuns) -> dict[int | None, float]:
    """Return by site what rounding leaves of a vector's gradient that is zero in exact arithmetic; None: outside the sites."""
    gradients = {site.site: site.param_grad_norm or 0.0 for site in profile(matched.baseline).sites}
    outside = (pair.base.grad_norm or 0.0 for pair in matched.parameters.pairs if pair.base.site not in gradients)
    scale = _ROUNDING_RESIDUE * _unit(matched.run)
    return {None: scale * max(outside, default=0.0), **{site: scale * gradient for site, gradient in gradients.items()}}


def _unit(run: Run) -> float:
    return UNIT.get(run.precision, UNIT["bf16"])


def _rms(parameter: ParameterRecord) -> float | None:
    return None if parameter.mean is None or parameter.std is None else math.hypot(parameter.mean, parameter.std)


def _initial_limit(pair: ParameterPair, draws: DrawComparison) -> float:
    """Return the logarithm by which the RMS of n random elements may differ between draws: 5 / sqrt(n)."""
    is_redrawn = draws.differ and bool(pair.base.std or pair.other.std)
    return _STANDARD_ERRORS / math.sqrt(pair.base.numel) if is_redrawn else 0.0


def pair_losses(matched: MatchedRuns, draws: DrawComparison) -> NumberPair | None:
    """Pair the first losses of the compared seeds; None if neither run has any, or one has only sites."""
    if matched.sites_only:
        return None
    baseline, run = (
        {seed: loss for seed, loss in zip(run.seeds, _losses(run), strict=False) if seed in seeds}
        for run, seeds in zip((matched.baseline, matched.run), draws.seeds, strict=True)
    )
    if not (baseline or run):
        return None
    (limit,) = draws.limits([(baseline, run)])
    return NumberPair(
        quantity="loss",
        place=Place(),
        position=max((site.site for site in matched.run.sites), default=0) + 1,
        names=(),
        baseline=tuple(baseline.values()),
        run=tuple(run.values()),
        chance_factor=draws.factor("loss", limit),
    )


def _losses(run: Run) -> Sequence[float]:
    """Return the first loss of each seed; the mean of an old run that does not have them."""
    return run.loss.by_seed or (() if run.loss.value is None else (run.loss.value,))


def is_loss_comparable(losses: NumberPair, matched: MatchedRuns, draws: DrawComparison) -> bool:
    """Whether losses of different draws are similar: those of a cross-entropy are, those of a sum of either sign are not."""
    values = (*losses.baseline, *losses.run)
    if not draws.differ or not all(map(math.isfinite, values)):
        return True
    if draws.freedom > 0:
        return min(values) > 0
    return all(run.loss.uniform is not None for run in (matched.baseline, matched.run))
