"""Judging of several seeds, and no finding on a healthy run."""

import math
import random

import pytest
from synthetic import broken_rules, factors, only_finding, run_of, site, with_gradient


def test_several_seeds_are_judged_by_their_median():
    records = [r for seed in range(3) for r in factors(64, forward=1.1 if seed < 2 else 1.0, seed=seed)]
    assert only_finding(run_of(records, seeds=(0, 1, 2)), "PC201").message.endswith("Seen in 2 of 3 seeds.")
    records = [r for seed in range(3) for r in factors(64, forward=1.1 if seed < 1 else 1.0, seed=seed)]
    assert broken_rules(run_of(records, seeds=(0, 1, 2)), select=["PC201"]) == []


@pytest.mark.parametrize("seed", range(40))
def test_noise_around_a_healthy_curve_never_fires(seed):
    draw = random.Random(seed)
    blocks = draw.choice([2, 3, 4, 5, 8, 12, 24, 64])
    records, stream = [], draw.uniform(0.3, 3)
    for number in range(2 * blocks):
        update = (0.3, 1.0)[number % 2] * draw.lognormvariate(0, 0.15)
        records.append(site(number, number // 2, ("attention", "mlp")[number % 2], stream=stream, update=update))
        stream = records[-1].sum_rms
    gradient = 1.0
    for number in reversed(range(2 * blocks)):
        before = gradient * math.sqrt(1 + 1.5 * records[number].update_ratio ** 2) * draw.lognormvariate(0, 0.03)
        records[number] = with_gradient(records[number], before, gradient)
        gradient = before
    assert broken_rules(run_of(records)) == []
