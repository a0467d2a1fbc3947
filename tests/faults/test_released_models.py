"""The same faults in the classes of transformers that had them, where this release has them or one method brings them back."""

from __future__ import annotations

import math

import pytest
import torch
from scanned import errors, found, norm, parameter, scan, sites
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5PreTrainedModel
from transformers.pytorch_utils import Conv1D

import propcheck

# ------------------------------------------------------------------ GPT-2


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=192, n_head=4, vocab_size=1000, n_positions=64))


def of_release_5_14(self, module):
    """As it was until 5.14.1: the names are ``h.0.attn.c_proj.weight``."""
    PreTrainedModel._init_weights(self, module)
    if isinstance(module, Conv1D):
        nn.init.normal_(module.weight, std=self.config.initializer_range)
        nn.init.zeros_(module.bias)
    if isinstance(module, PreTrainedModel):
        for name, weight in module.named_parameters():
            if name == "c_proj.weight":
                nn.init.normal_(weight, std=self.config.initializer_range / math.sqrt(2 * self.config.n_layer))


def scan_gpt2():
    return scan(gpt2, set={"expect.init": "gpt2"})


def test_the_depth_factor_that_gpt2_never_applied_is_named(monkeypatch):
    """huggingface/transformers issue 47458: c_proj has .0202 where .02 / sqrt(24) = .0041 is meant."""
    monkeypatch.setattr(GPT2PreTrainedModel, "_init_weights", of_release_5_14)
    run = scan_gpt2()
    assert parameter(run, "transformer.h.5.attn.c_proj.weight").std == pytest.approx(0.0202, rel=0.02)
    scales = found(run, "PC104")
    assert {".".join(one.site.parameter.split(".")[-3:-1]) for one in scales} == {"attn.c_proj", "mlp.c_proj"}
    for one in scales:
        assert one.value == pytest.approx(0.0202, rel=0.02)
        assert one.expected == pytest.approx(0.0041, rel=0.02)


def test_the_gpt2_of_today_is_silent():
    run = scan_gpt2()
    assert parameter(run, "transformer.h.5.attn.c_proj.weight").std == pytest.approx(0.0041, rel=0.02)
    assert not found(run, "PC104")
    assert not errors(run)


# ------------------------------------------------------------------ Gemma 2


def gemma():
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=8, vocab_size=1000, **sizes))


NORMS = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}


def test_the_gain_of_two_in_the_norms_of_gemma_is_found(monkeypatch):
    """huggingface/transformers issue 40224: the general init fills norms with 1, and these add another 1."""
    monkeypatch.delattr(Gemma2PreTrainedModel, "_init_weights")
    run = scan(gemma)
    assert norm(run, "model.layers.3.input_layernorm").gain == pytest.approx(2.0)
    gains = found(run, "PC106")
    assert all(one.value == pytest.approx(2.0, rel=1e-3) for one in gains)
    assert all(any(f"{name}.weight" in one.message for one in gains) for name in NORMS)


def test_the_gemma_of_today_is_silent():
    run = scan(gemma)
    assert norm(run, "model.layers.3.input_layernorm").gain == pytest.approx(1.0)
    assert not found(run, "PC106")
    assert not errors(run)


# ------------------------------------------------------------------ Qwen3.5


def in_bf16(build):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build()
    finally:
        torch.set_default_dtype(torch.float32)


def qwen():
    """16 layers, 12 of them with 128 heads that decay."""
    linear = {"linear_num_value_heads": 128, "linear_num_key_heads": 64, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    full = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 500, "num_hidden_layers": 16}
    config = Qwen3_5TextConfig(**sizes, **linear, **full)
    return in_bf16(lambda: Qwen3_5ForCausalLM(config))


def of_the_first_release(self, module):
    PreTrainedModel._init_weights(self, module)
    if isinstance(module, Qwen3_5GatedDeltaNet):
        nn.init.ones_(module.dt_bias)
        with torch.no_grad():
            module.A_log.copy_(torch.empty_like(module.A_log).uniform_(0, 16).log_())
    elif type(module).__name__ == "Qwen3_5RMSNorm":
        nn.init.zeros_(module.weight)


def test_the_decays_of_qwen_whose_logarithm_is_minus_infinity_are_named(monkeypatch):
    """huggingface/transformers issue 47831: 6 of 2304 there, 1 in 512 on average; everything else is finite."""
    monkeypatch.setattr(Qwen3_5PreTrainedModel, "_init_weights", of_the_first_release)
    run = scan(qwen, batch=1)
    bad = [one for one in run.record.parameters if one.nonfinite]
    assert bad
    assert all(one.name.endswith("linear_attn.A_log") for one in bad)
    assert not any(one.nonfinite for one in sites(run))
    assert math.isfinite(run.loss.value)
    findings = found(run, "PC101")
    assert {one.severity for one in findings} == {"error"}
    assert all("A_log" in one.site.parameter for one in findings)


def test_the_qwen_of_today_has_none():
    run = scan(qwen, batch=1)
    assert not any(one.nonfinite for one in run.record.parameters)
    assert not errors(run)


# ------------------------------------------------------------------ T5


def t5():
    """Two layers; what the config says of the head, this release takes as leaving out the scale before it, and ties it."""
    sizes = {"d_model": 512, "vocab_size": 500, "num_layers": 2}
    config = T5Config(**sizes, decoder_start_token_id=0, tie_word_embeddings=False)
    ids, labels = (torch.randint(0, 500, (4, 64), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return propcheck.Target(T5ForConditionalGeneration(config), batch={"input_ids": ids, "labels": labels})


def test_the_unscaled_head_of_t5_is_seen_in_loss_and_logits():
    """huggingface/transformers issue 26441, in this release too: d 512, 500 words, and a head of std 1."""
    run = scan(t5)
    assert run.loss.value == pytest.approx(266, rel=0.1)
    assert run.loss.uniform == pytest.approx(math.log(500))
    assert {one.rule for one in run.findings} >= {"PC401", "PC402"}


def test_an_untied_head_of_t5_drawn_by_its_width_is_silent():
    def build():
        target = t5()
        target.model.lm_head = nn.Linear(512, 500, bias=False)
        nn.init.normal_(target.model.lm_head.weight, std=512**-0.5)
        return target

    run = scan(build)
    assert run.loss.value == pytest.approx(math.log(500) + 0.5, abs=0.2)
    assert not found(run, "PC401", "PC402")
    assert not errors(run)
