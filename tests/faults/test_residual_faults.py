"""Residual additions that are missing, doubled or taken at the wrong place: in every block, and in one block alone.

Their repaired twins are the models of ``test_healthy_models.py``, which have no finding.
"""

from __future__ import annotations

import pytest
import torch
from faulty_residuals import (
    AddsItself,
    BitNetBlock,
    Detached,
    HalfDetached,
    NoResidual,
    NormsAll,
    NormsOnlyQueries,
    ResidualAfterNorm,
    TwiceResidual,
    UntrackedMlp,
)
from scanned import BATCH, found, healthy, scan, sites
from torch import nn
from toy import BLOCKS, Block, Decoder, FunctionalBlock, Gpt2Block, ParallelBlock, only

# ------------------------------------------------------------------ in every block


class AddsItselfInPlace(FunctionalBlock):
    def attend(self, x):
        self.attention(x)
        total = x.clone()
        total += x
        return total


class AddsItselfByFunction(Gpt2Block):
    def attend(self, residual):
        self.mix(self.ln_1(residual))
        return torch.add(residual, residual)


@pytest.mark.parametrize(
    ("block", "rms", "attention"),
    [
        (AddsItself, 1.3e3, "attn.wo.weight"),
        (AddsItselfInPlace, 1.6e3, "w_out"),
        (AddsItselfByFunction, 1.5e3, "c_attn.weight"),
    ],
)
def test_a_stream_that_is_added_to_itself_is_found_with_what_comes_of_it(block, rms, attention):
    """kyegomez/BitNet issue 32: ``x = x + x`` where ``x = x + attention(x)`` was meant."""
    run = scan(lambda: Decoder(block), batch=BATCH)
    assert sites(run)[-1].sum_rms == pytest.approx(rms, rel=0.1)  # .02 x 2^16 = 1.3e3, and what the first updates add to .02
    assert len(run.record.doublings) == BLOCKS
    (broken,) = found(run, "PC206")
    assert (broken.severity, broken.site.block) == ("error", 0)
    assert any(one.startswith("PC301 at ") for one in broken.also)
    (explosion,) = found(run, "PC201")
    assert explosion.value == pytest.approx(2.0, rel=0.05)
    (dead,) = found(run, "PC303")
    assert dead.severity == "error"
    assert f"layers.*.{attention}" in dead.message


def test_so_is_an_attention_that_is_added_to_itself_and_replaces_the_stream():
    run = scan(lambda: Decoder(BitNetBlock))
    (broken,) = found(run, "PC206")
    assert (broken.severity, broken.site.block) == ("error", 0)


def test_an_attention_that_reads_keys_and_values_past_the_norm_is_found():
    """facebookresearch/xformers issue 233: q has RMS 1, k and v that of the stream, .02, a fiftieth."""
    run = scan(lambda: Decoder(NormsOnlyQueries))
    first = sites(run)[0]
    assert first.bare_read
    assert first.norm_output_rms / first.stream_rms == pytest.approx(50, rel=0.05)
    (finding,) = found(run, "PC106")
    assert finding.site.sublayer == "attention"
    assert not any(one.bare_read for one in sites(run) if one.sublayer == "mlp")


class NormsOnlyQueriesFused(Gpt2Block):
    """The same with one matrix for keys and values."""

    def attend(self, residual):
        q, _, _ = self.c_attn(self.ln_1(residual)).chunk(3, dim=-1)
        _, k, v = self.c_attn(residual).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2)) + residual


def test_it_is_found_where_one_matrix_reads_both():
    (finding,) = found(scan(lambda: Decoder(NormsOnlyQueriesFused)), "PC106")
    assert finding.site.sublayer == "attention"


def test_one_that_reads_all_three_through_the_norm_is_silent():
    run = scan(lambda: Decoder(NormsAll))
    assert not run.findings
    assert not any(one.bare_read for one in sites(run))


# ------------------------------------------------------------------ in block 5 alone


class NoResidualLast(Gpt2Block):
    def attend(self, residual):
        return self.mix(self.ln_1(residual))


class TwiceResidualInPlace(FunctionalBlock):
    def attend(self, x):
        total = super().attend(x)
        total += x
        return total


class TwiceResidualLast(Gpt2Block):
    def attend(self, residual):
        return super().attend(residual) + residual


class AfterLayerNorm(Gpt2Block):
    def attend(self, residual):
        h = self.ln_1(residual)
        return self.mix(h) + h


class ParallelAfterNorm(ParallelBlock):
    def forward(self, x):
        h = self.ln_1(x)
        return h + self.mix(h) + self.feed(h)


class ParallelWithoutResidual(ParallelBlock):
    def forward(self, x):
        h = self.ln_1(x)
        return self.mix(h) + self.feed(h)


class FunctionalWithoutResidual(FunctionalBlock):
    def attend(self, x):
        return self.attention(x)


class UntrackedFeed(Gpt2Block):
    @torch.no_grad()
    def feed(self, h):
        return super().feed(h)


class DetachedFeed(ParallelBlock):
    def feed(self, h):
        return super().feed(h).detach()


def size(others):
    """The toy as it is in every other test, whose values are known; the others half as deep."""
    return {"blocks": BLOCKS, "batch": BATCH} if others is Block else {"blocks": 8}


def scan_with(block, others, blocks=BLOCKS, **options):
    """Scan a decoder in which block 5 is another one."""
    return scan(lambda: Decoder(only(5, block, others), blocks), **options)


def after_attention(run, block):
    """Give the RMS of the stream behind the attention of a block: what the MLP there finds."""
    return next(one for one in sites(run, block) if one.sublayer == "mlp").stream_rms


def before(run, block):
    return sites(run, block - 1)[-1].sum_rms


def assert_nowhere_else(run, *rules):
    assert {one.site.block for one in run.findings if one.severity != "note"} == {5}
    assert {one.rule for one in run.findings if one.severity != "note"} <= set(rules)


@pytest.mark.parametrize(
    ("block", "others"),
    [(NoResidual, Block), (NoResidualLast, Gpt2Block), (FunctionalWithoutResidual, FunctionalBlock)],
)
def test_a_residual_that_is_missing_in_one_block_is_found_there(block, others):
    run = scan_with(block, others, **size(others))
    (broken,) = found(run, "PC206")
    assert (broken.severity, broken.site.block) == ("error", 5)
    assert_nowhere_else(run, "PC206", "PC205")
    assert run.model.sites == 2 * run.model.blocks - 1
    if others is Block:
        assert before(run, 5) == before(healthy(**size(others)), 5) == pytest.approx(0.03, rel=0.05)
        assert after_attention(run, 5) == pytest.approx(0.011, rel=0.05)


def test_a_parallel_block_without_its_residual_is_found_there():
    run = scan_with(ParallelWithoutResidual, ParallelBlock, 8)
    (broken,) = found(run, "PC206")
    assert (broken.severity, broken.site.block) == ("error", 5)


@pytest.mark.parametrize(
    ("block", "others"),
    [(TwiceResidual, Block), (TwiceResidualLast, Gpt2Block), (TwiceResidualInPlace, FunctionalBlock)],
)
def test_a_residual_that_is_doubled_in_one_block_is_found_there(block, others):
    run = scan_with(block, others, **size(others))
    (broken,) = found(run, "PC206")
    assert (broken.severity, broken.site.block, broken.site.sublayer) == ("error", 5, "attention")
    assert_nowhere_else(run, "PC206", "PC205", "PC306")
    if others is Block:
        assert after_attention(healthy(**size(others)), 5) == pytest.approx(0.032, rel=0.05)
        assert after_attention(run, 5) == pytest.approx(0.062, rel=0.05)


@pytest.mark.parametrize(
    ("block", "others"),
    [(ResidualAfterNorm, Block), (AfterLayerNorm, Gpt2Block), (ParallelAfterNorm, ParallelBlock)],
)
def test_a_residual_that_is_taken_after_the_norm_in_one_block_is_found_there(block, others):
    run = scan_with(block, others, **size(others))
    (jump,) = found(run, "PC205")
    assert jump.site.block == 5
    assert_nowhere_else(run, "PC205")
    if others is Block:
        assert before(run, 5) == pytest.approx(0.03, rel=0.05)
        assert after_attention(run, 5) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("index", [1, 7])
@pytest.mark.parametrize(("block", "others"), [(ResidualAfterNorm, Block), (ParallelAfterNorm, ParallelBlock)])
def test_so_it_is_in_the_second_block_and_in_the_last(block, others, index):
    (finding,) = scan(lambda: Decoder(only(index, block, others), 8)).findings
    assert (finding.rule, finding.site.block, finding.site.sublayer) == ("PC205", index, "attention")


def test_in_the_first_block_it_is_a_norm_of_the_embedding():
    assert not scan(lambda: Decoder(only(0, ResidualAfterNorm), 8)).findings


class DetachedLast(Gpt2Block):
    def attend(self, residual):
        return self.mix(self.ln_1(residual)) + residual.data


class DetachedParallel(ParallelBlock):
    def forward(self, x):
        h = self.ln_1(x)
        return x.detach() + self.mix(h) + self.feed(h)


DETACHED = [
    *((block, others, index) for block, others in [(Detached, Block), (DetachedLast, Gpt2Block)] for index in (1, 5, 7)),
    *((DetachedParallel, ParallelBlock, index) for index in (1, 7)),
    *((HalfDetached, Block, index) for index in (5, 7)),  # before block 1 nothing tells what size is usual
]


@pytest.mark.parametrize(("block", "others", "index"), DETACHED)
def test_a_stream_that_is_detached_in_one_block_is_found_there(block, others, index):
    run, twin = scan(lambda: Decoder(only(index, block, others), 8)), healthy(others, 8)
    (finding,) = run.findings
    assert (finding.rule, finding.severity, finding.site.block) == ("PC306", "warning", index)
    assert finding.site.sublayer == "attention"
    assert [one.sum_rms for one in sites(run)] == pytest.approx([one.sum_rms for one in sites(twin)])  # nothing shows it


def test_so_is_one_that_is_detached_in_every_block():
    (finding,) = found(scan(lambda: Decoder(Detached, 8)), "PC306")
    assert "The same holds at 6 more sites." in finding.message  # all but the first, where an embedding may be frozen


@pytest.mark.parametrize(
    ("block", "others", "parameters"),
    [(UntrackedMlp, Block, 4), (UntrackedFeed, Gpt2Block, 6), (DetachedFeed, ParallelBlock, 4)],
)
def test_an_mlp_that_gets_no_gradient_in_one_block_is_found_there(block, others, parameters):
    run, twin = scan_with(block, others, **size(others)), healthy(others, **size(others))
    dead = [one for one in run.record.parameters if one.grad_state in ("none", "zero") and one.kind == "parameter"]
    assert len(dead) == parameters
    assert {one.block for one in dead} == {5}
    assert [one.sum_rms for one in sites(run)] == [one.sum_rms for one in sites(twin)]  # the forward pass shows nothing
    (finding,) = found(run, "PC303")
    assert (finding.severity, finding.site.block, finding.site.sublayer) == ("error", 5, "mlp")
    assert_nowhere_else(run, "PC303")


@pytest.mark.parametrize("index", [0, 5])
@pytest.mark.parametrize(("block", "rule"), [(NoResidual, "PC206"), (TwiceResidual, "PC206"), (UntrackedMlp, "PC303")])
def test_they_are_found_in_the_first_and_in_the_last_block_too(block, rule, index):
    run = scan(lambda: Decoder(only(index, block), 6))
    (finding,) = found(run, rule)
    assert (finding.severity, finding.site.block) == ("error", index)
