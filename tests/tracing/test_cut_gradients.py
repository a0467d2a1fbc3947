"""A stream whose gradient is cut on the way is measured as far as there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import propcheck


class Block(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.cut = cut
        self.norm, self.mixer, self.norm2, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        if self.cut:
            x = x.detach()
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(40, 16), nn.ModuleList(Block(cut == i) for i in range(4))
        self.head = nn.Linear(16, 40)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("cut", [None, 1])
def test_where_the_stream_is_detached_between_two_additions_nothing_before_has_a_gradient(cut):
    run = propcheck.scan(lambda: Model(cut), tokens=8, threads=1)
    lost = [] if cut is None else [0, 1, 2]  # the sum of site 2 is read by what is detached alone
    rows = run.record.sites
    assert [one.site for one in rows if one.grad_update_norm is None or one.grad_update_norm == 0] == lost
    without = {one.name for one in run.record.parameters if one.grad_state in ("none", "zero")}
    assert ("blocks.0.mixer.weight" in without) == (cut is not None)
    assert "blocks.3.mlp.weight" not in without
    assert torch.tensor([one.sum_rms for one in rows]).isfinite().all()
