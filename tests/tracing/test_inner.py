"""Sums that look like residual additions and are none: inside a branch, before a mixer, in a state, of positions."""

from itertools import pairwise

import handwritten as hand
import pytest
import torch
import torch.nn.functional as F
from handwritten import LAYERS, NAMES, TOKENS, VOCABULARY, WIDTH, Block, Mlp, Model, SelfAttention, assert_plain, of, run
from torch import nn

RESIDENT, STREAMED = 1 << 40, 0


def assert_only_the_two(build, *, kinds=hand.KINDS, names=NAMES):
    """Two sites a block, chained and with every gradient, resident and streamed alike."""
    one, rows = run(build)
    assert of(rows, "module") == names
    assert_plain(rows, kinds=kinds, names=names)
    assert [row.stream_rms for row in rows[1:]] == [row.sum_rms for row in rows[:-1]]
    assert of(rows[1:], "grad_stream_norm") == pytest.approx(of(rows[:-1], "grad_sum_norm"), rel=1e-6)
    assert run(build, memory=STREAMED)[1] == rows
    return one, rows


# ---------------------------------------------------------------------- adapters


class Lora(nn.Module):
    """W x + B A x; all are square or not, and the sum may have the stream's shape."""

    def __init__(self, into=WIDTH, out=WIDTH, *, order="base first"):
        super().__init__()
        self.base, self.order = nn.Linear(into, out), order
        self.a, self.b = nn.Linear(into, 2, bias=False), nn.Linear(2, out, bias=False)

    def forward(self, x):
        low = self.b(self.a(F.dropout(x, 0.1)))
        if self.order == "in place":
            y = self.base(x)
            y += 2.0 * low
            return y
        return self.base(x) + 2.0 * low if self.order == "base first" else 2.0 * low + self.base(x)


class LoraAttention(SelfAttention):
    def __init__(self, order):
        super().__init__()
        self.c_attn, self.c_proj = Lora(WIDTH, 3 * WIDTH, order=order), Lora(order=order)


class SquareMlp(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.up, self.down = Lora(order=order), Lora(order=order)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("order", ["base first", "low rank first", "in place"])
def test_low_rank_adapters_are_part_of_their_layers(order):
    one, _ = assert_only_the_two(lambda: Model(Block, attention=lambda: LoraAttention(order), mlp=lambda: SquareMlp(order)))
    for number, part in enumerate(("attn", "mlp")):
        own = {name for name in one.gradients if name.startswith(f"blocks.0.{part}.")}
        assert own < one.sites[number].branch.parameters


class Bottleneck(nn.Module):
    """y + up(relu(down(y))), with a skip of its own (arXiv 1902.00751)."""

    def __init__(self, *, normed=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if normed else nn.Identity()
        self.down, self.up = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, y):
        return y + self.up(F.relu(self.down(self.norm(y))))


class Adapted(nn.Module):
    """The adapter behind a sublayer, before its output joins the stream."""

    def __init__(self, inner, *, normed):
        super().__init__()
        self.inner, self.adapter = inner(), Bottleneck(normed=normed)

    def forward(self, x):
        return self.adapter(self.inner(x))


@pytest.mark.parametrize("normed", [False, True])
def test_an_adapter_with_its_own_skip_behind_a_sublayer(normed):
    one, _ = assert_only_the_two(
        lambda: Model(Block, attention=lambda: Adapted(SelfAttention, normed=normed), mlp=lambda: Adapted(Mlp, normed=normed))
    )
    assert {"blocks.0.attn.adapter.down.weight", "blocks.0.attn.inner.c_attn.weight"} < one.sites[0].branch.parameters


def test_an_adapter_with_its_own_skip_before_a_mixer():
    class Before(nn.Module):
        """On the normed copy of the stream that the mixer reads, which ends there."""

        def __init__(self):
            super().__init__()
            self.adapter, self.inner = Bottleneck(), SelfAttention()

        def forward(self, x):
            return self.inner(self.adapter(x))

    one, _ = assert_only_the_two(lambda: Model(Block, attention=Before))
    assert {"blocks.0.attn.adapter.down.weight", "blocks.0.ln_1.weight"} < one.sites[0].branch.parameters


def test_an_adapter_before_a_mixer_that_reads_the_stream_unnormed():
    class Bare(Block):
        def __init__(self):
            super().__init__()
            self.adapter = Bottleneck()

        def forward(self, x):
            x = x + self.attn(self.ln_1(self.adapter(x)))
            return x + self.mlp(self.ln_2(x))

    _, rows = run(lambda: Model(Bare))
    assert of(rows, "module") == NAMES
    assert of(rows, "sublayer") == hand.KINDS
    assert [row.stream_rms for row in rows[1:]] == [row.sum_rms for row in rows[:-1]]


def test_a_skip_inside_an_mlp():
    class Deep(nn.Module):
        """up, two inner residual layers at the inner width, down."""

        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.up(x)
            h = h + F.relu(self.first(h))
            h = h + F.relu(self.second(h))
            return self.down(h)

    assert_only_the_two(lambda: Model(Block, mlp=Deep))


def test_an_inner_skip_that_joins_the_stream_without_another_product():
    class Refined(nn.Module):
        """F(x) = h + relu(W h), h = V x: its sum is the update."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = self.first(x)
            return h + F.relu(self.second(h))

    one, _ = assert_only_the_two(lambda: Model(Block, mlp=Refined))
    assert {"blocks.0.mlp.first.weight", "blocks.0.mlp.second.weight"} < one.sites[1].branch.parameters


class Indexed(nn.Module):
    """An adapter for some of the tokens, written into the layer's output at their places."""

    def __init__(self, *, way):
        super().__init__()
        self.way, self.inner = way, nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        y, places = self.inner(x), torch.tensor([0, 2, 4])
        low = self.b(self.a(x[:, places]))
        rows = torch.arange(len(x))[:, None]
        if self.way == "index_put":
            return y.index_put((rows, places[None]), low, accumulate=True)
        if self.way == "index_add":
            return y.index_add(1, places, low)
        y = y.clone()
        if self.way == "y[i] += low":
            y[:, places] += low
        else:
            y[:, places] = y[:, places] + low
        return y


@pytest.mark.parametrize("way", ["index_put", "index_add", "y[i] += low", "y[i] = y[i] + low"])
def test_adapters_that_are_written_to_some_of_the_tokens(way):
    class Before(nn.Module):
        def __init__(self):
            super().__init__()
            self.adapted, self.inner = Indexed(way=way), SelfAttention()

        def forward(self, x):
            return self.inner(self.adapted(x))

    one, _ = assert_only_the_two(lambda: Model(Block, attention=Before))
    assert {"blocks.0.attn.adapted.a.weight", "blocks.0.attn.adapted.b.weight"} < one.sites[0].branch.parameters
    one, rows = run(lambda: Model(Block, mlp=lambda: Indexed(way=way)))
    assert of(rows, "module") == NAMES
    assert {"blocks.0.mlp.a.weight", "blocks.0.mlp.inner.weight"} < one.sites[1].branch.parameters


def test_an_adapter_for_some_of_the_tokens_is_no_mixture_of_experts():
    assert of(run(lambda: Model(Block, mlp=lambda: Indexed(way="index_add")))[1], "sublayer") == hand.KINDS


# ---------------------------------------------------------------------- before and inside a mixer


def test_scores_plus_a_bias_of_their_own_shape():
    class Projected(SelfAttention):
        """A bias computed from the input, of the very shape of the scores."""

        def __init__(self):
            super().__init__()
            self.bias = nn.Linear(WIDTH, self.heads * TOKENS)

        def forward(self, x):
            self.added = self.bias(x).unflatten(-1, (self.heads, TOKENS)).transpose(1, 2)
            return super().forward(x)

        def mix(self, q, k, v):
            scores = q @ k.transpose(-2, -1)
            return F.softmax(scores + self.added, dim=-1) @ v

    assert_only_the_two(lambda: Model(Block, attention=Projected))
    _, rows = run(lambda: Model(Block, attention=hand.BiasedAttention))
    assert_plain(rows)


def test_relative_positions_that_are_added_to_the_scores_by_a_product():
    class Relative(SelfAttention):
        """q k + q r, both [batch, heads, T, T] (Transformer-XL)."""

        def __init__(self):
            super().__init__()
            self.distances = nn.Embedding(TOKENS, WIDTH // self.heads)

        def mix(self, q, k, v):
            r = self.distances(torch.arange(k.shape[2]))
            return F.softmax(q @ k.mT + q @ r.mT, dim=-1) @ v

    assert_only_the_two(lambda: Model(Block, attention=Relative))


class Shifted(nn.Module):
    """A mixture of each token with the one before (RWKV), written in two ways."""

    def __init__(self, inner, *, way):
        super().__init__()
        self.inner, self.way = inner(), way
        self.mu = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        return self.inner(x + (before - x) * self.mu if self.way == "difference" else x * self.mu + before * (1 - self.mu))


@pytest.mark.parametrize("way", ["difference", "both scaled"])
def test_token_shift(way):
    assert_only_the_two(
        lambda: Model(Block, attention=lambda: Shifted(SelfAttention, way=way), mlp=lambda: Shifted(Mlp, way=way))
    )


def test_token_shift_by_a_low_rank_mixture():
    class Dynamic(nn.Module):
        """x + (before - x) * (mu + B tanh(A x)): a product decides how much (RWKV 6)."""

        def __init__(self):
            super().__init__()
            self.inner, self.mu = SelfAttention(), nn.Parameter(torch.rand(WIDTH))
            self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x):
            before = F.pad(x, (0, 0, 1, -1))
            return self.inner(x + (before - x) * (self.mu + self.b(torch.tanh(self.a(x)))))

    assert_only_the_two(lambda: Model(Block, attention=Dynamic))


class Recurrence(nn.Module):
    """S = g S + k v, token by token; ``kept`` is where the last state stays, which nobody reads."""

    def __init__(self, *, gate="number", kept=False):
        super().__init__()
        self.gate, self.kept = gate, kept
        self.qkv, self.g, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        g = torch.sigmoid(self.g(x))
        state, outputs = k.new_zeros(len(x), WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            written = k[:, t, :, None] * v[:, t, None, :]
            decay = 0.9 if self.gate == "number" else g[:, t, :, None]
            state = decay * state + written
            outputs.append((q[:, t, None, :] @ state)[:, 0])
        y = self.out(torch.stack(outputs, 1))
        return (y, state) if self.kept else y


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("kept", [False, True], ids=["", "last state returned"])
@pytest.mark.parametrize("gate", ["number", "learned"])
def test_the_state_of_a_recurrence(gate, kept):
    def attention():
        inner = Recurrence(gate=gate, kept=kept)
        return First(inner) if kept else inner

    assert_only_the_two(lambda: Model(Block, attention=attention), kinds=["linear_attention", "mlp"] * LAYERS)


def test_the_delta_rule():
    class Delta(Recurrence):
        """S = S + b (v - S k) k: the state's update is computed from the state by a product."""

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            k = F.normalize(k, dim=-1)
            state, outputs = k.new_zeros(len(x), WIDTH, WIDTH), []
            for t in range(x.shape[1]):
                read = (k[:, t, None, :] @ state)[:, 0]
                state = state + k[:, t, :, None] * (0.5 * (v[:, t] - read))[:, None, :]
                outputs.append((q[:, t, None, :] @ state)[:, 0])
            return self.out(torch.stack(outputs, 1))

    assert_only_the_two(lambda: Model(Block, attention=Delta), kinds=["linear_attention", "mlp"] * LAYERS)


def test_a_vector_state_of_the_streams_own_shape():
    class Memory(nn.Module):
        """h = h + W tanh(U h + x_t) over the tokens, each h [batch, width]; the last h is handed out too."""

        def __init__(self):
            super().__init__()
            self.into, self.u, self.w = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.out = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            given, h, outputs = self.into(x), x.new_zeros(len(x), WIDTH), []
            for t in range(x.shape[1]):
                h = h + self.w(torch.tanh(self.u(h) + given[:, t]))
                outputs.append(h)
            return self.out(torch.stack(outputs, 1)), h

    one, rows = run(lambda: Model(Block, attention=lambda: First(Memory())))
    assert of(rows, "module") == NAMES
    assert {"blocks.0.attn.inner.u.weight", "blocks.0.attn.inner.into.weight"} < one.sites[0].branch.parameters


class Convolved(SelfAttention):
    """k + conv(k) and the like before the attention (canon layers, short convolutions)."""

    def __init__(self, *, what):
        super().__init__()
        self.what, self.conv = what, nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

    def around(self, x):
        return x + self.conv(x.mT)[..., : x.shape[1]].mT

    def forward(self, x):
        batch, tokens, width = x.shape
        x = self.around(x) if self.what == "input" else x
        q, k, v = self.c_attn(x).split(width, dim=2)
        k, v = (self.around(k) if self.what != "input" else k), (self.around(v) if self.what == "keys and values" else v)
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return self.c_proj(self.around(y) if self.what == "output" else y)


@pytest.mark.parametrize("what", ["input", "keys", "keys and values", "output"])
def test_short_convolutions_with_their_own_skips(what):
    assert_only_the_two(lambda: Model(Block, attention=lambda: Convolved(what=what)))


# ---------------------------------------------------------------------- beside the stream


class Routed(Block):
    """Experts whose router keeps a state, handed from layer to layer beside the stream."""

    def __init__(self):
        super().__init__()
        self.router, self.choose = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, state):
        x = x + self.attn(self.ln_1(x))
        h = self.ln_2(x)
        own = self.router(h)
        state = own if state is None else own + 0.5 * state
        weights = F.softmax(self.choose(F.gelu(state)), -1)
        update = sum(weights[..., n, None] * expert(h) for n, expert in enumerate(self.experts))
        return x + update, state


def test_the_state_of_a_router_that_is_handed_from_layer_to_layer():
    class Handed(Model):
        def forward(self, ids):
            x, state = self.tokens(ids), None
            for block in self.blocks:
                x, state = block(x, state)
            return self.head(self.final(x))

    _, rows = run(lambda: Handed(Routed))
    assert of(rows, "sublayer")[::2] == ["attention"] * LAYERS
    assert of(rows, "block") == [0, 0, 1, 1, 2, 2]
    assert [row.stream_rms for row in rows[1:]] == [row.sum_rms for row in rows[:-1]]


def test_values_that_are_handed_from_the_first_layer_to_the_others():
    class Values(SelfAttention):
        """v + first v, of every later layer (arXiv 2410.17897)."""

        def forward(self, x, first):
            batch, tokens, width = x.shape
            q, k, v = self.c_attn(x).split(width, dim=2)
            first = v if first is None else first
            v = 0.5 * v + 0.5 * first
            q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))
            return self.c_proj(self.mix(q, k, v).transpose(1, 2).flatten(2)), first

    class Passing(Block):
        def forward(self, x, first):
            update, first = self.attn(self.ln_1(x), first)
            x = x + update
            return x + self.mlp(self.ln_2(x)), first

    class Handed(Model):
        def forward(self, ids):
            x, first = self.tokens(ids), None
            for block in self.blocks:
                x, first = block(x, first)
            return self.head(self.final(x))

    _, rows = run(lambda: Handed(Passing, attention=Values))
    assert_plain(rows)


def test_positions_that_are_computed_by_an_mlp():
    class Computed(Model):
        def __init__(self, *, late):
            super().__init__(Block)
            self.late = late
            self.into, self.out = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)

        def place(self, ids):
            return self.out(F.gelu(self.into(torch.arange(ids.shape[1], dtype=torch.float32)[:, None] / TOKENS)))

        def forward(self, ids):
            x = self.place(ids) + self.tokens(ids) if self.late else self.tokens(ids) + self.place(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(self.final(x))

    for late in (False, True):
        _, rows = run(lambda late=late: Computed(late=late))
        assert_plain(rows)


def test_positions_that_are_computed_from_coordinates_of_the_batch():
    class Coordinates(Model):
        """A float input of its own, [batch, tokens, 2], through a product: a part of the embedding."""

        def __init__(self):
            super().__init__(Block)
            self.place = nn.Linear(2, WIDTH)

        def forward(self, ids):
            coordinates = torch.stack((ids / VOCABULARY, torch.arange(ids.shape[1]).expand_as(ids) / TOKENS), -1)
            x = self.tokens(ids) + self.place(coordinates)
            for block in self.blocks:
                x = block(x)
            return self.head(self.final(x))

    assert_plain(run(Coordinates)[1])


# ---------------------------------------------------------------------- sums of the stream with itself


class Doubling(Block):
    """x + x where the update should be (BitNet#32): no branch, no site; the MLP's is as ever."""

    def forward(self, x):
        x = x + x
        return x + self.mlp(self.ln_2(x))


def test_the_stream_added_to_itself_is_no_site():
    _, rows = run(lambda: Model(Doubling))
    assert of(rows, "module") == NAMES[1::2]
    assert rows[0].sum_rms * 2 == pytest.approx(rows[1].stream_rms, rel=1e-12)


@pytest.mark.parametrize("way", ["x + (x + f)", "(x + f) + x"])
def test_a_doubled_residual_has_one_site_and_shows_in_the_stream(way):
    class Doubled(Block):
        def join(self, x, f):
            return x + (x + f) if way == "x + (x + f)" else (x + f) + x

    _, rows = run(lambda: Model(Doubled))
    assert of(rows, "module") == NAMES
    # The next stream is not the sum: that is what a rule can see.
    for row, after in pairwise(rows):
        assert after.stream_rms > 1.4 * row.sum_rms


def test_a_u_net_adds_an_early_stream_to_a_late_one():
    class Skips(Model):
        def __init__(self):
            super().__init__(Block, layers=4)

        def forward(self, ids):
            x = self.tokens(ids)
            early = x = self.blocks[0](x)
            x = self.blocks[2](self.blocks[1](x))
            x = self.blocks[3](x + early)
            return self.head(self.final(x))

    _, rows = run(Skips)
    assert of(rows, "module") == [f"blocks.{block}.{part}" for block in range(4) for part in ("attn", "mlp")]
    assert rows[6].stream_rms != rows[5].sum_rms


def test_a_u_net_with_learned_weights_of_its_skips():
    class Weighted(Model):
        """modded-nanogpt's: x + w early."""

        def __init__(self):
            super().__init__(Block, layers=4)
            self.w = nn.Parameter(torch.full((2,), 0.5))

        def forward(self, ids):
            start = x = self.tokens(ids)
            kept = []
            for number, block in enumerate(self.blocks):
                if number >= 2:
                    x = x + self.w[number - 2] * kept.pop()
                x = block(0.9 * x + 0.1 * start)
                kept.append(x)
            return self.head(self.final(x))

    _, rows = run(Weighted)
    assert of(rows, "module") == [f"blocks.{block}.{part}" for block in range(4) for part in ("attn", "mlp")]


def test_the_mean_of_the_last_layers_is_no_site():
    class Averaged(Model):
        def forward(self, ids):
            x, kept = self.tokens(ids), []
            for block in self.blocks:
                x = block(x)
                kept.append(x)
            return self.head(self.final((kept[-1] + kept[-2]) / 2))

    assert of(run(lambda: Averaged(Block))[1], "module") == NAMES


def test_two_heads_whose_logits_are_summed_are_no_site():
    class Heads(Model):
        def __init__(self):
            super().__init__(Block)
            self.second = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            x = self.final(x)
            return self.head(x) + self.second(x)

    assert_plain(run(Heads)[1])


def test_a_square_head_of_embeddings_is_no_site():
    class Square(Model):
        """The head is a layer of the stream's own width before the logits, with a skip on normed values."""

        def __init__(self):
            super().__init__(Block)
            self.transform = nn.Linear(WIDTH, WIDTH)

        def forward(self, ids):
            x = self.tokens(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(F.gelu(self.transform(self.final(x))))

    assert_plain(run(Square)[1])
