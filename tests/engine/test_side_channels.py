"""A tensor that reaches a block beside its arguments would be cut off from its gradient: such a model is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from propcheck.build.random import Workers
from propcheck.engine import execute as engine
from propcheck.errors import PropcheckError
from propcheck.targets.target import Target, Task


class Block(nn.Module):
    def __init__(self, shared, way):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        # A plain object, as configs and caches are: no submodule.
        self.shared, self.way = (shared,), way

    def forward(self, x, extra=None):
        shared = self.shared[0]
        y = self.inner(F.rms_norm(x, (16,)))
        if "previous" in shared and self.way in ("dict", "detached"):
            y = y * shared["previous"].sigmoid()
        if extra is not None and self.way == "argument":
            y = y * extra.sigmoid()
        if self.way == "dict":
            shared["previous"] = y
        if self.way == "detached":
            shared["previous"] = y.detach()
        return x + y


class Model(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.shared = way, {}
        self.tokens = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block(self.shared, way) for _ in range(3))
        self.head = nn.Linear(16, 31)

    def forward(self, ids):
        self.shared.clear()
        x = start = self.tokens(ids)
        for block in self.blocks:
            x = block(x, start)
        return self.head(x)


def scan(way, memory):
    def loss(logits, inputs):
        return F.cross_entropy(logits.flatten(0, 1), inputs[0].flatten())

    ids = torch.arange(12).view(2, 6)
    task = Task(lambda: Target(Model(way), loss=loss), lambda _model, _seed: (ids,))
    with Workers(1) as workers:
        return engine.execute(task, 0, memory=memory, device=torch.device("cpu"), workers=workers)


@pytest.mark.parametrize("memory", [0, 1 << 40], ids=["streamed", "resident"])
def test_a_tensor_from_another_block_is_refused_by_the_name_of_the_block(memory):
    with pytest.raises(PropcheckError, match=r"blocks\.1: it uses a tensor that has a gradient and is neither"):
        scan("dict", memory)


@pytest.mark.parametrize("way", ["none", "argument"])
def test_arguments_are_not(way, monkeypatch):
    monkeypatch.setattr(engine, "resident_bytes", lambda: 0)
    streamed, resident = scan(way, 0), scan(way, 1 << 40)
    assert (streamed.mode, resident.mode) == ("streamed", "resident")
    assert streamed.gradients == resident.gradients
    assert len(streamed.sites) == 3


def test_a_cache_that_changed_before_the_block_is_computed_again_is_refused(monkeypatch):
    monkeypatch.setattr(engine, "resident_bytes", lambda: 0)
    assert len(scan("detached", 1 << 40).sites) == 3
    with pytest.raises(PropcheckError, match=r"blocks\.\d: computed again for the backward pass it gave another output"):
        scan("detached", 0)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, 16))

    def forward(self):
        return self.table


def test_a_unit_without_arguments_is_a_unit_like_others():
    class WithPositions(Model):
        def __init__(self):
            super().__init__("none")
            self.positions = Positions()

        def forward(self, ids):
            x = self.tokens(ids) + self.positions()
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    ids = torch.arange(12).view(2, 6)
    task = Task(lambda: Target(WithPositions(), loss=lambda y, _: y.float().square().mean()), lambda _model, _seed: (ids,))
    with Workers(1) as workers:
        one = engine.execute(task, 0, memory=0, device=torch.device("cpu"), workers=workers)
    assert one.gradients["positions.table"] > 0
