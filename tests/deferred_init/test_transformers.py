"""Models of transformers replay to what their constructors make, and are drawn with their configs' standard deviation."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from patterned import assert_replays
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record

STD = 0.05  # initializer_range of all of them

SMALL = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "initializer_range": STD}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=STD
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL, **ATTENTION),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **SMALL, **ATTENTION, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    "mamba": lambda: transformers.MambaConfig(**SMALL, state_size=4),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, **ATTENTION, num_local_experts=3),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, **ATTENTION, head_dim=16),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, ffn_dim=96, num_attention_heads=4, word_embed_proj_dim=64,
        init_std=STD,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SMALL, num_attention_heads=4, intermediate_size=96),
}  # fmt: skip


def factory_of(name, dtype):
    config = CONFIGS[name]()
    return lambda: AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("name", CONFIGS)
def test_replays_what_the_constructor_makes(name):
    assert_replays(factory_of(name, torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_have_the_standard_deviation_of_the_config(name):
    recording = record(factory_of(name, torch.float32))
    modules = dict(recording.model.named_modules())
    checked = 0
    with Workers(1) as workers:
        replayed = Materializer(recording, workers)
        for entry in recording.entries:
            module = modules[entry.name.rpartition(".")[0]]
            if (
                len(entry.shape) != 2
                or not entry.name.endswith("weight")
                or not isinstance(module, (nn.Linear, nn.Embedding, Conv1D))
            ):
                continue
            std = STD
            if name == "gpt2" and entry.name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * 2)  # GPT-2's 1 / sqrt(2 layers)
            if name == "mamba" and entry.name.endswith(("dt_proj.weight", "out_proj.weight")):
                continue  # uniform whatever initializer_range is
            value = replayed.materialize(entry, 0)
            count = value.count_nonzero()  # a padding row is zero
            # The relative standard error of a standard deviation is 1 / sqrt(2 n); five of them.
            assert value.square().sum().div(count).sqrt() == pytest.approx(std, rel=5 / math.sqrt(2 * count)), entry.name
            assert replayed.init_calls(entry).startswith(f"normal_(0, {std:.6g})"), entry.name
            checked += 1
    assert checked >= 2
