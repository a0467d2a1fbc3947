"""The residual additions of blocks as people write them: how many, where, of what kind, and what belongs to each."""

import handwritten as hand
import pytest
import torch
import torch.nn.functional as F
from handwritten import LAYERS, WIDTH, Block, Mlp, Model, assert_plain, in_bf16, of, run
from torch import nn


@pytest.fixture(scope="module")
def plain():
    return run(lambda: Model(Block))[1]


def test_two_sites_a_block_and_none_at_positions_or_the_final_norm(plain):
    assert_plain(plain)
    assert [row.stream_rms for row in plain[1:]] == [row.sum_rms for row in plain[:-1]]


@pytest.mark.parametrize("block", [hand.Reversed, hand.Augmented, hand.InPlace, hand.IntoUpdate, hand.Function])
def test_the_sum_may_be_written_in_any_way(block):
    _, expected = run(lambda: in_bf16(Block))
    assert_plain(expected)
    for memory, mode in ((1 << 40, "resident"), (0, "streamed")):
        one, rows = run(lambda: in_bf16(block), memory=memory)
        assert one.mode == mode
        assert rows == expected


@pytest.mark.parametrize("norm", hand.NORMS.values(), ids=hand.NORMS.keys())
def test_a_norm_is_known_by_what_it_computes(norm):
    one, rows = run(lambda: Model(Block, norm=norm))
    assert_plain(rows)
    assert one.roles["blocks.1.ln_1.weight"] == "norm"
    assert one.gradients["blocks.1.ln_1.weight"] > 0
    assert "blocks.1.ln_1.weight" in one.sites[2].branch.parameters
    if norm is not hand.HandLayerNorm:  # which reads the stream twice
        assert of(rows, "norm_input_rms") == pytest.approx(of(rows, "stream_rms"), rel=1e-6)


@pytest.mark.parametrize("norm", hand.NORMS.values(), ids=hand.NORMS.keys())
def test_a_norm_after_the_sum_makes_a_post_norm(norm):
    _, rows = run(lambda: Model(hand.Post, norm=norm, final_norm=False))
    assert_plain(rows, "post")
    assert of(rows, "norm_input_rms") == [None] * 6


@pytest.mark.parametrize(
    ("attention", "kind"),
    [
        (hand.SoftmaxAttention, "attention"),
        (hand.EinsumAttention, "attention"),
        (hand.BiasedAttention, "attention"),
        (hand.LinearAttention, "linear_attention"),
    ],
)
def test_attention_is_known_by_what_it_computes(attention, kind):
    one, rows = run(lambda: Model(Block, attention=attention))
    assert_plain(rows, kinds=[kind, "mlp"] * LAYERS)
    assert {name.rpartition("blocks.0.")[2] for name in one.sites[0].branch.parameters} == {
        "ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias",
        *(["attn.bias.weight"] if attention is hand.BiasedAttention else []),
    }  # fmt: skip


def test_torchs_own_attention_module_and_layer():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    one, rows = run(lambda: Model(Block, attention=Own))
    assert_plain(rows)
    assert one.roles["blocks.0.attn.inner.in_proj_weight"] == "linear"
    assert one.roles["blocks.0.attn.inner.in_proj_bias"] == one.roles["blocks.0.attn.inner.out_proj.bias"] == "bias"

    def layer():
        return nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)

    _, rows = run(lambda: Model(layer, final_norm=False))
    names = [f"blocks.{block}.{part}" for block in range(LAYERS) for part in ("self_attn", "linear2")]
    assert_plain(rows, "post", names=names)


def test_sublayers_of_other_kinds():
    class Convolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.out(F.silu(self.conv(x.mT)[..., : x.shape[1]].mT))

    class Recurrence(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    class Experts(nn.Module):
        """As transformers writes them: each expert's tokens are added into a tensor of zeros."""

        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 3, bias=False)
            self.experts = nn.ModuleList(Mlp() for _ in range(3))

        def forward(self, x):
            flat = x.reshape(-1, WIDTH)
            weights, chosen = F.softmax(self.router(flat), -1).topk(2, dim=-1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                token, place = torch.where(chosen == number)
                out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
            return out.view_as(x)

    class Assigned(Experts):
        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).topk(1, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                here = chosen[..., 0] == number
                out[here] = expert(x[here]) * weights[here]
            return out

    for sublayer, kind in ((Convolution, "ssm"), (Recurrence, "ssm"), (Experts, "moe"), (Assigned, "moe")):
        _, rows = run(lambda sublayer=sublayer: Model(Block, mlp=sublayer))
        assert_plain(rows, kinds=["attention", kind] * LAYERS)


def test_weights_without_a_module():
    class Conv1D(nn.Module):
        """GPT-2's: a linear layer with its weight the other way round."""

        def __init__(self, into, out):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(into, out) * 0.02)
            self.bias = nn.Parameter(torch.zeros(out))

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)

    class Addmm(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_fc, self.c_proj = Conv1D(WIDTH, 32), Conv1D(32, WIDTH)

        def forward(self, x):
            return self.c_proj(F.gelu(self.c_fc(x)))

    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (nn.Parameter(torch.randn(*shape) * 0.1) for shape in ((WIDTH, 32), (32, WIDTH)))
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x):
            return torch.einsum("bth,hd->btd", F.relu(x @ self.up), self.down) + self.bias

    one, rows = run(lambda: Model(Block, mlp=Addmm))
    assert_plain(rows)
    assert one.roles["blocks.0.mlp.c_fc.weight"] == "linear"
    assert one.roles["blocks.0.mlp.c_fc.bias"] == "bias"
    one, rows = run(lambda: Model(Block, mlp=Bare))
    assert_plain(rows)
    assert (one.roles["blocks.0.mlp.up"], one.roles["blocks.0.mlp.bias"]) == ("linear", "bias")
    own = [one.gradients[f"blocks.0.{name}"] for name in ("mlp.up", "mlp.down", "mlp.bias", "ln_2.weight", "ln_2.bias")]
    assert rows[1].param_grad_norm == pytest.approx(sum(norm**2 for norm in own) ** 0.5, rel=1e-12)


def test_lookups_and_positions_as_plain_parameters():
    class Plain(Model):
        def __init__(self):
            super().__init__(Block)
            self.table = nn.Parameter(torch.randn(hand.VOCABULARY, WIDTH))
            self.positions = nn.Parameter(torch.randn(hand.TOKENS, WIDTH))

        def forward(self, ids):
            x = F.embedding(ids, self.table) * WIDTH**0.5 + self.positions[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.final(x) @ self.table.T

    one, rows = run(Plain)
    assert_plain(rows)
    assert "positions" not in one.sites[0].branch.parameters
    assert one.roles["table"] == "embedding"
    assert {"table", "positions"} < one.gradients.keys()
