"""Activation checkpointing in the model changes nothing: each site once, the gradients, and dropout as without it."""

from __future__ import annotations

import pytest
import torch
from plain import RESIDENT, STREAMED, Block, Model, by_autograd, scan
from torch import nn
from torch.utils.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from propcheck.execution import single_pass


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


class Dropping(Block):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def update(self, x):
        return self.dropout(super().update(x))


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


WAYS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "not reentrant, random state not kept": {"use_reentrant": False, "preserve_rng_state": False},
    "selective": {"use_reentrant": False, "context_fn": selective},
}


def model(way, place):
    class Within(Dropping):
        def update(self, x):
            return super().update(x) if way is None else checkpoint(super().update, x, **way)

    class Checkpointed(Model):
        def __init__(self):
            super().__init__(Within if place == "within" else Dropping)

        def run(self, x):
            if place == "within":
                return super().run(x)
            if place == "around all":
                return super().run(x) if way is None else checkpoint(super().run, x, **way)
            for block in self.blocks:
                x = block(x) if way is None else checkpoint(block, x, **way)
            return x

    return Checkpointed


@pytest.mark.parametrize("memory", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize("place", ["within", "around each", "around all"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_sites_loss_and_gradients_are_those_without_it(way, place, memory):
    without, one = scan(model(None, place), memory), scan(model(way, place), memory)
    assert one.notes == ()
    assert len(one.sites) == 3
    assert one.loss == without.loss
    assert one.gradients == without.gradients
    assert [site.gradients for site in one.sites] == [site.gradients for site in without.sites]


def test_the_reentrant_kind_without_an_input_that_has_a_gradient_has_none_here_either():
    class Frozen(Model):
        def __init__(self):
            super().__init__()
            self.tokens.requires_grad_(False)

        def run(self, x):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
            assert not x.requires_grad
            return self.blocks[2](self.blocks[1](x))

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        one = scan(Frozen, STREAMED)
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        loss, gradients = by_autograd(Frozen)
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.gradients == pytest.approx(gradients, rel=5e-6)
    assert "blocks.0.inner.weight" not in one.gradients


def test_sequences_are_covered():
    class Sequence(Model):
        def run(self, x):
            return checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)

    one = scan(Sequence, STREAMED)
    assert len(one.sites) == 3
    assert one.gradients == pytest.approx(by_autograd(Sequence)[1], rel=5e-6)


def test_torch_is_left_as_it_was():
    scan(model(WAYS["reentrant"], "within"), STREAMED)
    assert "apply" not in vars(CheckpointFunction)
    x = torch.ones(3, requires_grad=True)
    calls = []
    y = checkpoint(lambda value: calls.append(1) or value.exp(), x, use_reentrant=False, context_fn=noop_context_fn)
    y.sum().backward()
    assert len(calls) == 2
