"""Whether two runs share their random draws, and how far a number may differ by chance if they do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.profile import safe_exp
from propcheck.comparison.chance import chance_bound, log_scatter, paired_scatter, pooled_scatter
from propcheck.comparison.comparable import environment_mismatches
from propcheck.comparison.match_parameters import count_redrawn
from propcheck.formatting import count, number

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.comparison.match_runs import MatchedRuns
    from propcheck.config.tolerances import Quantity

# With one seed per run, new draws of the weights cannot be told from a change. Over 12 draws each of 13 models of width 64 to
# 384 on one input, any two were at most a factor of 2.4 apart at any site, and 1.1 in the loss; up to 4 where a few random
# numbers decide how far a whole branch reaches, as the decays of a mixer with four heads do. This tool's limits (docs/gate.md).
ONE_SEED_FACTOR = 3.0
ONE_SEED_LOSS_FACTOR = 1.25

BySeed = dict[int, float]


@dataclass(frozen=True, slots=True)
class DrawComparison:
    """The seeds and random draws of two runs.

    Attributes
    ----------
    seeds
        Seeds that are compared, of the baseline and of the run: those that both have, or all if they share none.
    shared_seeds
        Seeds that both runs have, in the baseline's order.
    same_seeds
        Whether the runs have the same seeds.
    same_first_seed
        Whether they have the same first seed, which is that of the parameter records.
    redrawn, random
        Number of random parameters whose draws differ, and of all random parameters.
    relative
        Whether blocks were matched by relative depth.
    same_environment
        Whether versions, device and threads agree.
    """

    seeds: tuple[frozenset[int], frozenset[int]]
    shared_seeds: tuple[int, ...]
    same_seeds: bool
    same_first_seed: bool
    redrawn: int
    random: int
    relative: bool
    same_environment: bool

    @property
    def differ(self) -> bool:
        """Whether anything was drawn differently."""
        return self.redrawn > 0 or self.relative or not self.shared_seeds

    @property
    def counts(self) -> tuple[int, int]:
        """Number of compared seeds of the baseline and of the run."""
        return len(self.seeds[0]), len(self.seeds[1])

    @property
    def freedom(self) -> int:
        """Degrees of freedom of a scatter over the seeds of both runs."""
        return sum(self.counts) - 2

    @property
    def one_seed(self) -> bool:
        """Whether draws differ and no second seed shows by how much that moves numbers."""
        return self.differ and self.freedom == 0

    @property
    def scattered(self) -> bool:
        """Whether numbers may differ by the scatter over the seeds. With equal draws, nothing is left to chance."""
        return self.freedom > 0 and (self.differ or not self.random)  # a run without parameter records may have other draws

    @property
    def exact(self) -> bool:
        """Whether unchanged numbers are equal to the last bits: same draws, same machine."""
        return self.same_first_seed and self.same_environment and not self.differ

    def limits(self, values: Sequence[tuple[BySeed, BySeed]]) -> list[float]:
        """Return for each place the logarithm by which its means may differ by chance; 0 if nothing is left to chance.

        The smaller of two bounds: by the scatter within either run, and by that of their ratio per seed, which is smaller if
        they share inputs and most weights, but is estimated from half as many values.

        Parameters
        ----------
        values
            One quantity at each place, by seed, in the baseline and in the run.
        """
        if not self.scattered:
            return [0.0] * len(values)
        scatters = [log_scatter(list(base.values()), list(run.values())) for base, run in values]
        # DrawComparison are not known to differ if there are no parameter records: then the ratio says nothing.
        paired = [paired_scatter(base, run) if self.differ else None for base, run in values]
        pool, paired_pool = (pooled_scatter(each for each in some if each is not None) for some in (scatters, paired))
        limits = []
        for scatter, ratio_scatter in zip(scatters, paired, strict=True):
            limit = chance_bound(max(scatter or 0.0, pool), self.freedom, self.counts)
            if ratio_scatter is not None:
                seeds = self.counts[0]
                limit = min(limit, chance_bound(max(ratio_scatter, paired_pool), seeds - 1, (seeds,)))
            limits.append(limit)
        return limits

    def factor(self, quantity: Quantity, limit: float) -> float:
        """Return the factor, in either direction, by which a number may differ by chance.

        Parameters
        ----------
        quantity
            What the number is.
        limit
            The logarithm that the scatter over the seeds allows.
        """
        factor = safe_exp(limit)
        if not self.one_seed or quantity == "parameter_rms":
            return factor
        if quantity == "grad_norm":
            return math.inf  # of few elements it is a matter of chance; the gradient of its branch is checked too
        return max(factor, ONE_SEED_LOSS_FACTOR if quantity == "loss" else ONE_SEED_FACTOR)

    def note(self, allowed: Mapping[Quantity, tuple[float, float]]) -> str | None:
        """Explain which draws differ and what that does to the tolerances.

        Parameters
        ----------
        allowed
            The smallest and largest accepted factor of each quantity.
        """
        if not self.differ:
            return None
        if self.relative:
            cause = "Blocks matched by relative depth have different random weights"
        elif not self.shared_seeds:
            cause = "The runs share no seeds, so all random weights differ"
        else:
            amount = f"{self.redrawn} of {count(self.random, 'random parameter')}"
            cause = f"{amount} have new random values (renamed, or initialized differently)"
        if self.one_seed:
            return (
                f"{cause}. One seed cannot tell that from a change, so a factor of {ONE_SEED_FACTOR:g} is accepted, "
                f"{ONE_SEED_LOSS_FACTOR:g} for the loss, and any for a single parameter's gradient. Scan both with "
                "--seeds 0..4 for limits from their scatter."
            )
        widest = ", ".join(f"{name} x{number(largest)}" for name, (_, largest) in allowed.items())
        return f"{cause}. Tolerances are widened to the scatter over the seeds, at most to {widest}."


def compare_draws(matched: MatchedRuns) -> DrawComparison:
    """Find out which seeds and random draws two runs share."""
    baseline, run = matched.baseline, matched.run
    shared = tuple(seed for seed in baseline.seeds if seed in run.seeds)
    same_first_seed = baseline.seeds[:1] == run.seeds[:1]
    redrawn, random = count_redrawn(matched.parameters) if same_first_seed else (0, 0)
    return DrawComparison(
        seeds=(frozenset(shared or baseline.seeds), frozenset(shared or run.seeds)),
        shared_seeds=shared,
        same_seeds=baseline.seeds == run.seeds,
        same_first_seed=same_first_seed,
        redrawn=redrawn,
        random=random,
        relative=matched.sites.relative,
        same_environment=not environment_mismatches(run, baseline),
    )
