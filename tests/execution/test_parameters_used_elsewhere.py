"""A parameter that is used while its own module does not run is there all the same, and has its whole gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record
from propcheck.execution import passes as engine
from propcheck.execution import single_pass
from propcheck.targets.target import Target, Task


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.inner(F.rms_norm(x, (16,)))


class Model(nn.Module):
    """How the head reads the embedding differs; the function is one."""

    def __init__(self, *, call_embedding, also_last_block):
        super().__init__()
        if also_last_block:  # a tied head that is registered before the blocks, and used after them
            self.head = nn.Linear(16, 31, bias=False)
        self.call_embedding, self.also_last_block = call_embedding, also_last_block
        self.tokens = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        if also_last_block:
            self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.full((16,), 2.0))

    def forward(self, ids):
        x = self.tokens(ids) if self.call_embedding else F.embedding(ids, self.tokens.weight)
        for block in self.blocks:
            x = block(x)
        if self.also_last_block:
            return self.head(F.linear(x * self.scale, self.blocks[2].inner.weight))
        return F.linear(x * self.scale, self.tokens.weight)


def loss_of(logits, inputs):
    return F.cross_entropy(logits.flatten(0, 1), inputs[0].flatten())


@pytest.mark.parametrize("memory", [0, 1 << 40], ids=["streamed", "resident"])
@pytest.mark.parametrize("call_embedding", [True, False])
@pytest.mark.parametrize("also_last_block", [True, False])
def test_loss_and_every_gradient_are_those_of_plain_autograd(memory, call_embedding, also_last_block, monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)

    def build():
        return Model(call_embedding=call_embedding, also_last_block=also_last_block)

    ids = torch.arange(12).view(2, 6) % 31
    task = Task(lambda: Target(build(), loss=loss_of), lambda _model, _seed: (ids,))
    with Workers(1) as workers:
        one = engine.execute(task, 0, memory=memory, device=torch.device("cpu"), workers=workers)
        recording = record(build)
        materializer = Materializer(recording, workers)
        values = {name: materializer.materialize(entry, 0) for entry in recording.entries for name in entry.names}
    plain = build()
    plain.load_state_dict(values)
    loss = loss_of(plain(ids), (ids,))
    loss.backward()
    assert one.loss == pytest.approx(loss.item(), rel=1e-6)
    expected = {name: parameter.grad.double().norm().item() for name, parameter in plain.named_parameters()}
    assert one.gradients == pytest.approx(expected, rel=2e-6)
    assert len(one.sites) == 3
