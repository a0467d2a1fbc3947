"""Where the numbers of a run are not those of its baseline: each site, quantity and parameter, two-sided."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from propcheck.analysis import profile as depth
from propcheck.comparison.comparable import other_machine, sites_alone
from propcheck.comparison.match_parameters import redrawn
from propcheck.comparison.places import parameter_place, place_of, positions
from propcheck.config.tolerances import chance, pooled, scatter, scatter_together
from propcheck.formatting import count, number
from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from propcheck.comparison.match_parameters import ParameterPair, ParameterPairing
    from propcheck.comparison.match_sites import Pairing, SitePair
    from propcheck.config.tolerances import Quantity, Tolerances
    from propcheck.records import ParameterRecord, Run

How = Literal["changed", "nonfinite", "unobserved", "observed"]
_BySeed = dict[int, float]

FORWARD: tuple[Quantity, ...] = ("stream_rms", "update_rms")
BACKWARD: tuple[Quantity, ...] = ("grad_stream_norm", "grad_update_norm", "param_grad_norm")

# With one seed on each side nothing tells other draws of the weights from a change. Over 12 draws of each of 13 models of width
# 64 to 384 on one input, any two lay at most a factor of 2.4 apart at any site, and 1.1 in the loss; where a few random numbers
# decide how far a whole branch reaches, as the decays of a mixer with four heads, up to 4. This tool's own limits.
REDRAWN = 3.0
REDRAWN_LOSS = 1.25
# Unit in the last place of the training dtype. The gradient of a vector (a bias, the gain of a norm) is a sum over all tokens.
# That of a key's bias is zero in exact arithmetic: what rounding leaves was 2e-5 of its branch's gradient in bf16 and 2e-9 in
# fp32, where no other vector is below 1e-3; a tenth of a unit lies between. And some kernels add up in half precision: with the
# number of threads the gradient of a LayerNorm's bias moved by 25 % in bf16, over 2048 tokens. Products of matrices add up in
# fp32.
_UNIT = {"fp32": 2.0**-23, "bf16": 2.0**-8, "bf16-mixed": 2.0**-8, "fp16": 2.0**-11}
_LEFT_BY_ROUNDING = 0.1
_VECTOR_IN_HALF = 1.5
# The standard deviation of n draws is off by 1/sqrt(2n), and by up to twice that where the tails are heavy.
_STANDARD_ERRORS = 5.0
# Numbers of the same draws on the same machine are equal to the bit, with other threads or vector units to 3e-7 (docs/gate.md);
# in half precision another kind of processor moved them by 1e-3.
_EQUAL, _EQUAL_IN_HALF = 1e-6, 5e-3


@dataclass(frozen=True, slots=True)
class Difference:
    """One number that is not as it was.

    ``ratio`` is value / baseline where both have one sign and are finite, ``tolerance`` the factor that passes either way.
    ``position`` orders places along the forward pass: the site; before all sites for the embedding, behind them for the head.
    """

    quantity: Quantity
    how: How
    place: Place
    baseline: float | None
    value: float | None
    ratio: float | None
    tolerance: float
    position: int

    @property
    def forward(self) -> bool:
        """Whether it travels with the forward pass, as what it starts from does too."""
        return self.quantity in (*FORWARD, "parameter_rms")


class Deviations:
    """Compares quantity by quantity, and keeps what is outside its tolerance.

    Parameters
    ----------
    run, baseline
        The two.
    tolerances
        What the user allows.
    sites, parameters
        What belongs together.
    quantities
        Which columns of the sites are compared; the gradients of the parameters and the loss always are.

    Attributes
    ----------
    found : list of Difference
        In the order of comparison.
    moved : list of tuple
        Position and place of what differs at all in the forward pass, where draws and machine are the same; else empty.
    compared : Counter
        How many values of each quantity were compared.
    allowed : dict
        Of each quantity the smallest and the largest factor that passes somewhere.
    notes : list of str
        Sentences about the comparison.
    """

    def __init__(
        self,
        run: Run,
        baseline: Run,
        tolerances: Tolerances,
        sites: Pairing,
        parameters: ParameterPairing,
        quantities: Sequence[Quantity] = (*FORWARD, *BACKWARD),
    ) -> None:
        self.run, self.baseline, self.tolerances = run, baseline, tolerances
        self.found: list[Difference] = []
        self.compared: Counter[Quantity] = Counter()
        self.notes: list[str] = []
        self.allowed: dict[Quantity, tuple[float, float]] = {}
        self._chance: dict[Quantity, float] = {}
        self.moved: list[tuple[int, Place]] = []
        self._position = positions(run)
        self._end = max((record.site for record in run.sites), default=0) + 1
        shared = [seed for seed in baseline.seeds if seed in run.seeds]
        self._counted = [set(shared or one.seeds) for one in (baseline, run)]
        self._seeds = (len(self._counted[0]), len(self._counted[1]))
        self._freedom = sum(self._seeds) - 2
        # Parameters are those of the first seed.
        self._first_seed = baseline.seeds[:1] == run.seeds[:1]
        other, drawn = redrawn(parameters) if self._first_seed else (0, 0)
        self._other_draws = other > 0 or sites.relative or not shared
        self._redrawn = self._freedom == 0 and self._other_draws
        self._equal = _EQUAL if _UNIT.get(run.precision) == _UNIT["fp32"] else _EQUAL_IN_HALF
        self._exact = not self._other_draws and self._first_seed and not other_machine(run, baseline)
        # Of the same draws nothing is left to chance. Whose parameters are not known may have other ones.
        self._left_to_chance = self._freedom > 0 and (self._other_draws or not drawn)
        if shared and baseline.seeds != run.seeds:
            self.notes.append(f"Compared by the seeds that both have: {', '.join(map(str, shared))}.")
        values = [_by_site(one, quantities, seeds) for one, seeds in zip((baseline, run), self._counted, strict=True)]
        for quantity in quantities:
            self._sites(quantity, sites.pairs, values)
        self._parameters(parameters)
        self._loss()
        if self._other_draws:
            what = f"{other} of {count(drawn, 'parameter')} were drawn anew (other names or other draws)"
            if sites.relative:
                what = "Blocks of one relative depth have other draws of their weights"
            elif not shared:
                what = "The seeds are others, and so are all draws"
            self.notes.append(f"{what}, {self._said_of_chance()}")

        self._say_unmatched(sites.pairs, parameters)

    def by_chance(self, metric: str) -> float:
        """Return the factor by which a number of this name may differ by other draws or by the tolerance of all numbers.

        What the user lets pass of single quantities and modules is not in it. That of a metric that is not compared is the
        largest of those that are, but for single parameters.
        """
        several = {name: factor for name, factor in self._chance.items() if name not in ("grad_norm", "parameter_rms")}
        among = [factor for name, factor in several.items() if name == metric] or list(several.values())
        return max(1 + self.tolerances.share, *among)

    def _say_unmatched(self, pairs: Sequence[SitePair], parameters: ParameterPairing) -> None:
        names = {one.module for pair in pairs for one in (pair.base, pair.other) if one is not None and one.module is not None}
        names |= {one.name for pair in parameters.pairs for one in (pair.base, pair.other)}
        idle = [glob for glob in self.tolerances.modules if not any(fnmatchcase(name, glob) for name in names)]
        if idle:
            self.notes.append(f"No module and no parameter is called so: {', '.join(idle)}.")

    def _said_of_chance(self) -> str:
        if self._redrawn:
            return (
                f"and one seed does not tell that from a change: a factor of {REDRAWN:g} passes, {REDRAWN_LOSS:g} in the loss, "
                "and of a single parameter's gradient any size. Give both --seeds 0..4 to judge by their scatter."
            )
        most = ", ".join(f"{name} x{number(self.allowed[name][1])}" for name in self.allowed)
        return f"so what the scatter over the seeds explains passes. At most: {most}."

    def _sites(self, quantity: Quantity, pairs: Sequence[SitePair], values: Sequence[dict[tuple[int, str], _BySeed]]) -> None:
        both = [(pair.base, pair.other) for pair in pairs if pair.base is not None and pair.other is not None]
        seen = [[values[side].get((record.site, quantity), {}) for side, record in enumerate(pair)] for pair in both]
        if any(two for _, two in seen) and not any(one for one, _ in seen):
            self.notes.append(f"{quantity} was not recorded in the baseline, and is not compared.")
            return
        chances = self._chances(seen)
        for (base, other), (one, two), chance_ in zip(both, seen, chances, strict=True):
            if one or two:
                allowed = self._allowed(quantity, (other.module, base.module), chance_)
                self._compare(quantity, place_of(other), other.site, list(one.values()), list(two.values()), allowed=allowed)

    def _chances(self, seen: Sequence[Sequence[_BySeed]]) -> list[float]:
        """Return how far the numbers of each place may differ by chance, in natural logarithms; 0 where nothing is left to it.

        By the scatter of either side, and by that of their ratio, which is smaller where they share inputs and most weights,
        but known from half as many values: the smaller of the two.
        """
        if not self._left_to_chance:
            return [0.0] * len(seen)
        apart = [scatter(list(one.values()), list(two.values())) for one, two in seen]
        # Runs that do not say what they drew are held against their scatter alone.
        together = [scatter_together(one, two) if self._other_draws else None for one, two in seen]
        seeds = self._seeds[0]
        pool, pool_together = (pooled(one for one in some if one is not None) for some in (apart, together))
        found = []
        for spread, ratio in zip(apart, together, strict=True):
            bound = chance(max(spread or 0.0, pool), self._freedom, self._seeds)
            if ratio is not None:
                bound = min(bound, chance(max(ratio, pool_together), seeds - 1, (seeds,)))
            found.append(bound)
        return found

    def _parameters(self, pairing: ParameterPairing) -> None:
        if not self._first_seed:
            self.notes.append("Single parameters are those of the first seed, which differs: they are not compared.")
            return
        unit = _UNIT.get(self.run.precision, _UNIT["bf16"])
        half = unit > _UNIT["fp32"]
        whole: dict[int | None, float] = {one.site: one.param_grad_norm or 0.0 for one in depth.profile(self.baseline).sites}
        outside = max((pair.base.grad_norm or 0.0 for pair in pairing.pairs if pair.base.site not in whole), default=0.0)
        pool = pooled(pair.base.grad_spread for pair in pairing.pairs if pair.base.grad_spread is not None)
        for pair in pairing.pairs:
            base, other = pair.base, pair.other
            place, position = parameter_place(other), self._position[other.name]
            self._initial(pair, place, position)
            if base.grad_state is None or other.grad_state is None:
                continue
            spreads = [one.grad_spread for one in (base, other) if one.grad_spread is not None]
            # A parameter's norm is that of the first seed, its spread that of all.
            by_chance = chance(max((*spreads, pool)), self._freedom, (1, 1)) if self._left_to_chance else 0.0
            floor = self.tolerances.floor
            if len(base.shape) < 2:
                floor = max(floor, _LEFT_BY_ROUNDING * unit * whole.get(base.site, outside))
                by_chance = max(by_chance, math.log(_VECTOR_IN_HALF) if half else 0.0)
            allowed = self._allowed("grad_norm", (other.name, base.name), by_chance)
            one, two = ([] if side.grad_norm is None else [side.grad_norm] for side in (base, other))
            if one or two:
                self._compare("grad_norm", place, position, one, two, allowed=allowed, floor=floor)

    def _initial(self, pair: ParameterPair, place: Place, position: int) -> None:
        """Compare what a parameter starts from: its RMS is known however it is drawn."""
        one, two = _rms(pair.base), _rms(pair.other)
        if one is None or two is None:
            return
        drawn = self._other_draws and bool(pair.base.std or pair.other.std)
        by_chance = _STANDARD_ERRORS / math.sqrt(pair.base.numel) if drawn else 0.0
        allowed = self._allowed("parameter_rms", (pair.other.name, pair.base.name), by_chance)
        self._compare("parameter_rms", place, position, [one], [two], allowed=allowed)

    def _loss(self) -> None:
        if sites_alone(self.baseline, self.run):
            return
        by_seed = [
            {seed: loss for seed, loss in zip(side.seeds, _losses(side), strict=False) if seed in counted}
            for side, counted in zip((self.baseline, self.run), self._counted, strict=True)
        ]
        base, value = (list(one.values()) for one in by_seed)
        if not (base or value):
            return
        if self._other_draws and all(map(math.isfinite, (*base, *value))) and not self._has_a_size((*base, *value)):
            self.notes.append("The loss is no cross-entropy: of other draws it may be anything, and is not compared.")
            return
        allowed = self._allowed("loss", (), *self._chances([by_seed]))
        self._compare("loss", Place(), self._end, base, value, allowed=allowed)

    def _has_a_size(self, losses: Sequence[float]) -> bool:
        """Whether losses of other draws are near each other: a cross-entropy is, a sum that takes either sign is not."""
        if self._freedom > 0:
            return min(losses) > 0
        return all(side.loss.uniform is not None for side in (self.baseline, self.run))

    def _allowed(self, quantity: Quantity, names: Iterable[str | None], by_chance: float) -> float:
        """Return the factor that passes either way."""
        factor = depth.safe_exp(by_chance)
        if self._redrawn and quantity == "grad_norm":
            factor = math.inf  # of few elements it is a matter of chance; the gradient of its branch has it too
        elif self._redrawn and quantity != "parameter_rms":
            factor = max(factor, REDRAWN_LOSS if quantity == "loss" else REDRAWN)
        self._chance[quantity] = max(self._chance.get(quantity, 1.0), factor)
        allowed = max(1 + self.tolerances.of(quantity, names), factor)
        least, most = self.allowed.get(quantity, (allowed, allowed))
        self.allowed[quantity] = (min(least, allowed), max(most, allowed))
        return allowed

    def _compare(
        self,
        quantity: Quantity,
        place: Place,
        position: int,
        one: list[float],
        two: list[float],
        *,
        allowed: float,
        floor: float | None = None,
    ) -> None:
        self.compared[quantity] += 1
        base, value = _mean(one), _mean(two)

        def differs(how: How, ratio: float | None = None) -> None:
            self.found.append(Difference(quantity, how, place, base, value, ratio, allowed, position))

        if not all(map(math.isfinite, (*one, *two))):
            differs("nonfinite")
        elif base is None or value is None:
            differs("observed" if base is None else "unobserved")
        elif max(abs(base), abs(value)) <= (self.tolerances.floor if floor is None else floor):
            return
        elif not base or not value or (base > 0) != (value > 0):
            differs("changed")
        else:
            distance = abs(math.log(value / base))
            if not distance <= math.log(allowed):  # written so that a NaN would not pass
                differs("changed", value / base)
            if self._exact and distance > self._equal and quantity in (*FORWARD, "parameter_rms"):
                self.moved.append((position, place))


def _losses(run: Run) -> list[float]:
    """Return the first loss of each seed; of a run that does not have them, their mean."""
    return list(run.loss.by_seed) or ([] if run.loss.value is None else [run.loss.value])


def _rms(parameter: ParameterRecord) -> float | None:
    if parameter.mean is None or parameter.std is None:
        return None
    return math.hypot(parameter.mean, parameter.std)


def _by_site(run: Run, quantities: Sequence[Quantity], seeds: Collection[int]) -> dict[tuple[int, str], _BySeed]:
    """Return the values of these seeds by site and quantity, without those that were not observed."""
    values: dict[tuple[int, str], _BySeed] = defaultdict(dict)
    for record in run.sites:
        for quantity in quantities if record.seed in seeds else ():
            value = getattr(record, quantity)
            if value is not None:
                values[record.site, quantity][record.seed] = value
    return values


def _mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, the mean of others, None of none."""
    if not values:
        return None
    if len(values) > 1 and all(0 < value < math.inf for value in values):
        return statistics.geometric_mean(values)
    return sum(values) / len(values)
