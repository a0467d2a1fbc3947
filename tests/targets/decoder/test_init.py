"""First values: the standard deviation of every role under every scheme, against its formula written out here."""

import math

import pytest
import torch
from torch import nn

from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder

WIDTH, INNER, VOCABULARY, LAYERS, TAPS = 128, 384, 512, 4, 4


def decoder(placement="pre", tied=False, **init):
    torch.manual_seed(0)
    return Decoder(
        DecoderConfig.model_validate(
            {
                "model": {
                    "layers": LAYERS,
                    "width": WIDTH,
                    "vocabulary": VOCABULARY,
                    "mixers": ["deltanet", "attention"],
                    "attention": {"heads": 4, "kv_heads": 2, "bias": True, "qk_norm": True},
                    "deltanet": {"key_heads": 4, "value_heads": 8, "key_head_width": 32, "value_head_width": 32},
                    "ffn": {"width": INNER, "bias": True},
                    "positions": 256,
                    "tied_head": tied,
                },
                "residual": {"placement": placement},
                "init": init,
            }
        )
    )


# Module name -> (fan_in, fan_out) of the decoder above.
FANS = {
    "embedding": (WIDTH, VOCABULARY),
    "position_embedding": (WIDTH, 256),
    "head": (WIDTH, VOCABULARY),
    "q_proj": (WIDTH, 128),
    "k_proj": (WIDTH, 64),
    "v_proj": (WIDTH, 64),
    "o_proj": (128, WIDTH),
    "in_proj_qkv": (WIDTH, 512),
    "in_proj_z": (WIDTH, 256),
    "in_proj_a": (WIDTH, 8),
    "in_proj_b": (WIDTH, 8),
    "conv1d": (TAPS, TAPS),
    "out_proj": (256, WIDTH),
    "gate_proj": (WIDTH, INNER),
    "up_proj": (WIDTH, INNER),
    "down_proj": (INNER, WIDTH),
}
OUTPUTS = {"o_proj", "out_proj", "down_proj"}
FORMULAS = {
    "normal": lambda name, i, o: 0.03,
    "gpt2": lambda name, i, o: 0.03 / math.sqrt(8) if name in OUTPUTS else 0.03,
    "megatron": lambda name, i, o: 0.03 / math.sqrt(8) if name in OUTPUTS else 0.03,
    "xavier": lambda name, i, o: math.sqrt(2 / (i + o)),
    "he": lambda name, i, o: math.sqrt(2 / i),
    "fan-in": lambda name, i, o: 1 / math.sqrt(i),
    "small": lambda name, i, o: math.sqrt(2 / (5 * 128)) / (math.sqrt(8) if name in OUTPUTS else 1),
    # A normal cut at 3 standard deviations has 0.98658 of its standard deviation: 1 - 6 φ(3) / (2Φ(3) - 1) = 0.97334.
    "olmo-llama": lambda name, i, o: (
        1.0
        if name.endswith("embedding")
        else 0.98658 * (128**-0.5 if name == "head" else 0.03 / math.sqrt(8) if name in OUTPUTS | {"up_proj"} else 0.03)
    ),
}


def check(model, expected):
    """Weights of each role, all layers together: mean and standard deviation within five standard errors."""
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
            weights.setdefault(path.split(".")[-1], []).append(module.weight.detach().double().flatten())
    assert weights.keys() == FANS.keys()
    for name, pieces in weights.items():
        values = torch.cat(pieces)
        std, n = expected(name, *FANS[name]), values.numel()
        assert values.square().mean().sqrt().item() == pytest.approx(std, rel=5 / math.sqrt(2 * n)), name
        assert abs(values.mean().item()) < 5 * std / math.sqrt(n), name


@pytest.mark.parametrize("scheme", FORMULAS)
def test_every_role_has_the_standard_deviation_of_its_scheme(scheme):
    check(decoder(scheme=scheme, std=0.03), FORMULAS[scheme])


def test_embeddings_and_convolution_can_be_set_apart():
    special = {"embedding": 1.0, "position_embedding": 1.0, "conv1d": 0.5}
    check(decoder(embedding_std=1.0, convolution_std=0.5), lambda name, i, o: special.get(name, 0.02))


def test_deepnorm_shrinks_values_outputs_and_ffn():
    """(8 * 4)^(-1/4) = 0.42045."""
    shrunk = OUTPUTS | {"v_proj", "gate_proj", "up_proj"}
    check(decoder("deepnorm"), lambda name, i, o: 0.02 * (0.42045 if name in shrunk else 1.0))


def test_sub_ln_enlarges_values_outputs_and_ffn():
    """sqrt(ln(2 * 4)) = 1.44203."""
    enlarged = OUTPUTS | {"v_proj", "gate_proj", "up_proj"}
    check(decoder("sub-ln"), lambda name, i, o: 0.02 * (1.44203 if name in enlarged else 1.0))


def test_olmo_llama_draws_nothing_beyond_three_standard_deviations():
    weight = decoder(scheme="olmo-llama").blocks[1].ffn.gate_proj.weight
    assert 0.055 < weight.abs().max() <= 0.06


def test_biases_are_zero_and_gains_one():
    model = decoder()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and not name.endswith("dt_bias"):
            assert not parameter.any(), name
        if "norm" in name:
            assert (parameter == 1).all(), name


def test_decay_parameters_follow_the_paper():
    model = decoder()
    rates = torch.cat([block.mixer.A_log for block in model.blocks[::2]]).exp()
    assert 0.01 <= rates.min() < rates.max() <= 16.0
    assert rates.mean().item() == pytest.approx(8.0, abs=5 * 16 / math.sqrt(12 * rates.numel()))
    assert all((block.mixer.dt_bias == 1).all() for block in model.blocks[::2])


def test_a_tied_head_keeps_the_draw_of_the_embedding():
    model = decoder(tied=True, embedding_std=1.0)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert "head.weight" not in dict(model.named_parameters())
