"""Parameters that training would not change, and gradients that grow on their way back."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from faulty_gradients import (
    Adapted,
    Checkpointed,
    CheckpointedWithoutReentry,
    ForgetsScales,
    NormedScores,
    RightBackward,
    WrongBackward,
    adapted,
    of_unit_stream,
)
from scanned import TOKENS, errors, found, parameter, scan, sites
from torch import nn
from toy import VOCABULARY, WIDTH, Block, Decoder, Gpt2Block, gpt2, linear

import propcheck

# ------------------------------------------------------------------ created, and never used


def test_scales_that_are_created_and_never_used_are_named():
    """lucidrains/x-transformers issue 352."""
    run = scan(lambda: Decoder(lambda _: Block(attention=ForgetsScales), 8))
    findings = found(run, "PC304", "PC501")
    named = " ".join(f"{one.site.parameter} {one.message}" for one in findings)
    assert "q_scale" in named
    assert "k_scale" in named
    assert not errors(run)  # it trains without them


def test_scales_that_are_used_are_silent():
    run = scan(lambda: Decoder(lambda _: Block(attention=NormedScores), 8))
    assert not found(run, "PC303", "PC304", "PC501")
    assert not errors(run)


# ------------------------------------------------------------------ no path to the loss


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_reentrant_checkpointing_over_a_frozen_embedding_is_said_of_the_whole_model():
    """huggingface/transformers issue 21381: no input of the first block needs a gradient, so nothing has a path."""
    run = scan(Checkpointed)
    (finding,) = found(run, "PC304")
    assert finding.severity == "error"
    assert (finding.site.block, finding.site.module, finding.site.parameter) == (None, None, None)
    assert {one.grad_state for one in run.record.parameters if one.requires_grad} == {"none"}
    assert [one.rule for one in run.findings] == ["PC304"]


def test_the_other_checkpointing_is_silent():
    run = scan(CheckpointedWithoutReentry)
    assert not errors(run)
    assert {one.grad_state for one in run.record.parameters if one.requires_grad} == {"norm"}


# ------------------------------------------------------------------ adapters


class RawAdapted(nn.Module):
    """The same with matrices that have no module, by other names."""

    def __init__(self, rank=8):
        super().__init__()
        self.base = linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Parameter(torch.zeros(rank, WIDTH)), nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x):
        return self.base(x) + F.linear(x @ self.inner.T, self.outer)


@pytest.mark.parametrize("adapter", [Adapted, RawAdapted])
def test_adapters_whose_factors_are_both_zero_are_found(adapter):
    """nvidia-cosmos/cosmos-predict2.5 issue 15: neither ever gets a gradient."""
    run = scan(lambda: adapted(("lora_A", "lora_B"), adapter))
    assert {one.grad_state for one in run.record.parameters if one.requires_grad} == {"zero"}
    dead = found(run, "PC303")
    assert {one.severity for one in dead} == {"error"}
    assert all(one.site.sublayer == "attention" for one in dead)


def test_adapters_of_which_one_factor_is_zero_are_silent():
    run = scan(lambda: adapted(("lora_B",)))
    states = {name: parameter(run, f"layers.3.attn.wv.{name}.weight").grad_state for name in ("lora_A", "lora_B")}
    assert states == {"lora_A": "zero", "lora_B": "norm"}
    assert not found(run, "PC203", "PC303", "PC304")
    assert not errors(run)


# ------------------------------------------------------------------ gradients that every block multiplies


def test_gradients_that_grow_a_hundredfold_a_block_are_found_with_what_it_compounds_to():
    """google/maxtext issue 614: the backward of masked attention; 12 layers trained, from 17 on the loss was NaN."""
    run = scan(lambda: of_unit_stream(WrongBackward, 12))
    (finding,) = found(run, "PC301")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(100, rel=0.15)
    assert "over 12 blocks" in finding.message
    assert all(math.isfinite(one.grad_stream_norm) for one in sites(run))
    assert not found(run, "PC305")
    healthy = scan(lambda: of_unit_stream(RightBackward, 12))
    assert [one.sum_rms for one in sites(run)] == [one.sum_rms for one in sites(healthy)]  # nothing in the forward pass


def test_deeper_they_overflow():
    run = scan(lambda: of_unit_stream(WrongBackward, 20))
    assert found(run, "PC305")
    assert math.isfinite(run.loss.value)


def test_the_same_attention_with_its_own_gradient_is_silent():
    run = scan(lambda: of_unit_stream(RightBackward, 12))
    assert not found(run, "PC301", "PC305", "PC306")
    assert not errors(run)


class WithoutNorm(Block):
    """Gradients and stream alike: no norm reads the stream, and the MLP is as large as it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


def test_a_block_that_multiplies_both_is_one_headline():
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name.endswith((".up", ".down")):
            nn.init.normal_(module.weight, std=2 / math.sqrt(WIDTH))

    (finding,) = found(scan(lambda: Decoder(WithoutNorm, init=init)), "PC201", "PC301")
    assert (finding.rule, finding.severity) == ("PC201", "error")
    assert any(one.startswith("PC301 at ") for one in finding.also)


# ------------------------------------------------------------------ one step in several micro-batches


def accumulated(parts, *, averaged):
    def loss(logits, ids):
        of_parts = [
            F.cross_entropy(given[:, :-1].flatten(0, 1), asked[:, 1:].flatten())
            for given, asked in zip(logits.chunk(parts), ids.chunk(parts), strict=True)
        ]
        return sum(of_parts) / (parts if averaged else 1)

    def build():
        ids = torch.arange(6 * TOKENS).view(6, TOKENS) * 7 % VOCABULARY
        return propcheck.Target(Decoder(blocks=4), batch=ids, loss=loss)

    return scan(build)


def test_a_loss_that_accumulation_doubles_doubles_every_gradient():
    """huggingface/transformers issue 35438: 1 x 6 and 2 x 3 sequences, the losses summed where their mean was meant."""
    whole, doubled, repaired = accumulated(1, averaged=True), accumulated(2, averaged=False), accumulated(2, averaged=True)
    assert doubled.loss.value == pytest.approx(2 * whole.loss.value, rel=1e-5)
    assert repaired.loss.value == pytest.approx(whole.loss.value, rel=1e-5)
    for one, two, three in zip(sites(whole), sites(doubled), sites(repaired), strict=True):
        assert two.grad_sum_norm == pytest.approx(2 * one.grad_sum_norm, rel=1e-4)
        assert three.grad_sum_norm == pytest.approx(one.grad_sum_norm, rel=1e-4)
        assert two.sum_rms == one.sum_rms
    assert not errors(whole)
    assert not errors(repaired)


# ------------------------------------------------------------------ zeros that are trained, and hold a gradient back


class SharedGate(Block):
    """One scale for both branches of a layer, as ReZero was published."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        x = x + self.gate * self.attn(self.attn_norm(x))
        return x + self.gate * self.mlp(self.mlp_norm(x))


class Modulated(Block):
    """adaLN-zero (DiT, arXiv 2212.09748): one zero matrix gives the gates of both branches, from the mean over the tokens."""

    def __init__(self):
        super().__init__()
        self.modulate = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):
        first, second = self.modulate(F.silu(x.mean(1, keepdim=True))).chunk(2, dim=-1)
        x = x + first * self.attn(self.attn_norm(x))
        return x + second * self.mlp(self.mlp_norm(x))


class OneGate(Decoder):
    """One scale for all branches, handed to the blocks."""

    def __init__(self, trained=True):
        super().__init__(lambda _: GateOfAll(), 4)
        self.gate = nn.Parameter(torch.zeros(WIDTH), requires_grad=trained)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.gate)
        return self.head(self.norm(x))


class GateOfAll(Block):
    def forward(self, x, gate):
        x = x + gate * self.attn(self.attn_norm(x))
        return x + gate * self.mlp(self.mlp_norm(x))


def gated(block):
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name.endswith("modulate"):
            nn.init.zeros_(module.weight)

    return Decoder(block, 4, init=init)


@pytest.mark.parametrize("build", [lambda: gated(SharedGate), lambda: gated(Modulated), OneGate])
def test_zero_gates_that_branches_share_and_training_moves_are_silent(build):
    run = scan(build)
    assert {one.update_rms for one in sites(run)} == {0.0}
    assert parameter(run, "layers.3.mlp.down.weight").grad_state == "zero"
    assert not found(run, "PC203", "PC303")
    assert not errors(run)


def test_a_zero_gate_that_training_does_not_move_is_found():
    run = scan(lambda: OneGate(trained=False))
    (finding,) = found(run, "PC203", "PC303")
    assert (finding.rule, finding.severity) == ("PC203", "error")


class Seeing(Block):
    """Cross-attention to a second stream, behind a gate that starts at zero (Flamingo, arXiv 2204.14198)."""

    def __init__(self):
        super().__init__()
        self.cross_norm, self.keys, self.gate = nn.LayerNorm(WIDTH), linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, x, seen):
        k, v = self.keys(seen).chunk(2, dim=-1)
        x = x + torch.tanh(self.gate) * F.scaled_dot_product_attention(self.cross_norm(x), k, v)
        return super().forward(x)


class TwoStreams(Decoder):
    def __init__(self, trained=True):
        super().__init__(lambda _: Seeing(), 4)
        self.look, self.eyes = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(3))
        for layer in self.layers:
            layer.gate.requires_grad_(trained)

    def forward(self, ids):
        x, seen = self.embed(ids), self.look(ids)
        for eye in self.eyes:
            seen = eye(seen)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.norm(x))


def test_a_side_stream_behind_zero_gates_that_training_moves_is_a_note():
    run = scan(TwoStreams)
    (finding,) = found(run, "PC302")
    assert finding.severity == "note"
    assert "The 4 parameters layers.*.gate" in finding.message
    assert not errors(run)


def test_a_side_stream_behind_zero_gates_that_nothing_moves_is_an_error():
    (finding,) = found(scan(lambda: TwoStreams(trained=False)), "PC302")
    assert finding.severity == "error"


class ZeroAdapter(Gpt2Block):
    """W x + up(relu(down(x))) with zero weights and biases; the bias of ``up`` alone is trained by it."""

    nonlinearity = staticmethod(F.relu)

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def feed(self, h):
        return super().feed(h) + self.up(self.nonlinearity(self.down(h)))


class SigmoidAdapter(ZeroAdapter):
    nonlinearity = staticmethod(torch.sigmoid)  # one half at zero, so that ``up`` is trained


def zero_adapted(block):
    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name.endswith((".down", ".up")):
            nn.init.zeros_(module.weight)

    return Decoder(lambda _: block(), 4, init=init)


def test_adapters_whose_zeros_keep_each_other_zero_are_found_beside_a_bias_that_is_trained():
    run = scan(lambda: zero_adapted(ZeroAdapter))
    assert parameter(run, "layers.2.up.bias").grad_state == "norm"
    (finding,) = found(run, "PC303")
    assert "The 8 parameters layers.*.down.weight, layers.*.up.weight (blocks 0 to 3)" in finding.message


def test_adapters_whose_zeros_do_not_are_silent():
    assert not found(scan(lambda: zero_adapted(SigmoidAdapter)), "PC203", "PC303")
