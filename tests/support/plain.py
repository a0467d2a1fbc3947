"""A scan of a small model, and the same pass by plain autograd with the same weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers, generator_for
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record
from propcheck.execution import passes as engine
from propcheck.targets.target import Target, Task, call

IDS = torch.arange(12).view(2, 6)
WIDTH = 16
STREAMED, RESIDENT = 0, 1 << 40


def cross_entropy(logits, _batch):
    return F.cross_entropy(logits.flatten(0, 1), IDS.flatten())


def scan(build, memory, *, loss=cross_entropy, batch=IDS, blocks=None, seed=0):
    task = Task(lambda: Target(build(), loss=loss, blocks=blocks), lambda _model, _seed: batch)
    with Workers(1) as workers:
        return engine.execute(task, seed, memory=memory, device=torch.device("cpu"), workers=workers)


def by_autograd(build, *, loss=cross_entropy, batch=IDS, seed=0):
    """Return the loss and the norm of each gradient; None for no gradient."""
    recording = record(build)
    with Workers(1) as workers:
        materializer = Materializer(recording, workers)
        values = {name: materializer.materialize(entry, seed) for entry in recording.entries for name in entry.names}
    model = build()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(values[name])
    with torch.random.fork_rng():
        torch.manual_seed(generator_for("outside", seed).initial_seed())
        value = loss(call(model, batch), batch)
        value.backward()
    norms = {name: one.grad.double().norm().item() for name, one in model.named_parameters() if one.grad is not None}
    return value.item(), norms


class Block(nn.Module):
    """x + W rms_norm(x)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def update(self, x):
        return self.inner(F.rms_norm(x, (WIDTH,)))

    def forward(self, x):
        return x + self.update(x)


class Model(nn.Module):
    """Token ids through three blocks to logits."""

    def __init__(self, block=Block, depth=3):
        super().__init__()
        self.tokens = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 31)

    def run(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids):
        return self.head(self.run(self.tokens(ids)))
