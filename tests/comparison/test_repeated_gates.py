"""The same code gated over and over: nothing flips, whatever ran before it in the process and however the scan runs."""

from __future__ import annotations

import random

import pytest
import torch
from gated import gated, scan, won
from torch import nn

import propcheck
from propcheck.execution import single_pass

WIDTH, VOCABULARY = 32, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def other_work(chance):
    """What else a process may do between two gates: draw, compute, leave memory of any content behind, scan another model."""
    torch.manual_seed(chance.randrange(1000))
    trash = [torch.full((chance.randrange(1, 4000),), float("nan")) for _ in range(8)]
    (torch.randn(64, 64) @ torch.randn(64, 64)).sum()
    if chance.random() < 0.2:
        scan(lambda: Model(blocks=chance.randrange(1, 3)), tokens=16)
    del trash


def test_one_hundred_gates_of_the_same_code_agree(monkeypatch):
    """Half of them streamed, a quarter of them on two threads: a number that is not equal is a flip to come."""
    chance = random.Random(0)
    baseline = scan(Model, tokens=32)
    modes, threads = set(), set()
    for index in range(100):
        other_work(chance)
        one = 2 if index % 8 in (1, 3) else 1  # resident, and streamed
        with monkeypatch.context() as patched:
            if index % 4 > 1:
                patched.setattr(single_pass, "resident_bytes", lambda: 0)
            run = scan(Model, tokens=32, threads=one, memory="1KiB" if index % 4 > 1 else "16GiB")
        modes.add(run.record.engine.mode)
        threads.add(run.record.engine.threads)
        found = gated(run, baseline)
        assert found.passed, f"gate {index}: {found}"
        assert not won(found)
        exact = gated(run, baseline, tolerance=0.0 if one == 1 else 1e-6)
        assert not exact.differences, f"gate {index}: {exact}"
    assert (modes, threads) == ({"resident", "streamed"}, {1, 2})


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2, 3, 4]])
def test_a_run_passes_beside_itself_at_a_tolerance_of_zero(seeds):
    run = scan(Model, tokens=32, seeds=seeds)
    found = gated(run, run, tolerance=0.0)
    assert (found.passed, found.findings, found.differences, found.start) == (True, (), (), None)
    assert sum(found.record.compared.values()) == 3 * 5 + 2 * 21 + 1  # sites by quantities, parameters by two, the loss


class Renamed(nn.Module):
    """The model as a part of another one, under a name that decides which draws its weights are."""

    def __init__(self, name, std=1.0):
        super().__init__()
        self.name = name
        inner = Model()
        with torch.no_grad():
            inner.blocks[1].down.weight.mul_(std)
        self.add_module(name, inner)

    def forward(self, ids):
        return getattr(self, self.name)(ids)


FIVE = [0, 1, 2, 3, 4]


def test_five_seeds_of_other_draws_pass_however_they_are_named():
    baseline = scan(lambda: Renamed("model"), tokens=32, seeds=FIVE)
    for index in range(10):
        run = scan(lambda index=index: Renamed(f"m{index}"), tokens=32, seeds=FIVE)
        assert gated(run, baseline).passed, gated(run, baseline)


@pytest.mark.parametrize("name", ["model", "renamed"])
@pytest.mark.parametrize("std", [1.3, 1 / 1.3])
def test_five_seeds_see_a_projection_whose_std_is_30_percent_off_under_any_name(name, std):
    baseline = scan(lambda: Renamed("model"), tokens=32, seeds=FIVE)
    found = gated(scan(lambda: Renamed(name, std), tokens=32, seeds=FIVE), baseline)
    assert not found.passed
    assert (found.start.block, found.start.sublayer) == (1, "mlp")


def test_what_is_gated_is_a_run_and_nothing_that_it_changed():
    """Neither side is changed by a gate."""
    run, baseline = scan(Model, tokens=32), scan(lambda: Model(2), tokens=32)
    before = (run.record, baseline.record)
    first = propcheck.gate(run, baseline)
    assert (run.record, baseline.record) == before
    assert propcheck.gate(run, baseline).record == first.record
