"""What normalisations read and give, however they are written, against the same in float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from handwritten import NORMS, TOKENS, WIDTH, Block, Model, RMSNorm, run
from torch import nn

from propcheck.measure.norms import NormMeasurer
from propcheck.measure.site_rows import norm_records
from propcheck.tracing.tracer import Tracer


def record_of(module, x):
    """Trace ``module`` on a float input, and return the record of its only norm and its output."""
    measurer = NormMeasurer()
    tracer = Tracer({id(p): name for name, p in module.named_parameters()}, [measurer])
    tracer.begin(x)
    with tracer:
        y = module(x)
    (found,) = norm_records(measurer.measured, [], 0, tracer.block_of)
    return found, y.detach().double().numpy()


def tokens(scale=1.0, *, rows=TOKENS):
    drawn = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(0)) * 3 + 0.5
    return scale * drawn


def rms(values):
    return math.sqrt((values**2).mean())


# What each writes down itself; None: none, or not as something added to the statistic.
KINDS = {
    "nn.LayerNorm": ("variance", 1e-5), "nn.RMSNorm": ("mean_square", torch.finfo(torch.float32).eps),
    "by hand": ("mean_square", 1e-6), "by hand, 1 + w": ("mean_square", 1e-6), "plain": ("mean_square", 1e-6),
    "folded": ("mean_square", 1e-6), "LayerNorm by hand": ("mean_square", 1e-5), "normalize": ("length", 1e-24),
    "vector norm": ("length", None), "counted dimension": ("length", None), "F.layer_norm": ("variance", 1e-5),
    "F.rms_norm": ("mean_square", 1e-6),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_measured_however_it_is_written(name):
    module = NORMS[name]()
    weight = dict(module.named_parameters())["weight"]
    with torch.no_grad():
        weight.add_(torch.linspace(0.0, 2.0, WIDTH))
    x = tokens()
    found, y = record_of(module, x)
    source = x.double().numpy()
    if name == "LayerNorm by hand":  # what is normalised is what was centred
        source = source - source.mean(-1, keepdims=True)
    assert (found.kind, found.width, found.parameter, found.place) == (KINDS[name][0], WIDTH, "weight", "outside")
    assert found.eps == pytest.approx(KINDS[name][1]) if KINDS[name][1] else found.eps is None
    assert found.input_rms == pytest.approx(rms(source), rel=1e-6)
    assert found.input_absmax == pytest.approx(np.abs(source).max(), rel=1e-6)
    assert found.output_rms == pytest.approx(rms(y), rel=1e-6)
    assert found.zero_share == 0
    gain = weight.detach().double().numpy() + (name == "by hand, 1 + w")
    assert found.gain == pytest.approx(rms(gain), rel=1e-6)


@pytest.mark.parametrize("name", ["nn.LayerNorm", "by hand", "by hand, 1 + w", "plain", "F.layer_norm", "F.rms_norm"])
def test_the_epsilon_share_is_that_of_the_tokens_below_ten_eps(name):
    x = tokens(rows=100) * torch.logspace(-5, 1, 100)[:, None]
    found, _ = record_of(NORMS[name](), x)
    exact = x.double().numpy()
    statistic = exact.var(-1) if found.kind == "variance" else (exact**2).mean(-1)
    assert 0.1 < found.epsilon_share < 0.9
    assert found.epsilon_share == pytest.approx((statistic < 10 * found.eps).mean(), abs=0.006)


class HalfNorm(nn.Module):
    """Without an upcast: in fp16 the squares overflow above 256 (pytorch/pytorch issue 133085)."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_vectors_that_overflow_to_zero_are_counted():
    x = tokens().half()
    x[0] *= 1000
    x[1, 0] = 0  # nothing in, nothing out: not counted
    found, y = record_of(HalfNorm(), x)
    assert found.dtype == "float16"
    assert (y[0] == 0).all()
    assert found.zero_share == pytest.approx(TOKENS / (2 * TOKENS - 1))
    assert record_of(RMSNorm(), x)[0].dtype == "float32"


class Heads(nn.Module):
    def forward(self, x):
        return F.layer_norm(x.unflatten(-1, (4, -1)), (WIDTH // 4,))


def test_heads_are_vectors_of_their_own():
    x = tokens()
    found, y = record_of(Heads(), x)
    assert (found.width, found.gain, found.parameter) == (WIDTH // 4, None, None)
    assert found.output_rms == pytest.approx(rms(y), rel=1e-6)


def test_norms_over_other_dimensions_have_an_input_and_nothing_else():
    found, _ = record_of(nn.GroupNorm(1, TOKENS), tokens())
    assert found.input_rms == pytest.approx(rms(tokens().double().numpy()), rel=1e-6)
    assert (found.eps, found.output_rms, found.epsilon_share) == (None, None, None)


class Qk(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm, self.out = RMSNorm(), RMSNorm(), nn.Linear(WIDTH, WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        q, k = self.q_norm(self.q(x)), self.k_norm(self.k(x))
        return self.out(F.scaled_dot_product_attention(q, k, self.v(x), is_causal=True))


def test_each_norm_has_its_place():
    one, _ = run(lambda: Model(lambda: Block(attention=Qk)))
    places = [(norm.place, norm.site, norm.module) for norm in one.norms[:5]]
    assert places == [
        ("read", 0, "blocks.0.ln_1"),
        ("inside", 0, "blocks.0.attn.q_norm"),
        ("inside", 0, "blocks.0.attn.k_norm"),
        ("read", 1, "blocks.0.ln_2"),
        ("read", 2, "blocks.1.ln_1"),
    ]
    assert [norm.block for norm in one.norms[:5]] == [0, 0, 0, 0, 1]
    assert one.norms[-1].place == "outside"


class PostBlock(Block):
    def forward(self, x):
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


def test_a_norm_on_the_stream_belongs_to_the_sum_that_it_reads():
    one, _ = run(lambda: Model(PostBlock))
    assert [(norm.place, norm.site) for norm in one.norms[:3]] == [("stream", 0), ("stream", 1), ("stream", 2)]


class PartlyNormed(Block):
    """Queries alone are normed (facebookresearch/xformers issue 233)."""

    def forward(self, x):
        return x + self.attn.mix(self.ln_1(x), x, x)


class Separate(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def mix(self, q, k, v):
        return self.out(F.scaled_dot_product_attention(self.q(q), self.k(k), self.v(v)))

    def forward(self, x):
        return self.mix(x, x, x)


def test_a_sublayer_that_reads_past_its_norm_says_so():
    _, rows = run(lambda: Model(lambda: PartlyNormed(attention=Separate)))
    assert {row.bare_read for row in rows} == {True}
    _, rows = run(lambda: Model(lambda: Block(attention=Separate)))
    assert {row.bare_read for row in rows} == {False}
    assert all(
        row.norm_output_rms is not None and row.norm_input_rms == pytest.approx(row.stream_rms, rel=1e-6) for row in rows
    )


class LateNorm(nn.Module):
    """The queries are divided by the RMS of what they were computed from."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_a_norm_that_divides_what_came_later_measures_nothing():
    found, _ = record_of(LateNorm(), tokens())
    assert (found.input_rms, found.output_rms, found.epsilon_share) == (None, None, None)


class PlusOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight + 1)


def test_a_gain_that_was_computed_goes_by_its_parameter():
    found, _ = record_of(PlusOne(), tokens())
    assert (found.parameter, found.gain) == ("weight", 1.5)
