"""Graphs that turn out to be larger than planned are not kept, and the numbers are the same."""

import torch
from torch import nn

import propcheck
from propcheck.execution.memory import resident_bytes


class Hoarder(nn.Module):
    """Few weights, and a graph of many large tensors: a recurrence unrolled over the tokens, say."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x):
        h = self.norm(x)[:, :, None] * torch.ones(256, 1)  # [batch, tokens, 256, 64]: 16 MiB
        for _ in range(4):
            h = torch.tanh(h * 1.1)
        return x + self.inner(h.mean(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Hoarder() for _ in range(12))

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_graph_that_does_not_fit_beside_another_is_computed_again():
    room = resident_bytes() + 400 * 2**20  # of the 12 x 100 MiB or so that all graphs take
    tight = propcheck.scan(Model, tokens=256, memory=f"{room}B")  # first: freed memory stays with the process
    assert tight.record.engine.mode in ("partly resident", "streamed")
    plain = propcheck.scan(Model, tokens=256, memory="16GiB")
    assert plain.record.engine.mode == "resident"
    assert tight.record.sites == plain.record.sites
    assert tight.record.parameters == plain.record.parameters
