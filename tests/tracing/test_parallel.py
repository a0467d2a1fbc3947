"""Parallel blocks: several updates of one stream, each a site of its own with the stream they read and the joint sum.

What is measured is compared with the operands that the block itself keeps, in fp64, and with autograd's gradients of them.
"""

from dataclasses import dataclass, field

import handwritten as hand
import pytest
import torch
import torch.nn.functional as F
from handwritten import LAYERS, WIDTH, Mlp, Model, RMSNorm, SelfAttention, of, run
from torch import Tensor, nn


@dataclass
class Kept:
    """What one parallel addition was called with, and what it gave; ``live`` are the tensors that have gradients."""

    stream: Tensor
    updates: list[Tensor]
    total: Tensor
    live: list[Tensor] = field(default_factory=list)


class StateSpace(nn.Module):
    """A sum over the past with a step size of its own for each token (arXiv 2312.00752, without the decay)."""

    def __init__(self):
        super().__init__()
        self.into, self.step, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out((F.softplus(self.step(x)) * self.into(x)).cumsum(1))


class Experts(nn.Module):
    """Two of three routed experts, and one that every token passes."""

    def __init__(self, *, first="routed"):
        super().__init__()
        self.first = first
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))
        self.shared = Mlp()

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = F.softmax(self.router(flat), -1).topk(2, dim=-1)
        routed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            routed.index_add_(0, token, expert(flat[token]) * weights[token, place, None].to(flat.dtype))
        routed, shared = routed.view_as(x), self.shared(x)
        return routed + shared if self.first == "routed" else shared + routed


class CopyingNorm(RMSNorm):
    """Autograd then lets the stream be changed in place in fp32 too."""

    def forward(self, x):
        return super().forward(x.clone())


class Parallel(nn.Module):
    """One norm, and attention and MLP beside each other; how they are summed is ``join``."""

    def __init__(self, join, kept=None, *, parts=None, norms=1, dropout=0.0):
        super().__init__()
        parts = {"attn": SelfAttention, "mlp": Mlp} if parts is None else parts
        self.parts, self.join, self.kept = list(parts), join, kept
        for name, part in parts.items():
            self.add_module(name, part())
        self.norms = nn.ModuleList(CopyingNorm() for _ in range(norms))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        updates = [
            self.dropout(getattr(self, name)(self.norms[index % len(self.norms)](x))) for index, name in enumerate(self.parts)
        ]
        if self.kept is None:
            return self.join(x, *updates)
        before = [one.detach().clone() for one in (x, *updates)]
        live = [x, *updates]
        total = self.join(x, *updates)
        for tensor in (*live, total):
            tensor.retain_grad()
        self.kept.append(Kept(before[0], before[1:], total.detach().clone(), [*live, total]))
        return total


def stream_in_place(x, a, m):
    x += a
    x += m
    return x


def updates_in_place(x, a, m):
    a += m
    return x + a


def into_the_update(x, a, m):
    a += x
    a += m
    return a


JOINS = {
    "x + a + m": lambda x, a, m: x + a + m,
    "x + m + a": lambda x, a, m: x + m + a,
    "(m + a) + x": lambda x, a, m: (m + a) + x,
    "a + (x + m)": lambda x, a, m: a + (x + m),
    "x + (a + m)": lambda x, a, m: x + (a + m),
    "x += a; x += m": stream_in_place,
    "x.add_(a + m)": lambda x, a, m: x.add_(a + m),
    "a += m; x + a": updates_in_place,
    "a += x; a += m": into_the_update,
    "torch.add, stream first": lambda x, a, m: torch.add(torch.add(x, a), m),
    "torch.add, updates first": lambda x, a, m: torch.add(x, torch.add(input=a, other=m)),
}
joins = pytest.mark.parametrize("name", JOINS)
LOST = "of a view that is overwritten twice, the hook on the update in between is lost"


def scan(join, kept=None, *, dtype=torch.bfloat16, memory=1 << 40, **options):
    return run(lambda: Model(Parallel, join=join, kept=kept, **options).to(dtype), memory=memory)


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


def norm(tensor):
    return tensor.double().norm().item()


def by_block(rows, count=2):
    assert [row.site for row in rows] == list(range(len(rows)))
    return [rows[start : start + count] for start in range(0, len(rows), count)]


def assert_measured(rows, kept, names, scales=1.0):
    """Compare each row of one block with the operands: ``names`` are the modules of the updates, in the order of ``kept``."""
    stream, total = kept.stream.double(), kept.total.double()
    together = sum(scales * update.double() for update in kept.updates)
    moved = together != 0
    assert sorted(of(rows, "module")) == sorted(names)
    for row in rows:
        update = scales * kept.updates[names.index(row.module)].double()
        assert row.stream_rms == pytest.approx(rms(stream), rel=1e-9)
        assert row.update_rms == pytest.approx(rms(update), rel=1e-9)
        assert row.sum_rms == pytest.approx(rms(total), rel=1e-9)
        assert row.update_ratio == pytest.approx(rms(update) / rms(stream), rel=1e-9)
        assert row.cosine == pytest.approx(((stream * update).sum() / stream.norm() / update.norm()).item(), rel=1e-9)
        assert row.add_error == pytest.approx(norm(total - (stream + together)) / norm(together), rel=1e-9)
        assert row.swallowed == pytest.approx((total == stream)[moved].double().mean().item(), abs=1e-12)
        assert row.sum_absmax == total.abs().max().item()
        assert row.nonfinite == 0
        assert row.placement == "pre"
        assert (row.stream_dtype, row.update_dtype) == (str(kept.stream.dtype).removeprefix("torch."),) * 2


@joins
@pytest.mark.parametrize("dropout", [0.0, 0.4], ids=["", "dropout"])
def test_each_update_is_a_site_with_the_stream_that_it_read_and_the_joint_sum(name, dropout):
    kept = []
    one, rows = scan(JOINS[name], kept, dropout=dropout)
    assert (len(rows), len(kept)) == (2 * LAYERS, LAYERS)
    for block, (own, operands) in enumerate(zip(by_block(rows), kept, strict=True)):
        assert of(own, "block") == [block] * 2
        assert_measured(own, operands, [f"blocks.{block}.attn", f"blocks.{block}.mlp"])
        assert {row.module.rpartition(".")[2]: row.sublayer for row in own} == {"attn": "attention", "mlp": "mlp"}
        for row in own:
            assert row.norm_input_rms == pytest.approx(row.stream_rms, rel=1e-9)
    # A sum of three numbers of which two are small is rounded: else the comparison above would compare nothing.
    assert all(row.add_error > 1e-4 for row in rows)
    for site, row in zip(one.sites, rows, strict=True):
        own = row.module
        other = own.replace("attn", "mlp") if own.endswith("attn") else own.replace("mlp", "attn")
        assert f"blocks.{row.block}.norms.0.weight" in site.branch.parameters
        assert {f"{own}.c_proj.weight", f"{own}.c_proj.bias"} < site.branch.parameters
        assert not {parameter for parameter in site.branch.parameters if parameter.startswith(other)}


@pytest.mark.parametrize(
    "name",
    JOINS,
)
def test_the_rows_of_a_block_share_the_gradients_of_stream_and_sum_and_have_their_own_of_the_update(name):
    kept = []
    one, rows = scan(JOINS[name], dtype=torch.float32)
    # Of the sum that overwrites nothing: of others autograd has not every operand any more.
    scan(JOINS["x + (a + m)"], kept, dtype=torch.float32)
    for own, operands in zip(by_block(rows), kept, strict=True):
        stream, attention, mlp, total = (norm(tensor.grad) for tensor in operands.live)
        assert of(own, "grad_stream_norm") == pytest.approx([stream] * 2, rel=1e-5)
        assert of(own, "grad_sum_norm") == pytest.approx([total] * 2, rel=1e-5)
        for row in own:
            assert row.grad_update_norm == pytest.approx(attention if row.module.endswith("attn") else mlp, rel=1e-5)
            parameters = one.sites[row.site].branch.parameters
            squares = sum(one.gradients[parameter] ** 2 for parameter in parameters)
            assert row.param_grad_norm == pytest.approx(squares**0.5, rel=1e-12)
        assert stream != pytest.approx(total, rel=1e-3)


@joins
def test_streamed_gives_the_same_rows(name):
    one, rows = scan(JOINS[name])
    two, again = scan(JOINS[name], memory=0)
    assert (one.mode, two.mode) == ("resident", "streamed")
    assert again == rows
    assert two.gradients == one.gradients


@pytest.mark.parametrize(
    ("join", "scale"),
    [
        (lambda x, a, m: x + 0.5 * (a + m), 0.5),
        (lambda x, a, m: (a + m) / 4 + x, 0.25),
        (lambda x, a, m: torch.add(x, a + m, alpha=0.5), 0.5),
        (lambda x, a, m: x + 0.5 * a + 0.5 * m, 0.5),
        (lambda x, a, m: torch.add(torch.add(x, a, alpha=0.5), m, alpha=0.5), 0.5),
    ],
    ids=["x + s (a + m)", "(a + m) / s + x", "alpha of the sum", "x + s a + s m", "alpha of each"],
)
def test_a_scale_of_the_sum_scales_each_update(join, scale):
    kept = []
    _, rows = scan(join, kept, dtype=torch.float32)
    for block, (own, operands) in enumerate(zip(by_block(rows), kept, strict=True)):
        assert_measured(own, operands, [f"blocks.{block}.attn", f"blocks.{block}.mlp"], scale)
        stream, attention, _, total = (norm(tensor.grad) for tensor in operands.live)
        assert of(own, "grad_stream_norm") == pytest.approx([stream] * 2, rel=1e-5)
        assert of(own, "grad_sum_norm") == pytest.approx([total] * 2, rel=1e-5)
        # What is added is s a: its gradient is the sum's, and a's own is s times as large.
        assert of(own, "grad_update_norm") == pytest.approx([total] * 2, rel=1e-5)
        assert attention == pytest.approx(scale * total, rel=1e-5)


def test_a_dropout_of_the_sum_of_the_updates_is_one_mask_for_both():
    seen = []

    def join(x, a, m):
        both = F.dropout(a + m, 0.5)
        mask = (both / (a + m)).detach()
        total = x + both
        seen.append((a.detach() * mask, m.detach() * mask, (mask == 0).float().mean().item()))
        return total

    _, rows = scan(join, dtype=torch.float32)
    for own, (attention, mlp, dropped) in zip(by_block(rows), seen, strict=True):
        assert 0.3 < dropped < 0.7
        by_name = {row.module.rpartition(".")[2]: row for row in own}
        assert by_name["attn"].update_rms == pytest.approx(rms(attention), rel=1e-6)
        assert by_name["mlp"].update_rms == pytest.approx(rms(mlp), rel=1e-6)


@pytest.mark.parametrize("name", ["x + a + m", "(m + a) + x", "x + (a + m)", "a += m; x + a"])
def test_each_update_may_read_the_stream_through_a_norm_of_its_own(name):
    kept = []
    one, rows = scan(JOINS[name], kept, norms=2)
    for block, (own, operands) in enumerate(zip(by_block(rows), kept, strict=True)):
        assert_measured(own, operands, [f"blocks.{block}.attn", f"blocks.{block}.mlp"])
        for row in own:
            assert row.norm_input_rms == pytest.approx(row.stream_rms, rel=1e-9)
            mine = 0 if row.module.endswith("attn") else 1
            norms = {name for name in one.sites[row.site].branch.parameters if ".norms." in name}
            assert norms == {f"blocks.{block}.norms.{mine}.weight"}


THREE = {"attn": SelfAttention, "ssm": StateSpace, "mlp": Mlp}


@pytest.mark.parametrize(
    "join",
    [
        lambda x, a, s, m: x + a + s + m,
        lambda x, a, s, m: x + (a + s + m),
        lambda x, a, s, m: (a + s) + m + x,
        lambda x, a, s, m: x + (a + (s + m)),
        lambda x, a, s, m: (x + a) + (s + m),
        lambda x, a, s, m: x.add_(a).add_(s).add_(m),
    ],
    ids=["x + a + s + m", "x + (a + s + m)", "(a + s) + m + x", "x + (a + (s + m))", "(x + a) + (s + m)", "in place"],
)
def test_three_updates_are_three_sites(join):
    kept = []
    _, rows = scan(join, kept, parts=THREE)
    assert len(rows) == 3 * LAYERS
    for block, (own, operands) in enumerate(zip(by_block(rows, 3), kept, strict=True)):
        assert_measured(own, operands, [f"blocks.{block}.{part}" for part in THREE])
        assert {row.module.rpartition(".")[2]: row.sublayer for row in own} == {
            "attn": "attention",
            "ssm": "ssm",
            "mlp": "mlp",
        }
        assert len(set(of(own, "grad_stream_norm"))) == len(set(of(own, "grad_sum_norm"))) == 1


class HybridHeads(nn.Module):
    """Attention and a state-space model read one norm (arXiv 2507.22448); an MLP of the usual kind follows."""

    def __init__(self, *, first="attn"):
        super().__init__()
        self.first = first
        self.ln_1, self.ln_2 = RMSNorm(), RMSNorm()
        self.attn, self.ssm, self.mlp = SelfAttention(), StateSpace(), Mlp()

    def forward(self, x):
        h = self.ln_1(x)
        mixed = self.attn(h) * 0.5 + self.ssm(h) * 2.0 if self.first == "attn" else self.ssm(h) * 2.0 + self.attn(h) * 0.5
        x = x + mixed
        return x + self.mlp(self.ln_2(x))


@pytest.mark.parametrize("first", ["attn", "ssm"])
def test_hybrid_heads_are_two_sites_before_the_mlps(first):
    for memory in (1 << 40, 0):
        _, rows = run(lambda: Model(HybridHeads, first=first), memory=memory)
        assert len(rows) == 3 * LAYERS
        for block, own in enumerate(by_block(rows, 3)):
            pair, last = own[:2], own[2]
            assert {(row.module, row.sublayer) for row in pair} == {
                (f"blocks.{block}.attn", "attention"),
                (f"blocks.{block}.ssm", "ssm"),
            }
            assert (last.module, last.sublayer) == (f"blocks.{block}.mlp", "mlp")
            assert pair[0].stream_rms == pair[1].stream_rms
            assert pair[0].sum_rms == pair[1].sum_rms == last.stream_rms
            assert last.grad_stream_norm == pytest.approx(pair[0].grad_sum_norm, rel=1e-6)
            assert of(own, "placement") == ["pre"] * 3


class Normed(nn.Module):
    """Norms around a parallel block: of the sum, or of each update."""

    def __init__(self, *, placement):
        super().__init__()
        self.placement = placement
        self.ln, self.after_attn, self.after_mlp = RMSNorm(), RMSNorm(), RMSNorm()
        self.attn, self.mlp = SelfAttention(), Mlp()

    def forward(self, x):
        if self.placement == "post":
            return self.ln(x + self.attn(x) + self.mlp(x))
        h = self.ln(x) if self.placement == "sandwich" else x
        return x + (self.after_attn(self.attn(h)) + self.after_mlp(self.mlp(h)))


@pytest.mark.parametrize("placement", ["post", "sandwich", "reordered"])
def test_where_the_norms_of_a_parallel_block_stand(placement):
    for memory in (1 << 40, 0):
        _, rows = run(lambda: Model(Normed, placement=placement, final_norm=False), memory=memory)
        assert len(rows) == 2 * LAYERS
        assert of(rows, "placement") == [placement] * 6
        for block, own in enumerate(by_block(rows)):
            assert {row.sublayer for row in own} == {"attention", "mlp"}
            assert of(own, "block") == [block] * 2
            assert own[0].sum_rms == own[1].sum_rms


def test_one_update_after_the_other_is_no_parallel_block():
    class Sequential(hand.Block):
        def forward(self, x):
            h = x + self.attn(self.ln_1(x))
            return h + self.mlp(self.ln_2(h))

    _, rows = run(lambda: Model(Sequential))
    hand.assert_plain(rows)
    assert [row.stream_rms for row in rows[1:]] == [row.sum_rms for row in rows[:-1]]


@pytest.mark.parametrize("first", ["routed", "shared"])
def test_routed_and_shared_experts_are_one_update(first):
    class Mixture(hand.Block):
        def __init__(self):
            super().__init__(mlp=lambda: Experts(first=first))

    one, rows = run(lambda: Model(Mixture))
    hand.assert_plain(rows, kinds=["attention", "moe"] * LAYERS)
    own = one.sites[1].branch.parameters
    assert {"blocks.0.mlp.router.weight", "blocks.0.mlp.shared.c_fc.weight", "blocks.0.mlp.experts.0.c_fc.weight"} < own


@pytest.mark.parametrize(
    "join",
    [lambda x, a, m: x + a + m, lambda x, a, m: (m + a) + x, lambda x, a, m: x + (a + m)],
    ids=["x + a + m", "(m + a) + x", "x + (a + m)"],
)
@pytest.mark.parametrize("first", ["routed", "shared"])
def test_experts_beside_an_attention_are_one_of_two_updates(join, first):
    kept = []
    parts = {"attn": SelfAttention, "mlp": lambda: Experts(first=first)}
    _, rows = scan(join, kept, dtype=torch.float32, parts=parts)
    assert len(rows) == 2 * LAYERS
    for block, (own, operands) in enumerate(zip(by_block(rows), kept, strict=True)):
        assert_measured(own, operands, [f"blocks.{block}.attn", f"blocks.{block}.mlp"])
        assert {row.module.rpartition(".")[2]: row.sublayer for row in own} == {"attn": "attention", "mlp": "moe"}
