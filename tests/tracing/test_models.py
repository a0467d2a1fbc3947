"""Models whose code gets in an observer's way: recomputation, kernels, reuse, frozen parts, non-finite values."""

import handwritten as hand
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from handwritten import LAYERS, WIDTH, Block, Mlp, Model, assert_plain, of, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from propcheck.measure.gradients import Ledger
from propcheck.measure.measured_pass import PassMeasurers
from propcheck.measure.weight_calls import weight_runners
from propcheck.tracing.tracer import Tracer


def test_a_kernel_of_the_users_own_is_a_product():
    class Kernel(torch.autograd.Function):
        """Its result is a new tensor that no function of torch made."""

        @staticmethod
        def forward(ctx, x):
            return torch.from_numpy(np.tanh(x.detach().numpy()))

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Fused(Mlp):
        def forward(self, x):
            return Kernel.apply(super().forward(x))

    for memory in (1 << 40, 0):
        one, rows = run(lambda: Model(Block, mlp=Fused), memory=memory)
        assert_plain(rows)
        assert "blocks.1.mlp.c_fc.weight" in one.sites[3].branch.parameters


def test_blocks_that_take_and_give_more_than_the_stream():
    class Wordy(Block):
        def forward(self, hidden_states=None, options=None):
            x = super().forward(hidden_states)
            return {"hidden": x, "weights": (options["scale"], x.mean())}

    class Talkative(Model):
        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(hidden_states=x, options={"scale": torch.ones(())})["hidden"]
            return self.head(self.final(x))

    for memory in (1 << 40, 0):
        assert_plain(run(lambda: Talkative(Wordy), memory=memory)[1])


@pytest.mark.parametrize("memory", [1 << 40, 0])
@pytest.mark.parametrize("layers", ["small", "large"])
def test_checkpointing_of_the_users_own(memory, layers):
    class Wide(Mlp):
        """Large against 14 tokens, so that the gradients of its weights are measured through their factors."""

        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(WIDTH, 2000), nn.Linear(2000, WIDTH)
            self.square = nn.Linear(2000, 2000, bias=False)

        def forward(self, x):
            return self.c_proj(self.square(F.gelu(self.c_fc(x))))

    class Checkpointed(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    class Reentrant(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    mlp = Mlp if layers == "small" else Wide
    one, rows = run(lambda: Model(Block, mlp=mlp), memory=memory)
    for block in (Checkpointed, Reentrant):
        two, again = run(lambda block=block: Model(block, mlp=mlp), memory=memory)
        assert two.gradients == pytest.approx(one.gradients, rel=1e-5)
        assert two.gradients.keys() == one.gradients.keys()
        for row, other in zip(again, rows, strict=True):
            assert row.sum_rms == other.sum_rms
            assert row.grad_sum_norm == pytest.approx(other.grad_sum_norm, rel=1e-5)
            assert row.grad_update_norm == pytest.approx(other.grad_update_norm, rel=1e-5)


def test_non_finite_values_are_counted_and_come_through():
    class Broken(Block):
        def join(self, x, f):
            f = f.clone()
            f[0, 1, 2] = float("nan")
            f[1, 3] = float("inf")
            return x + f

    one, rows = run(lambda: Model(Broken, layers=1))
    assert rows[0].nonfinite == 1 + WIDTH
    for column in ("update_rms", "sum_rms", "sum_absmax", "update_ratio", "cosine", "token_correlation", "sum_mean"):
        assert str(getattr(rows[0], column)) == "nan", column
    assert rows[0].stream_rms > 0
    assert str(one.gradients["head.weight"]) == "nan"


def test_a_frozen_part_has_no_gradient_to_report():
    _, plain = run(lambda: Model(Block))

    class Frozen(Model):
        def __init__(self):
            super().__init__(Block)
            for module in (self.tokens, self.positions, *self.blocks[:2]):
                module.requires_grad_(False)

    one, rows = run(Frozen)
    assert of(rows, "param_grad_norm")[:4] == [None] * 4
    # Autograd goes no further back than the first parameter that is trained.
    assert of(rows, "grad_sum_norm")[:4] == [None] * 4
    assert of(rows, "grad_sum_norm")[4:] == pytest.approx(of(plain, "grad_sum_norm")[4:], rel=1e-6)
    assert all(row.param_grad_norm > 0 for row in rows[4:])
    assert "tokens.weight" not in one.gradients


def test_one_block_used_again_and_again():
    class Universal(Model):
        def forward(self, ids):
            x = self.tokens(ids)
            for _ in range(3):
                x = self.blocks[0](x)
            return self.head(self.final(x))

    results = [run(lambda: Universal(Block, layers=1), memory=memory) for memory in (1 << 40, 0)]
    for one, rows in results:
        assert of(rows, "module") == ["blocks.0.attn", "blocks.0.mlp"] * 3
        assert of(rows, "site") == list(range(6))
        assert one.gradients == pytest.approx(results[0][0].gradients, rel=1e-12)
        assert rows == results[0][1]


def test_nothing_waits_for_the_device_while_the_model_runs(monkeypatch):
    """Every way in which Python code reads a tensor's value is barred, in the forward pass and in the hooks after it."""

    def refuse(*_):
        raise AssertionError("the host waits for a tensor")

    model = Model(Block, norm=hand.RMSNorm)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    measurers = PassMeasurers()
    tracer = Tracer(names, measurers.listeners().forward, weight_runners(names, Ledger()))
    tracer.watch(model)
    ids = torch.randint(hand.VOCABULARY, (hand.BATCH, hand.TOKENS))
    for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with tracer:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    monkeypatch.undo()
    sites = measurers.sites(tracer.sites)
    assert len(sites) == 2 * LAYERS
    assert all(site.gradients.keys() == {"stream", "update", "sum"} for site in sites)
    assert float(sites[0].gradients["sum"]) > 0
