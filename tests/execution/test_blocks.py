"""The blocks are the longest runs of modules of one family; heads, experts and the layers of an MLP are none."""

from __future__ import annotations

import re

import pytest
import torch
from plain import RESIDENT, Model, scan
from torch import nn
from transformers import AutoConfig, AutoModel

from propcheck.errors import PropcheckError
from propcheck.execution.blocks import find_blocks, named_blocks

W = 8
TEXT = {"vocab_size": 32, "max_position_embeddings": 16}
LAYERS = {"hidden_size": W, "num_attention_heads": 2, "intermediate_size": 16}
BART = {
    "d_model": W, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
}  # fmt: skip
TRANSFORMERS = {
    "gpt2": ({"n_embd": W, "n_layer": 3, "n_head": 2, "vocab_size": 32}, ["h.#"] * 3),
    "bert": ({**TEXT, **LAYERS, "num_hidden_layers": 2}, ["encoder.layer.#"] * 2),
    "albert": ({**TEXT, **LAYERS, "embedding_size": 4}, ["encoder.albert_layer_groups.#.albert_layers.#"]),
    "t5": ({"vocab_size": 32, "d_model": W, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2},
           ["encoder.block.#"] * 2 + ["decoder.block.#"] * 3),
    "bart": ({**TEXT, **BART}, ["encoder.layers.#"] * 2 + ["decoder.layers.#"] * 3),
    "mixtral": ({**TEXT, **LAYERS, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 8}, ["layers.#"] * 2),
    "swin": ({"image_size": 32, "embed_dim": W, "depths": [2, 2, 3], "num_heads": [1, 2, 2], "window_size": 2},
             ["encoder.layers.#.blocks.#"] * 7),
    "convnext": ({"hidden_sizes": [4, 8, 16, 32], "depths": [1, 1, 2, 1]}, ["encoder.stages.#.layers.#"] * 5),
    "segformer": ({"hidden_sizes": [4, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 2, 1, 1]},
                  ["stages.#.blocks.#"] * 5),
    "clip": ({"text_config": {**TEXT, **LAYERS, "num_hidden_layers": 2},
              "vision_config": {**LAYERS, "num_hidden_layers": 3, "image_size": 32, "patch_size": 16}},
             ["text_model.encoder.layers.#"] * 2 + ["vision_model.encoder.layers.#"] * 3),
    "wav2vec2": ({**LAYERS, "num_hidden_layers": 2, "conv_dim": [W] * 7, "num_conv_pos_embeddings": 4,
                  "num_conv_pos_embedding_groups": 2}, ["encoder.layers.#"] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name):
    settings, expected = TRANSFORMERS[name]
    model = AutoModel.from_config(AutoConfig.for_model(name, **settings))
    assert [re.sub(r"\d+", "#", path) for path, _ in find_blocks(model)] == expected


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(W, W), nn.GELU(), nn.Linear(W, W), nn.GELU(), nn.Linear(W, W))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)


class Layer(nn.Module):
    def __init__(self, experts=0, heads=0):
        super().__init__()
        self.norm = nn.LayerNorm(W)
        self.attention = nn.MultiheadAttention(W, 2)
        self.mlp = Mlp()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.heads = nn.ModuleList(Expert() for _ in range(heads))


class OtherLayer(Layer):
    pass


class ThirdLayer(Layer):
    pass


class Tower(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(4, W)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(W)


class Stage(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(depth)))
        self.down = nn.Linear(W, W)


def within(**parts):
    return nn.ModuleDict(parts)


def listed(*parts):
    return nn.ModuleList(parts)


HANDWRITTEN = {
    "a chain of layers": (lambda: nn.Sequential(*(nn.Linear(W, W) for _ in range(3))), ["#"] * 3),
    "experts": (lambda: within(layers=listed(*(Layer(experts=16) for _ in range(2)))), ["layers.#"] * 2),
    "one layer of experts": (lambda: within(layers=listed(Layer(experts=16))), ["layers.#"]),
    "several heads": (
        lambda: within(body=Tower(2), heads=listed(nn.Linear(W, 90), nn.Linear(W, 90))),
        ["body.layers.#"] * 2,
    ),
    "larger heads": (lambda: within(body=Tower(12), heads=listed(Expert(), Expert())), ["body.layers.#"] * 12),
    "two towers in a list": (lambda: listed(Tower(3), Tower(3)), ["#.layers.#"] * 6),
    "two towers by name": (lambda: within(left=Tower(3), right=Tower(4)), ["left.layers.#"] * 3 + ["right.layers.#"] * 4),
    "stages": (lambda: within(stages=listed(Stage(1), Stage(2), Stage(1))), ["stages.#.layers.#"] * 4),
    "a dict of layers": (lambda: within(layers=within(a=Layer(), b=Layer())), ["layers.a", "layers.b"]),
    "two kinds in turns": (lambda: within(layers=listed(Layer(), OtherLayer(), Layer(), OtherLayer())), ["layers.#"] * 4),
    "three kinds": (lambda: within(layers=listed(Layer(), OtherLayer(), ThirdLayer())), ["layers.#"] * 3),
    "a wrapped model": (lambda: nn.Sequential(Tower(3)), ["#.layers.#"] * 3),
    "nothing": (lambda: nn.Linear(2, 2), []),
    "lists of parts": (lambda: within(layers=listed(*(listed(nn.LayerNorm(W), Mlp()) for _ in range(3)))), ["layers.#"] * 3),
    "torch's own layers": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(W, 2, 16), 3, enable_nested_tensor=False),
        ["layers.#"] * 3,
    ),
}


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_handwritten(name):
    build, expected = HANDWRITTEN[name]
    assert [re.sub(r"\d+", "#", path) for path, _ in find_blocks(build())] == expected


# --- names


def test_names_are_of_modules_or_of_one_container():
    model = within(body=Tower(3), other=Layer())
    assert [path for path, _ in named_blocks(model, "body.layers")] == ["body.layers.0", "body.layers.1", "body.layers.2"]
    chosen = named_blocks(model, ["body.layers.1", "other"])
    assert [(path, type(module)) for path, module in chosen] == [("body.layers.1", Layer), ("other", Layer)]
    assert [path for path, _ in named_blocks(model, ["other", "body.layers"])][:2] == ["other", "body.layers.0"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("body.layer", r"blocks: ModuleDict has no module 'body\.layer'; do you mean 'body\.layers'\?"),
        (["body.layers.7"], r"has no module 'body\.layers\.7'; do you mean 'body\.layers\.\d'\?"),
        (["zzz"], r"has no module 'zzz'$"),
        (["body", "body.layers.0"], r"'body\.layers\.0' lies within 'body'; name one of the two"),
        (["other", "other"], "a module is named twice"),
    ],
)
def test_wrong_names_are_one_line(names, message):
    with pytest.raises(PropcheckError, match=message):
        named_blocks(within(body=Tower(3), other=Layer()), names)


def test_the_model_itself_is_no_block():
    with pytest.raises(PropcheckError, match="the model itself is no block of it"):
        named_blocks(Tower(3), [""])


def test_a_scan_takes_the_blocks_that_the_target_names():
    one = scan(Model, RESIDENT, blocks=["blocks.2", "blocks.0"])
    assert one.blocks == 2
    assert [site.block for site in one.sites] == [1, None, 0]
    assert one.block_of["blocks.0.inner.weight"] == 1
    assert scan(Model, RESIDENT, blocks="blocks").blocks == 3
    with pytest.raises(PropcheckError, match="do you mean 'blocks'"):
        scan(Model, RESIDENT, blocks="block")


def test_two_stacks_are_numbered_through():
    class Both(Model):
        def __init__(self):
            super().__init__()
            self.later = Model()

        def run(self, x):
            return self.later.run(super().run(x))

    one = scan(Both, RESIDENT)
    assert one.blocks == 6
    assert [site.block for site in one.sites] == list(range(6))
    assert torch.isfinite(torch.tensor(one.loss))
