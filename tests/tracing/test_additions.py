"""Which additions are sites, and what is the stream and what the update at one."""

from dataclasses import replace

import handwritten as hand
import pytest
import torch
import torch.nn.functional as F
from handwritten import NAMES, WIDTH, Block, Mlp, Model, SelfAttention, assert_plain, in_bf16, of, run
from torch import nn


def test_a_scaled_update_is_the_update():
    _, plain = run(lambda: Model(Block))

    class Scaled(Block):
        def join(self, x, f):
            return x + 0.5 * f

    class LearnedScale(Block):
        def __init__(self):
            super().__init__()
            self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

        def join(self, x, f):
            return x + self.gamma * f

    class Alpha(Block):
        def join(self, x, f):
            return torch.add(x, f, alpha=0.5)

    class AlphaInPlace(Block):
        def join(self, x, f):
            return x.add_(f, alpha=0.5)

    _, scaled = run(lambda: Model(Scaled))
    assert_plain(scaled)
    assert scaled[0].update_rms == pytest.approx(plain[0].update_rms / 2, rel=1e-12)  # a power of two: exact
    assert scaled[0].update_rms != scaled[0].sum_rms
    one, learned = run(lambda: Model(LearnedScale))
    assert [replace(row, param_grad_norm=0) for row in learned] == [replace(row, param_grad_norm=0) for row in scaled]
    assert one.roles["blocks.0.gamma"] == "scale"
    assert "blocks.0.gamma" in one.sites[0].branch.parameters
    assert run(lambda: Model(Alpha))[1] == scaled
    assert run(lambda: in_bf16(AlphaInPlace))[1] == run(lambda: in_bf16(Scaled))[1]


def test_a_stream_scaled_for_the_addition_alone_is_deepnorm():
    class Deep(hand.Post):
        def join(self, x, f):
            return x * 1.5 + f

    class Alpha(hand.Post):
        def join(self, x, f):
            return torch.add(f, x, alpha=1.5)

    class Vaswani(Model):
        """The first Transformer: the embedding is scaled, for the branch as for the stream."""

        def forward(self, ids):
            x = self.tokens(ids) * WIDTH**0.5 + self.positions(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    _, deep = run(lambda: Model(Deep, final_norm=False))
    assert_plain(deep, "deepnorm")
    _, alpha = run(lambda: Model(Alpha, final_norm=False))
    assert_plain(alpha, "deepnorm")
    # The same but for the rounding of 1.5 x.
    for row, other in zip(alpha, deep, strict=True):
        for column in ("stream_rms", "update_rms", "sum_rms", "cosine", "grad_stream_norm", "grad_update_norm"):
            assert getattr(row, column) == pytest.approx(getattr(other, column), rel=1e-5)
    assert_plain(run(lambda: Vaswani(hand.Post))[1], "post")


def test_a_stream_changed_in_place_is_another_stream():
    class Scaled(Block):
        def join(self, x, f):
            return x * 1.5 + f

    class InPlace(Block):
        def join(self, x, f):
            return x.mul_(1.5).add_(f)

    assert run(lambda: in_bf16(InPlace))[1] == run(lambda: in_bf16(Scaled))[1]


def test_additions_inside_a_branch_are_no_sites():
    class Lora(nn.Module):
        def __init__(self, into, out):
            super().__init__()
            self.base = nn.Linear(into, out)
            self.a, self.b = nn.Linear(into, 2, bias=False), nn.Linear(2, out, bias=False)

        def forward(self, x):
            return self.base(x) + 2.0 * self.b(self.a(x))

    class Adapted(nn.Module):
        """LoRA on a square layer, whose sum has the stream's shape, then a bottleneck adapter with a residual of its own."""

        def __init__(self):
            super().__init__()
            self.first, self.down, self.up = Lora(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

        def forward(self, x):
            y = self.first(x)
            return y + self.up(F.relu(self.down(y)))

    one, rows = run(lambda: Model(Block, mlp=Adapted))
    assert_plain(rows)
    assert {name for name in one.gradients if name.startswith("blocks.0.mlp.")} < one.sites[1].branch.parameters


def test_a_value_looked_up_in_a_branch_is_no_stream():
    class Values(SelfAttention):
        """A look-up by token is added to the values before they are split into heads (modded-nanogpt)."""

        def __init__(self):
            super().__init__()
            self.values = nn.Embedding(hand.TOKENS, WIDTH)

        def forward(self, x):
            q, k, v = self.c_attn(x).split(WIDTH, dim=2)
            v = self.values(torch.arange(x.shape[1]).expand(len(x), -1)) + v
            return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    assert_plain(run(lambda: Model(Block, attention=Values))[1])


@pytest.mark.parametrize("before", [0, 1])
def test_a_branch_of_looked_up_vectors_alone_is_a_site_once_there_is_a_stream(before):
    class Memory(Model):
        """What is added comes from the tokens, not from the stream; before the first block it is part of the embedding."""

        def __init__(self):
            super().__init__(Block)
            self.memory, self.read = nn.Embedding(hand.VOCABULARY, 8), nn.Linear(8, WIDTH)

        def forward(self, ids):
            x = self.tokens(ids)
            for number, block in enumerate(self.blocks):
                if number == before:
                    x = x + self.read(self.memory(ids))
                x = block(x)
            return self.head(self.final(x))

    _, rows = run(Memory)
    assert of(rows, "module") == (NAMES if before == 0 else [*NAMES[:2], "read", *NAMES[2:]])
    assert of(rows, "block") == ([0, 0, 1, 1, 2, 2] if before == 0 else [0, 0, None, 1, 1, 2, 2])


def test_a_mean_over_tokens_is_no_norm():
    class Pooled(Mlp):
        """Squeeze and excite: what is divided by is a mean of tokens, not a size of one."""

        def forward(self, x):
            return super().forward(x) / (1 + x.square().mean(1, keepdim=True).sqrt())

    class Bare(Block):
        def forward(self, x):
            x = self.join(x, self.attn(x))
            return self.join(x, self.mlp(x))

    _, rows = run(lambda: Model(Bare, mlp=Pooled))
    assert of(rows, "placement") == ["none"] * 6  # the norm that reads the last sum is the final one


def test_nothing_is_said_of_the_directions_of_zeros():
    class Silent(Block):
        def join(self, x, f):
            return x + 0.0 * f

    class Empty(Model):
        def __init__(self):
            super().__init__(Silent)
            nn.init.zeros_(self.tokens.weight)
            nn.init.zeros_(self.positions.weight)

    _, rows = run(Empty)
    for row in rows:
        assert (row.stream_rms, row.update_rms, row.sum_rms, row.sum_absmax, row.nonfinite) == (0, 0, 0, 0, 0)
        assert (row.update_ratio, row.cosine, row.add_error, row.swallowed, row.token_correlation) == (None,) * 5


def test_what_the_last_sum_passed_is_the_same_when_blocks_are_computed_again():
    class Late(hand.Post):
        """Its last norm comes before its last sum."""

        def forward(self, x):
            x = self.ln_1(self.join(x, self.attn(x)))
            return self.join(x, self.mlp(x))

    for memory in (1 << 40, 0):
        _, rows = run(lambda: Model(Late, final_norm=False, layers=1), memory=memory)
        assert of(rows, "placement") == ["post", "none"]
