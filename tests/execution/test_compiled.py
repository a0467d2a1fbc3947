"""What torch.compile wraps is observed as it is written, under its own names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import RESIDENT, STREAMED, WIDTH, Block, Model, scan
from torch._dynamo.utils import counters

from propcheck.execution import single_pass


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


def whole():
    return torch.compile(Model())


def wrapped_blocks():
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block)
    return model


def in_place():
    model = Model()
    for block in model.blocks:
        block.compile()
    model.compile()
    return model


@torch.compile
def normed(x):
    return F.rms_norm(x, (WIDTH,))


class Functions(Block):
    @torch.compile
    def update(self, x):
        return self.inner(normed(x))


class Elsewhere(Block):
    """Its compiled self is not registered."""

    def __init__(self):
        super().__init__()
        self.run = [torch.compile(self.inner)]

    def update(self, x):
        return self.run[0](F.rms_norm(x, (WIDTH,)))


@pytest.mark.parametrize("memory", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize(
    "build",
    [whole, wrapped_blocks, in_place, lambda: Model(Functions), lambda: Model(Elsewhere)],
    ids=["whole", "wrapped blocks", "in place", "functions", "elsewhere"],
)
def test_it_is_the_model_as_written(build, memory):
    counters.clear()
    one, expected = scan(build, memory), scan(Model, memory)
    assert not counters["frames"]  # nothing was compiled
    assert one.notes == ()
    assert one.class_name == "Model"
    assert [entry.names for entry in one.entries] == [entry.names for entry in expected.entries]
    assert one.gradients == expected.gradients
    assert (len(one.sites), one.blocks) == (3, 3)
