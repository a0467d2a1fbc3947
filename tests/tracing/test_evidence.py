"""What the tracer finds beside the sites: attention logits, promotions, doubled streams, coarse angles, output parameters."""

import math

import pytest
import torch
import torch.nn.functional as F
from handwritten import LAYERS, WIDTH, Block, Mlp, Model, SelfAttention, SoftmaxAttention, of, run
from torch import nn

from propcheck.measure.rotary_precision import AngleMeasurer
from propcheck.measure.statistics import logit_statistics
from propcheck.tracing.tracer import Tracer


def test_a_fused_and_an_eager_attention_show_the_same_logits():
    _, fused = run(lambda: Model(lambda: Block(attention=SelfAttention)))
    _, eager = run(lambda: Model(lambda: Block(attention=SoftmaxAttention)))
    for column in ("attention_logit_rms", "attention_logit_absmax", "attention_entropy"):
        assert of(fused[::2], column) == pytest.approx(of(eager[::2], column), rel=1e-5)
        assert of(fused[1::2], column) == [None] * LAYERS
    assert all(0.5 < row.attention_entropy < 1 for row in fused[::2])


class Scaled(Block):
    """A learned fp32 number for each block on the stream itself (a scale that keeps its dtype when the rest is cast)."""

    def __init__(self, *, cast=False, **options):
        super().__init__(**options)
        self.cast = cast
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = (x * self.scale).to(x.dtype) if self.cast else x * self.scale
        return super().forward(x)

    def join(self, x, f):
        return x + f.to(x.dtype)


class Casting(nn.Module):
    """A norm that hands on the dtype of its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.layer_norm(x.to(self.weight.dtype), (WIDTH,), self.weight)


def halved(model):
    model.bfloat16()
    model.final = Casting().bfloat16()
    for block in model.blocks:
        block.scale.data = block.scale.data.float()
    return model


def test_a_wide_scale_promotes_the_stream_from_its_first_site_on():
    _, rows = run(lambda: halved(Model(lambda: Scaled(norm=Casting))))
    assert rows[0].promoted == "mul with blocks.0.scale (float32)"
    assert (rows[0].stream_dtype, rows[0].update_dtype) == ("float32", "float32")
    assert of(rows[1:], "promoted") == [None] * (2 * LAYERS - 1)  # it is wide already


class Upcasting(Casting):
    """A norm that computes in fp32, as most do."""

    def forward(self, x):
        return F.layer_norm(x.float(), (WIDTH,)).to(self.weight.dtype) * self.weight


def test_a_norm_that_casts_what_is_wide_already_does_not_hide_it():
    _, rows = run(lambda: halved(Model(lambda: Scaled(norm=Upcasting))))
    assert rows[0].promoted == "mul with blocks.0.scale (float32)"


def test_a_stream_that_is_cast_back_or_cast_on_purpose_is_not_promoted():
    _, rows = run(lambda: halved(Model(lambda: Scaled(norm=Casting, cast=True))))
    assert of(rows, "promoted") == [None] * (2 * LAYERS)
    _, rows = run(lambda: Model(lambda: Block(norm=Casting)).bfloat16())
    assert of(rows, "promoted") == [None] * (2 * LAYERS)


class Doubled(Block):
    """The attention's update is computed, and the stream added to itself (kyegomez/BitNet issue 32)."""

    def forward(self, x):
        self.attn(self.ln_1(x))
        x = x + x
        return self.join(x, self.mlp(self.ln_2(x)))


class AddedTwice(Block):
    def forward(self, x):
        x = x + (x + self.attn(self.ln_1(x)))
        return self.join(x, self.mlp(self.ln_2(x)))


class InTwoSteps(Block):
    def forward(self, x):
        h = self.attn(self.ln_1(x)) + x
        h = h + x
        return self.join(h, self.mlp(self.ln_2(h)))


class Replaced(Block):
    """As it stood: the update replaces the stream, and is added to itself."""

    def forward(self, x):
        x = self.attn(self.ln_1(x))
        x = x + x
        return self.join(x, self.mlp(self.ln_2(x)))


class InPlaceOfACopy(Block):
    def forward(self, x):
        total = x.clone()
        total += x
        return self.join(total, self.mlp(self.ln_2(total)))


class PostTwice(Block):
    def forward(self, x):
        x = self.ln_1(x + (x + self.attn(x)))
        return self.ln_2(x + self.mlp(x))


@pytest.mark.parametrize(
    ("block", "first"), [(Doubled, 0), (AddedTwice, 1), (InTwoSteps, 1), (Replaced, 0), (InPlaceOfACopy, 0), (PostTwice, 1)]
)
def test_a_stream_that_is_counted_twice_is_noted_where_that_happens(block, first):
    one, _ = run(lambda: Model(block))
    assert [(found.block, found.module) for found in one.doublings] == [(n, f"blocks.{n}") for n in range(LAYERS)]
    assert one.doublings[0].site == first


class Halving(Block):
    def forward(self, x):
        return super().forward(0.5 * x + 0.5 * x)


class Gated(Block):
    def forward(self, x):
        return super().forward(x + F.gelu(x))


class LongSkip(Block):
    def forward(self, x):
        start = x
        return super().forward(x) + 0.1 * start


@pytest.mark.parametrize("block", [Block, Halving, Gated, LongSkip])
def test_other_sums_of_streams_are_no_doublings(block):
    one, _ = run(lambda: Model(block))
    assert one.doublings == ()


class Rotary(nn.Module):
    def __init__(self, dtype, *, in_half=False):
        super().__init__()
        self.in_half = in_half
        self.register_buffer("frequencies", (10000.0 ** -(torch.arange(0, 8) / 8)).to(dtype))

    def forward(self, x):
        positions = torch.arange(2048.0)
        angles = positions[:, None] * self.frequencies.float()
        if self.in_half:
            angles = angles.bfloat16()
        return x * angles.cos()[: x.shape[1], :1] + angles.sin()[: x.shape[1], :1]


def angles_of(module):
    measurer = AngleMeasurer()
    with Tracer({id(buffer): name for name, buffer in module.named_buffers()}, [measurer]) as tracer:
        module(torch.ones(1, 4, 8))
    return measurer.records(tracer.block_of)


def test_angles_from_half_precision_are_off_by_their_size_over_its_digits():
    # 2047 with 8 significant bits, the first of them implied: rounding moves it by up to 2047 / 256 / 2.
    (found,) = angles_of(Rotary(torch.bfloat16))
    assert (found.parameter, found.dtype) == ("frequencies", "bfloat16")
    assert (found.largest, found.error) == (2047, pytest.approx(2047 / 256))
    (found,) = angles_of(Rotary(torch.float32, in_half=True))
    assert (found.parameter, found.dtype, found.largest) == (None, "bfloat16", 2048)
    assert angles_of(Rotary(torch.float32)) == ()


def test_logit_statistics_are_those_of_numpy():
    logits = (torch.randn(3, 5, 1000, generator=torch.Generator().manual_seed(0)) * 7 + torch.arange(5.0)[:, None]).bfloat16()
    exact = logits.double().numpy()
    found = logit_statistics(logits)
    assert found.std == pytest.approx(math.sqrt(exact.var(-1).mean()), rel=1e-9)
    assert found.absmax == abs(exact).max()


def test_the_parameters_that_wrote_an_update_are_those_of_its_last_product():
    one, _ = run(lambda: Model(lambda: Block(mlp=Mlp)))
    assert one.sites[1].branch.output == {"blocks.0.mlp.c_proj.weight", "blocks.0.mlp.c_proj.bias"}


class WrittenOut(SelfAttention):
    def mix(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        return shares / shares.sum(-1, keepdim=True) @ v


def test_a_softmax_that_is_written_out_makes_an_attention():
    _, rows = run(lambda: Model(lambda: Block(attention=WrittenOut)))
    assert of(rows, "sublayer") == ["attention", "mlp"] * LAYERS
