"""Where the numbers of a run are not those of its baseline: each site, quantity and parameter, two-sided."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck import depth
from propcheck.contrast.comparable import sites_alone
from propcheck.contrast.parameters import redrawn
from propcheck.contrast.tolerance import chance, pooled, scatter
from propcheck.records import Place
from propcheck.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from propcheck.contrast.pairing import Pairing, SitePair
    from propcheck.contrast.parameters import ParameterPairing
    from propcheck.contrast.tolerance import Quantity, Tolerances
    from propcheck.records import ParameterRecord, Run, SiteRecord

How = Literal["changed", "nonfinite", "unobserved", "observed"]

FORWARD: tuple[Quantity, ...] = ("stream_rms", "update_rms")
BACKWARD: tuple[Quantity, ...] = ("grad_stream_norm", "grad_update_norm", "param_grad_norm")

# With one seed on each side nothing tells other draws of the weights from a change. Over 12 draws of each of 13 models of width
# 64 to 384 on one input, any two lay at most a factor of 2.4 apart at any site, and 1.1 in the loss; where a few random numbers
# decide how far a whole branch reaches, as the decays of a mixer with four heads, up to 4. This tool's own limits.
REDRAWN = 3.0
REDRAWN_LOSS = 1.25
# Unit in the last place of the training dtype, and how many of them, of its whole branch's gradient, that of a vector may move.
# It is a sum over all tokens: that of a key's bias is zero in exact arithmetic, and some kernels add up in half precision (in
# bf16 the gradient of a LayerNorm's bias moved by 13 %, 0.7 units, with the number of threads, over 2048 tokens). Products of
# matrices add up in fp32.
_ROUNDING = {"fp32": 2.0**-23, "bf16": 2.0**-8, "bf16-mixed": 2.0**-8, "fp16": 2.0**-11}
_LEFT_BY_ROUNDING = 4.0


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
    compared : Counter
        How many values of each quantity were compared.
    widest : float
        The largest factor that passes for any of them but single parameters.
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
        self.widest = 1 + tolerances.share
        self._end = max((record.site for record in run.sites), default=0) + 1
        self._last: dict[int | None, int] = {one.block: one.site for one in run.sites if one.block is not None}
        self._seeds = (len(baseline.seeds), len(run.seeds))
        self._freedom = sum(self._seeds) - 2
        other, drawn = redrawn(parameters)
        self._other_draws = other > 0 or sites.relative or baseline.seeds != run.seeds
        self._redrawn = self._freedom == 0 and self._other_draws
        # Of the same draws nothing is left to chance. Whose parameters are not known may have other ones.
        self._by_chance = self._freedom > 0 and (self._other_draws or not drawn)
        if self._redrawn:
            what = (
                "Blocks of one relative depth have other draws of their weights"
                if sites.relative
                else f"{other} of {count(drawn, 'parameter')} were drawn anew (other names or other draws)"
            )
            self.notes.append(
                f"{what}, and one seed does not tell that from a change: a factor of {REDRAWN:g} passes, {REDRAWN_LOSS:g} in "
                "the loss, and of a single parameter's gradient any size. Give both --seeds 0..4 to judge by their scatter."
            )
        values = [_by_site(one, quantities) for one in (baseline, run)]
        for quantity in quantities:
            self._sites(quantity, sites.pairs, values)
        self._parameters(parameters)
        self._loss()

    def _sites(
        self, quantity: Quantity, pairs: Sequence[SitePair], values: Sequence[dict[tuple[int, str], list[float]]]
    ) -> None:
        both = [(pair.base, pair.other) for pair in pairs if pair.base is not None and pair.other is not None]
        seen = [[values[side].get((record.site, quantity), []) for side, record in enumerate(pair)] for pair in both]
        if any(two for _, two in seen) and not any(one for one, _ in seen):
            self.notes.append(f"{quantity} was not recorded in the baseline, and is not compared.")
            return
        own = [scatter(one, two) for one, two in seen]
        pool = pooled(one for one in own if one is not None)
        for (base, other), (one, two), spread in zip(both, seen, own, strict=True):
            if one or two:
                allowed = self._allowed(quantity, (other.module, base.module), max(spread or 0.0, pool), self._seeds)
                self._compare(quantity, place_of(other), other.site, one, two, allowed=allowed)

    def _parameters(self, pairing: ParameterPairing) -> None:
        rounding = _LEFT_BY_ROUNDING * _ROUNDING.get(self.run.precision, _ROUNDING["bf16"])
        whole: dict[int | None, float] = {one.site: one.param_grad_norm or 0.0 for one in depth.profile(self.baseline).sites}
        outside = max((pair.base.grad_norm or 0.0 for pair in pairing.pairs if pair.base.site not in whole), default=0.0)
        pool = pooled(pair.base.grad_spread for pair in pairing.pairs if pair.base.grad_spread is not None)
        for pair in pairing.pairs:
            base, other = pair.base, pair.other
            if base.grad_state is None or other.grad_state is None:
                continue
            spreads = [one.grad_spread for one in (base, other) if one.grad_spread is not None]
            # A parameter's norm is that of the first seed, its spread that of all.
            allowed = self._allowed("grad_norm", (other.name, base.name), max((*spreads, pool)), (1, 1))
            one, two = ([] if side.grad_norm is None else [side.grad_norm] for side in (base, other))
            if one or two:
                place = Place(other.site, other.block, other.sublayer, None, other.name)
                slack = rounding * whole.get(base.site, outside) if len(base.shape) < 2 else 0.0
                self._compare("grad_norm", place, self._position(other), one, two, allowed=allowed, slack=slack)

    def _loss(self) -> None:
        if sites_alone(self.baseline, self.run):
            return
        base, value = (_losses(side) for side in (self.baseline, self.run))
        if not (base or value):
            return
        if self._other_draws and all(map(math.isfinite, (*base, *value))) and not self._has_a_size((*base, *value)):
            self.notes.append("The loss is no cross-entropy: of other draws it may be anything, and is not compared.")
            return
        allowed = self._allowed("loss", (), scatter(base, value) or 0.0, (len(base) or 1, len(value) or 1))
        self._compare("loss", Place(), self._end, base, value, allowed=allowed)

    def _has_a_size(self, losses: Sequence[float]) -> bool:
        """Whether losses of other draws are near each other: a cross-entropy is, a sum that takes either sign is not."""
        if self._freedom > 0:
            return min(losses) > 0
        return all(side.loss.uniform is not None for side in (self.baseline, self.run))

    def _position(self, parameter: ParameterRecord) -> int:
        if parameter.site is not None:
            return parameter.site
        # In a block, and in none of its branches: a scale on the stream, or one that nothing uses.
        return -1 if parameter.role == "embedding" else self._last.get(parameter.block, self._end)

    def _allowed(self, quantity: Quantity, names: Iterable[str | None], spread: float, averaged: tuple[int, int]) -> float:
        """Return the factor that passes either way."""
        allowed = 1 + self.tolerances.of(quantity, names)
        if self._redrawn and quantity == "grad_norm":
            return math.inf  # of few elements it is a matter of chance; the gradient of its branch has it too
        if self._redrawn:
            allowed = max(allowed, REDRAWN_LOSS if quantity == "loss" else REDRAWN)
        elif self._by_chance and spread:
            allowed = max(allowed, depth.safe_exp(chance(spread, self._freedom, averaged)))
        if quantity != "grad_norm":
            self.widest = max(self.widest, allowed)
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
        slack: float = 0.0,
    ) -> None:
        self.compared[quantity] += 1
        base, value = _mean(one), _mean(two)

        def differs(how: How, ratio: float | None = None) -> None:
            self.found.append(Difference(quantity, how, place, base, value, ratio, allowed, position))

        if not all(map(math.isfinite, (*one, *two))):
            differs("nonfinite")
        elif base is None or value is None:
            differs("observed" if base is None else "unobserved")
        elif max(abs(base), abs(value)) <= self.tolerances.floor or abs(value - base) <= slack:
            return
        elif not base or not value or (base > 0) != (value > 0):
            differs("changed")
        elif not abs(math.log(value / base)) <= math.log(allowed):  # written so that a NaN would not pass
            differs("changed", value / base)


def _losses(run: Run) -> list[float]:
    """Return the first loss of each seed; of a run that does not have them, their mean."""
    return list(run.loss.by_seed) or ([] if run.loss.value is None else [run.loss.value])


def _by_site(run: Run, quantities: Sequence[Quantity]) -> dict[tuple[int, str], list[float]]:
    """Return the values of all seeds by site and quantity, without those that were not observed."""
    values: dict[tuple[int, str], list[float]] = defaultdict(list)
    for record in run.sites:
        for quantity in quantities:
            value = getattr(record, quantity)
            if value is not None:
                values[record.site, quantity].append(value)
    return values


def _mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, the mean of others, None of none."""
    if not values:
        return None
    if len(values) > 1 and all(0 < value < math.inf for value in values):
        return statistics.geometric_mean(values)
    return sum(values) / len(values)


def place_of(record: SiteRecord) -> Place:
    """Return where a site is."""
    return Place(record.site, record.block, record.sublayer, record.module)


def first_change(found: Sequence[Difference], pairs: Sequence[SitePair]) -> Place | None:
    """Say where the change begins: the first place of the forward pass, or the last one where only gradients changed."""
    lone = [pair.other or pair.base for pair in pairs if pair.base is None or pair.other is None]
    forward = [(record.site, place_of(record)) for record in lone if record is not None]
    forward += [(one.position, one.place) for one in found if one.quantity in FORWARD]
    if forward:
        return min(forward, key=lambda one: one[0])[1]
    backward = [one for one in found if one.place != Place()]  # the loss is no place
    # Of the numbers of one site the most exact: a parameter's, if there is one.
    last = max(backward, key=lambda one: (one.position, one.place.parameter is not None), default=None)
    return None if last is None else last.place
