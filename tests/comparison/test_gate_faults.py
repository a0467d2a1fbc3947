"""Faults that people really had, each gated with its repaired twin as the baseline: the gate fails, and at the right place."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from faulty_draws import DrawnInHalf, DrawnInSingle, in_bf16, many_heads, truncated_in_place, truncated_in_single
from faulty_dtypes import HALF, HalfNorm, Rotary, ScaledBlock, ScaledInHalf, SingleRotary, large, rotating
from faulty_dtypes import in_bf16 as built_in_bf16
from faulty_gains import centred, doubled
from faulty_gradients import (
    Checkpointed,
    CheckpointedWithoutReentry,
    ForgetsScales,
    NormedScores,
    RightBackward,
    WrongBackward,
    adapted,
    of_unit_stream,
)
from faulty_lost_values import WithBuffer, WithScalars, allocated_later
from faulty_nan import Factored, FiniteSoftmax, Softmax, left_padded, with_decay_of_two
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
from faulty_scales import StepsOfOne, compares_whole_names, decaying, divides_inputs_too, head_of
from gated import blocks, failed, failures, gate, scan, start, toy, won
from toy import VOCABULARY, WIDTH, Attention, Block, Decaying, Decoder, only

import propcheck
from propcheck.errors import PropcheckError

EIGHT = range(8)


def eight(block=Block):
    return lambda: Decoder(block, 8)


# ------------------------------------------------------------------ scales


def test_a_depth_factor_that_was_never_applied_fails_from_the_first_update_on():
    """huggingface/transformers issue 47458; sqrt(2 x 8) = 4 too large, and the first update has nothing else in it."""
    found = gate(lambda: Decoder(blocks=8, init=compares_whole_names), toy())
    assert start(found) == (0, "attention")
    assert failures(found) == {"gate-init", "gate-stream", "gate-gradient"}
    assert found.start.parameter == "layers.0.attn.wo.weight"
    first = failed(found, "gate-stream", "update_rms")
    assert first.value / first.expected == pytest.approx(4.0, rel=0.01)
    assert blocks(found, "update_rms") == set(EIGHT)
    before = {one.place.site for one in found.differences if one.quantity == "stream_rms"}
    assert before == set(range(1, 16))  # the embedding that the first branch reads is as it was


def test_a_depth_factor_on_queries_keys_and_values_fails_at_the_attention_alone_until_the_stream_differs():
    """facebookresearch/lingua issue 39; v is sqrt(2 x 8) = 4 smaller, and queries and keys hardly tell tokens apart."""
    found = gate(lambda: Decoder(blocks=8, init=divides_inputs_too), toy())
    assert start(found) == (0, "attention")
    first = failed(found, "gate-stream", "update_rms")
    assert (first.site.site, first.value / first.expected) == (0, pytest.approx(0.25, rel=0.02))
    of_attention = {one.place.sublayer for one in found.differences if one.quantity == "update_rms"}
    assert "attention" in of_attention
    assert not any(one.place.site == 1 for one in found.differences if one.quantity == "update_rms")  # the first MLP's


def test_a_gain_of_two_fails_at_the_first_attention():
    """huggingface/transformers issue 40224; attention is linear in what it reads, a gated MLP nearly quadratic."""
    found = gate(doubled, centred)
    assert start(found) == (0, "attention")
    first = failed(found, "gate-stream", "update_rms")
    assert first.value / first.expected == pytest.approx(2.1, rel=0.05)
    assert won(found) == {"PC106"}


def test_a_step_bias_left_at_one_fails_at_the_mixers():
    """fla-org/flash-linear-attention issue 739."""
    found = gate(lambda: decaying(StepsOfOne), decaying)
    assert start(found) == (0, "linear_attention")
    updates = {one.place.sublayer for one in found.differences if one.quantity == "update_rms"}
    assert updates == {"linear_attention"}  # a norm stands before each MLP


def test_a_head_of_std_one_fails_behind_the_last_block():
    """huggingface/transformers issue 26441: the loss and every gradient, and no number of the forward pass."""
    found = gate(lambda: head_of(1.0), lambda: head_of(WIDTH**-0.5))
    assert failures(found) == {"gate-init", "gate-loss", "gate-gradient", "gate-findings"}
    assert found.start.parameter == "head.weight"
    assert (failed(found, "gate-loss").site, failed(found, "gate-loss").value > 40) == (None, True)
    assert won(found) == {"PC401", "PC402"}


def test_a_truncated_normal_that_half_precision_clamps_fails():
    """pytorch/torchtitan issue 2269; draws of another dtype, so that a wider tolerance holds, and fails."""
    found = gate(lambda: in_bf16(truncated_in_place), lambda: in_bf16(truncated_in_single))
    assert found.start.parameter.startswith("embed.weight")
    assert {"gate-init", "gate-stream", "gate-gradient", "gate-findings"} <= failures(found)
    assert "PC105" in won(found)


# ------------------------------------------------------------------ values that are lost or not finite


@pytest.mark.parametrize(("model", "name", "block"), [(WithScalars, "resid_lambdas", None), (WithBuffer, "scales", 1)])
def test_what_is_never_written_fails_by_its_name(model, name, block):
    """karpathy/nanochat issue 686, allenai/OLMo-core issue 698; the buffer scales updates, so that block 0 reads no NaN."""
    found = gate(lambda: allocated_later(model, init_sets_it=False), lambda: allocated_later(model, init_sets_it=True))
    assert failures(found) == {"gate-nonfinite", "gate-findings"}
    # The scalars themselves, which stand before the blocks; a buffer is no parameter, and the NaN shows where it is used.
    assert (found.start.block, found.start.parameter) == (block, name if block is None else None)
    (lost,) = (one for one in found.findings if one.rule == "gate-findings")
    assert (won(found), lost.site.parameter) == ({"PC102"}, name)


def test_decays_of_minus_infinity_fail_by_their_name_though_every_number_is_finite():
    """huggingface/transformers issue 47831. In another dtype than the baseline's, so that the two are no like runs."""
    run, baseline = scan(lambda: many_heads(DrawnInHalf)), scan(lambda: many_heads(DrawnInSingle))
    with pytest.raises(PropcheckError, match="precision fp32"):
        propcheck.gate(run, baseline)
    found = propcheck.gate(run, baseline, force=True)
    (infinite,) = (one for one in found.findings if one.severity == "error" and one.rule == "gate-findings")
    assert (won(found), infinite.site.parameter.endswith("attn.A_log")) == ({"PC101"}, True)
    assert failures(found) == {"gate-findings", "gate-nonfinite"}
    assert {one.quantity for one in found.differences if one.kind == "nonfinite"} == {"parameter_rms"}
    assert found.start.parameter.endswith("attn.A_log")


def test_a_row_of_attention_that_sees_nothing_fails_where_a_token_that_counts_is_first_spoilt():
    """pytorch/pytorch issue 103749: padding alone in block 0, and everything that reads it from block 1 on."""
    found = gate(lambda: left_padded(Softmax), lambda: left_padded(FiniteSoftmax))
    assert failures(found) == {"gate-nonfinite", "gate-findings"}
    assert start(found) == (1, "attention")
    (origin,) = (one for one in found.findings if one.rule == "gate-findings")
    assert (won(found), origin.site.block) == ({"PC209"}, 0)


def test_factors_of_a_decay_that_overflow_fail_at_the_first_mixer():
    """pytorch/executorch issue 21417."""
    found = gate(lambda: with_decay_of_two(Factored), lambda: with_decay_of_two(Decaying))
    assert failures(found) == {"gate-nonfinite", "gate-findings"}
    assert start(found) == (0, "linear_attention")


def test_squares_that_fp16_has_no_room_for_fail_in_their_block_alone():
    """pytorch/pytorch issue 133085: everything stays finite, the branch adds zero."""
    found = gate(lambda: large(only(5, lambda: Block(norm=HalfNorm))), lambda: large(Block), **HALF)
    assert start(found) == (5, "attention")
    assert {one.place.block for one in found.differences} == {5}
    assert failed(found, "gate-stream").value == 0.0
    assert won(found) == {"PC203", "PC212"}


# ------------------------------------------------------------------ dtypes


def test_rotary_tables_made_in_half_precision_fail_by_their_names():
    """EleutherAI/gpt-neox issue 1003: positions above 256 are not all numbers of bf16, and 64 tokens show none of it."""
    found = gate(lambda: rotating(Rotary), lambda: rotating(SingleRotary), precision="bf16")
    tables = [one.site.parameter for one in found.findings if one.severity == "error"]
    assert failures(found) == {"gate-findings"}
    assert won(found) == {"PC211"}
    assert tables
    assert all(one.endswith(("cos", "sin")) for one in tables)


def test_an_fp32_scale_that_promotes_the_stream_fails_at_the_first_site():
    """trevin-creator/autoresearch-mlx issue 3. In another dtype than the baseline's, so that the two are no like runs."""
    run, baseline = (scan(lambda block=block: built_in_bf16(block)) for block in (ScaledBlock, ScaledInHalf))
    with pytest.raises(PropcheckError, match="precision bf16"):
        propcheck.gate(run, baseline)
    found = propcheck.gate(run, baseline, force=True)
    (promoted,) = (one for one in found.findings if one.rule == "gate-findings")
    assert (won(found), promoted.site.site) == ({"PC211"}, 0)


# ------------------------------------------------------------------ residuals


@pytest.mark.parametrize("block", [AddsItself, BitNetBlock])
def test_a_stream_that_is_added_to_itself_fails_at_each_attention_addition(block):
    """kyegomez/BitNet issue 32."""
    found = gate(eight(block), toy())
    assert start(found) == (0, "attention")
    missing = failed(found, "gate-sites")
    assert (missing.site.block, missing.site.sublayer) == (0, "attention")
    assert "7 more are missing: sites 2, 4, 6, 8, 10, 12, 14." in missing.message
    assert "PC206" in won(found)


def test_keys_and_values_that_pass_the_norm_by_fail_at_the_attention():
    """facebookresearch/xformers issue 233: v is 1/50 of what it was, and the attention with it."""
    found = gate(eight(NormsOnlyQueries), eight(NormsAll))
    first = failed(found, "gate-stream", "update_rms")
    assert start(found) == (0, "attention")
    assert first.expected / first.value == pytest.approx(50, rel=0.05)
    assert {one.place.sublayer for one in found.differences if one.quantity == "update_rms"} == {"attention"}


@pytest.mark.parametrize(
    ("block", "where", "rule"),
    [
        (NoResidual, (5, "attention"), "PC206"),
        (TwiceResidual, (5, "mlp"), "PC206"),  # whose stream is the first that is doubled
        (ResidualAfterNorm, (5, "attention"), "PC205"),
    ],
)
def test_a_residual_that_is_wrong_in_one_block_fails_from_that_block_on(block, where, rule):
    found = gate(lambda: Decoder(only(5, block), 8), toy())
    assert start(found) == where
    assert "gate-stream" in failures(found)
    assert blocks(found, "stream_rms") == {5, 6, 7}
    assert min(blocks(found, "update_rms"), default=5) >= 5
    assert won(found) == {rule}


@pytest.mark.parametrize(
    ("block", "last", "rule"),
    [(UntrackedMlp, (5, "mlp"), "PC303"), (Detached, (5, "attention"), "PC306"), (HalfDetached, (4, "mlp"), "PC306")],
)
def test_a_gradient_that_is_lost_in_one_block_fails_from_there_back(block, last, rule):
    """The half of the stream that block 5 detaches is missing in the gradient of the sum before it, that of block 4's MLP."""
    found = gate(lambda: Decoder(only(5, block), 8), toy())
    assert failures(found) == {"gate-gradient", "gate-findings"}  # nothing of the forward pass
    assert start(found) == last
    assert not any(one.place.block in (6, 7) for one in found.differences)
    assert won(found) == {rule}


# ------------------------------------------------------------------ gradients


def test_scales_that_are_no_longer_used_fail_by_their_names():
    """lucidrains/x-transformers issue 352."""
    of = {attention: lambda attention=attention: Decoder(lambda _: Block(attention=attention), 8) for attention in CASES}
    found = gate(of[ForgetsScales], of[NormedScores])
    changed = {one.place.parameter for one in found.differences}
    assert changed == {f"layers.{block}.attn.{name}" for block in EIGHT for name in ("q_scale", "k_scale")}
    assert all((one.kind, one.value) == ("unobserved", None) for one in found.differences)
    assert failed(found, "gate-gradient").site.block == 7  # gradients come from the end
    assert won(found) == {"PC501"}


CASES = (ForgetsScales, NormedScores, Attention)


def test_scales_that_are_new_fail_by_their_names():
    found = gate(lambda: Decoder(lambda _: Block(attention=ForgetsScales), 4), toy(4))
    new = failed(found, "gate-parameters")
    assert (new.value, new.site.parameter) == ("new", "layers.0.attn.q_scale")
    assert new.message.startswith("8 parameters of this run are new")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_model_without_a_path_fails_in_every_gradient_and_in_nothing_else():
    """huggingface/transformers issue 21381."""
    found = gate(Checkpointed, CheckpointedWithoutReentry)
    assert failures(found) == {"gate-gradient", "gate-findings"}
    assert {one.kind for one in found.differences} == {"unobserved"}
    assert found.start.block == 7
    assert won(found) == {"PC304"}


def test_adapters_that_are_zero_on_both_sides_fail_at_the_adapters():
    """nvidia-cosmos/cosmos-predict2.5 issue 15: the gradient of B is gone; that of A is zero in the healthy one too."""
    found = gate(lambda: adapted(("lora_A", "lora_B")), lambda: adapted(("lora_B",)))
    assert failures(found) == {"gate-init", "gate-gradient", "gate-findings"}
    assert {one.quantity for one in found.differences} == {"parameter_rms", "param_grad_norm", "grad_norm"}
    assert found.start.parameter.endswith("lora_A.weight")
    single = [one for one in found.differences if one.quantity == "grad_norm"]
    assert all(one.place.parameter.endswith("lora_B.weight") and one.value == 0.0 for one in single)
    assert len(single) == 16
    assert won(found) == {"PC303"}


def test_a_backward_pass_that_is_a_factor_off_fails_at_the_last_attention():
    """google/maxtext issue 614: the forward pass is equal to the bit, so nothing of it differs."""
    found = gate(lambda: of_unit_stream(WrongBackward, 6), lambda: of_unit_stream(RightBackward, 6))
    assert failures(found) == {"gate-gradient", "gate-findings"}
    assert start(found)[0] == 5
    assert found.start.parameter == "layers.5.attn_norm.weight"  # before its kernel; wo lies behind it
    assert not any(one.place.parameter == "layers.5.attn.wo.weight" for one in found.differences)
    assert "PC301" in won(found)


def accumulated(parts, *, averaged):
    """Six sequences in micro-batches, whose losses are summed, or averaged as they should be."""

    def loss(logits, ids):
        of_parts = [
            F.cross_entropy(given[:, :-1].flatten(0, 1), asked[:, 1:].flatten())
            for given, asked in zip(logits.chunk(parts), ids.chunk(parts), strict=True)
        ]
        return sum(of_parts) / (parts if averaged else 1)

    ids = torch.arange(6 * 64).view(6, 64) * 7 % VOCABULARY
    return lambda: propcheck.Target(Decoder(blocks=4), batch=ids, loss=loss)


def test_a_loss_that_accumulation_doubles_fails_behind_the_last_block():
    """huggingface/transformers issue 35438: 2 x 3 sequences against 1 x 6, the losses summed where their mean was meant."""
    found = gate(accumulated(2, averaged=False), accumulated(1, averaged=True))
    assert failures(found) == {"gate-loss", "gate-gradient"}
    assert all(one.ratio == pytest.approx(2.0, rel=1e-3) for one in found.differences)
    assert found.start.site is None  # no addition: what follows the last
    assert gate(accumulated(2, averaged=True), accumulated(1, averaged=True)).passed


class ScaledByWidth(Attention):
    """Logits over the root of the model's width, where that of a head is meant: a half of what they were, with four heads."""

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=WIDTH**-0.5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_attention_scaled_by_the_width_of_the_model_fails_in_queries_and_keys_alone(precision):
    """omihub777/ViT-CIFAR issue 12: no rule can say that it is wrong, and it is not what it was."""
    found = gate(lambda: Decoder(lambda _: Block(attention=ScaledByWidth), 8), eight(), precision=precision)
    assert failures(found) == {"gate-gradient"}
    assert {one.place.parameter.split(".")[-2] for one in found.differences} == {"wq", "wk"}
    assert len(found.differences) == 16
    assert all(one.ratio == pytest.approx(0.5, rel=0.03) for one in found.differences)


# ------------------------------------------------------------------ the other way round


@pytest.mark.parametrize(
    ("faulty", "healthy"),
    [(doubled, centred), (lambda: Decoder(only(5, TwiceResidual), 8), toy()), (eight(AddsItself), toy())],
)
def test_the_gate_is_two_sided(faulty, healthy):
    """A change that is for the better is one too, and the findings that are gone are no failure of their own."""
    found = gate(healthy, faulty)
    assert not found.passed
    assert {one.severity for one in found.findings if one.rule == "gate-findings"} == {"note"}
    assert not won(found)
    there, back = gate(faulty, healthy).differences, found.differences
    assert sum(math.log(one.ratio) for one in there if one.ratio) == pytest.approx(
        -sum(math.log(one.ratio) for one in back if one.ratio)
    )
