"""Models with the faults of ``tests/faults/test_residual_faults.py``, and their repaired twins."""

from __future__ import annotations

import torch
from toy import Attention, Block


class AddsItself(Block):
    def forward(self, x):
        self.attn(self.attn_norm(x))
        x = x + x
        return x + self.mlp(self.mlp_norm(x))


class BitNetBlock(Block):
    """As it stood: the attention's output replaces the stream and is added to itself."""

    def forward(self, x):
        x = self.attn(self.attn_norm(x))
        x = x + x
        return x + self.mlp(self.mlp_norm(x))


class NormsOnlyQueries(Block):
    """A wrapper that norms the first of what it is given."""

    def __init__(self):
        super().__init__(attention=ThreeInputs)

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x), x, x)
        return x + self.mlp(self.mlp_norm(x))


class NormsAll(NormsOnlyQueries):
    def forward(self, x):
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h)
        return x + self.mlp(self.mlp_norm(x))


class ThreeInputs(Attention):
    def forward(self, query, key, value):
        mixed = self.mix(self.split(self.wq(query)), self.split(self.wk(key)), self.split(self.wv(value)))
        return self.wo(mixed.transpose(1, 2).flatten(2))


class NoResidual(Block):
    def forward(self, x):
        x = self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TwiceResidual(Block):
    def forward(self, x):
        x = x + (x + self.attn(self.attn_norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class ResidualAfterNorm(Block):
    def forward(self, x):
        h = self.attn_norm(x)
        x = h + self.attn(h)
        return x + self.mlp(self.mlp_norm(x))


class UntrackedMlp(Block):
    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        with torch.no_grad():
            update = self.mlp(self.mlp_norm(x))
        return x + update


class Detached(Block):
    def forward(self, x):
        x = x.detach() + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class HalfDetached(Block):
    """The gradient alone is halved along the stream."""

    def forward(self, x):
        x = (x + x.detach()) / 2 + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))
