"""Configs of transformers as targets: which class is built, in which dtype, on which batch, and what is refused."""

from __future__ import annotations

import json
import math
import socket

import pytest
import torch
from transformers import CONFIG_MAPPING

import propcheck
from propcheck.api.measurement import measure
from propcheck.api.requests import ScanRequest
from propcheck.cli.app import run
from propcheck.config.probe import load_probe
from propcheck.deferred_init.record import record
from propcheck.errors import PropcheckError
from propcheck.targets.from_probe import task_of

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 300, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
PAIR = {
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("attention_heads", 4))},
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "d_model": 64,
    "vocab_size": 300,
}
T5 = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 8}
SOUND = {
    **SIZES,
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing here may look anything up, whatever the environment says of offline modes."""

    def refuse(*address):
        raise AssertionError(f"the network was asked for {address}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(data, name="model"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(data if isinstance(data, str) else json.dumps(data))
        return name

    return write


def scanned(target, *overrides):
    return measure(ScanRequest(target, load_probe(target, ["inputs.tokens=16", "inputs.batch=2", *overrides])))


def built(target, *overrides):
    """Return the task, the model with fake parameters, and the batch of seed 0."""
    task = task_of(load_probe(target, ["inputs.tokens=16", "inputs.batch=2", *overrides]))
    model = record(lambda: task.build().model).model
    return task, model, task.batch(model, 0)


def message(target, *overrides):
    with pytest.raises(PropcheckError) as caught:
        task_of(load_probe(target, overrides))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_causal_model_is_scanned_from_its_config_alone(config):
    result = scanned(config({**LLAMA, "dtype": "bfloat16"}))
    assert (result.model.class_name, result.model.blocks, result.model.sites) == ("LlamaForCausalLM", 2, 4)
    assert (result.precision, result.notes) == ("bf16", ())
    assert result.loss.uniform == pytest.approx(math.log(300))
    assert {p.dtype for p in result.parameters if p.kind == "parameter"} == {"bfloat16"}
    assert result.versions["transformers"]
    assert result.settings["huggingface"]["config"].endswith("/model")


def test_a_model_of_seventy_billion_parameters_is_built_without_its_memory(config):
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    large |= {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
    task = task_of(load_probe(config(large)))
    recording = record(lambda: task.build().model)
    # As the model card of Llama 3 70B counts them.
    assert sum(entry.numel for entry in recording.entries if entry.kind == "parameter") == 70_553_706_496


@pytest.mark.parametrize(
    ("data", "expected", "dtype"),
    [
        ({"torch_dtype": "float16"}, "fp16", torch.float16),
        ({"dtype": "float32"}, "fp32", torch.float32),
        ({"dtype": "bfloat16"}, "bf16", torch.bfloat16),
        ({}, "fp32", torch.float32),
    ],
)
def test_the_dtype_is_the_configs_and_a_missing_one_is_said(config, data, expected, dtype):
    task, model, _ = built(config({**LLAMA, **data}))
    assert (task.precision, model.dtype) == (expected, dtype)
    assert task.notes == (() if data else ("The config sets no dtype: fp32 is used (--precision sets another).",))
    assert task.loss_scale == (1024 if expected == "fp16" else 1)


def test_a_preset_overrules_the_dtype_of_the_config(config):
    task, model, _ = built(config({**LLAMA, "dtype": "bfloat16"}), "precision.preset=bf16-mixed")
    assert (task.precision, model.dtype, task.autocast, task.notes) == ("bf16-mixed", torch.float32, torch.bfloat16, ())


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **TEXT}, "BertForMaskedLM"),
        ({"model_type": "bert", "architectures": ["BertModel"], **TEXT}, "BertModel"),
        ({"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4}, "GPT2LMHeadModel"),
        (T5, "T5ForConditionalGeneration"),
        ({"model_type": "vit", **IMAGE}, "ViTForImageClassification"),
        ({"model_type": "distilbert", "vocab_size": 300, "dim": 64, "n_heads": 4, "n_layers": 2}, "DistilBertForMaskedLM"),
        ({"model_type": "hubert", **SOUND}, "HubertForCTC"),
        ({"model_type": "clip_vision_model", **IMAGE}, "CLIPVisionModel"),
    ],
)
def test_the_class_is_the_one_named_or_the_first_kind_that_the_type_has(config, data, name):
    assert type(built(config(data))[1]).__name__ == name


def test_a_class_that_transformers_does_not_have_is_replaced_and_said(config):
    task, model, _ = built(config({**LLAMA, "architectures": ["MyLlamaForCausalLM"], "dtype": "float32"}))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert task.notes == (
        "transformers has no class MyLlamaForCausalLM (architectures in the config); LlamaForCausalLM is scanned.",
    )


def test_of_a_multimodal_config_the_text_model_is_scanned_and_that_is_said(config):
    data = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "torch_dtype": "float16",
        "tie_word_embeddings": True,
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**IMAGE, "model_type": "clip_vision_model"},
    }
    result = scanned(config(data))
    assert (result.model.class_name, result.precision, result.model.sites) == ("LlamaForCausalLM", "fp16", 4)
    assert result.notes == ("Only LlamaForCausalLM, the text model of LlavaForConditionalGeneration, is scanned.",)
    assert any(p.name == "model.embed_tokens.weight = lm_head.weight" for p in result.parameters)  # tied, as the file says


@pytest.mark.parametrize(
    ("data", "sites", "uniform", "tokens", "source"),
    [
        ({**TEXT, "model_type": "bert", "architectures": ["BertForMaskedLM"]}, 4, 300, 16, "zipf"),
        ({**TEXT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}, 4, 2, 16, "zipf"),
        ({**TEXT, "model_type": "bert", "architectures": ["BertForTokenClassification"]}, 4, 2, 16, "zipf"),
        ({**TEXT, "model_type": "bert", "architectures": ["BertModel"]}, 4, None, 16, "zipf"),
        ({**T5, "architectures": ["T5ForConditionalGeneration"]}, 10, 300, 16, "zipf"),
        ({**PAIR, "model_type": "bart", "architectures": ["BartForConditionalGeneration"]}, 10, 300, 16, "zipf"),
        (
            {**PAIR, "model_type": "whisper", "num_mel_bins": 16, "max_source_positions": 25, "pad_token_id": 0},
            10,
            300,
            25,
            "normal",
        ),
        ({**IMAGE, "model_type": "vit", "architectures": ["ViTForImageClassification"]}, 4, 2, 17, "normal"),
        ({**IMAGE, "model_type": "dinov2", "architectures": ["Dinov2Model"]}, 4, None, 17, "normal"),
        ({**IMAGE, "model_type": "videomae", "num_frames": 4, "tubelet_size": 2}, 4, None, 32, "normal"),
    ],
)
def test_models_of_every_kind_get_a_batch_and_a_loss(config, data, sites, uniform, tokens, source):
    if data["model_type"] == "whisper":
        data = {**data, "architectures": ["WhisperForConditionalGeneration"], "max_target_positions": 64, "bos_token_id": 1}
        data |= {"decoder_start_token_id": 1, "eos_token_id": 2, "begin_suppress_tokens": None, "suppress_tokens": None}
    result = scanned(config(data), "precision.preset=fp32")
    assert result.model.sites == sites
    assert result.loss.uniform == (None if uniform is None else pytest.approx(math.log(uniform)))
    assert (result.inputs.batch, result.inputs.tokens, result.inputs.source) == (2, tokens, source)
    assert math.isfinite(result.loss.value)
    assert any("has no loss" in note for note in result.notes) == (uniform is None)


def test_half_precision_images_and_sound_have_the_dtype_of_the_model(config):
    image = built(config({**IMAGE, "model_type": "vit", "dtype": "bfloat16"}))[2]
    assert {key: (value.shape, value.dtype) for key, value in image.items()} == {
        "pixel_values": ((2, 3, 32, 32), torch.bfloat16),
        "labels": ((2,), torch.int64),
    }
    sound = built(config({**SOUND, "model_type": "wav2vec2", "vocab_size": 32, "architectures": ["Wav2Vec2ForCTC"]}))[2]
    # 16 frames through kernels 10 and 3 with strides 5 and 2: ((16 - 1) x 2 + 3 - 1) x 5 + 10 samples.
    assert sound["input_values"].shape == (2, 170)
    assert sound["labels"].min() > 0


def test_a_spectrogram_has_the_layout_of_its_encoder(config):
    flat = built(config({**SIZES, "model_type": "audio-spectrogram-transformer", "max_length": 40, "num_mel_bins": 32}))[2]
    assert flat["input_values"].shape == (2, 40, 32)
    data = {**PAIR, "model_type": "speech_to_text", "input_feat_per_channel": 20, "max_target_positions": 64}
    spoken = built(config(data))[2]
    assert spoken["input_features"].shape == (2, 16, 20)
    assert spoken["decoder_input_ids"].shape == (2, 16)


def test_a_decoder_predicts_the_ids_that_follow_its_own(config):
    batch = built(config({**T5, "pad_token_id": 0}))[2]
    assert torch.equal(batch["labels"][:, :-1], batch["decoder_input_ids"][:, 1:])
    assert (batch["labels"][:, -1] == -100).all()  # what torch's cross-entropy leaves out


@pytest.mark.parametrize("padding", [0, 1, 150, 299])
def test_no_id_of_a_batch_is_the_padding(config, padding):
    batch = built(config({**LLAMA, "pad_token_id": padding}), "inputs.source=uniform", "inputs.batch=100", "inputs.tokens=64")[
        2
    ]
    ids = batch["input_ids"]
    assert padding not in ids
    assert ids.min() == (1 if padding == 0 else 0)
    assert ids.max() == (298 if padding == 299 else 299)
    assert len(ids.unique()) == 299


def test_the_batch_follows_the_seed(config):
    task, model, batch = built(config({**IMAGE, "model_type": "vit"}))
    assert torch.equal(batch["pixel_values"], task.batch(model, 0)["pixel_values"])
    assert not torch.equal(batch["pixel_values"], task.batch(model, 1)["pixel_values"])
    assert abs(float(batch["pixel_values"].std()) - 1) < 0.05


def test_a_text_config_that_is_listed_under_the_whole_model_is_found(config):
    assert type(built(config({**TEXT, "model_type": "emu3_text_model"}))[1]).__name__ == "Emu3ForCausalLM"


def test_what_predicts_tokens_is_fed_tokens_alone(config):
    data = {**TEXT, "model_type": "git", "architectures": ["GitForCausalLM"], "vision_config": IMAGE}
    assert set(built(config(data))[2]) == {"input_ids"}


def test_both_towers_of_a_pair_are_fed(config):
    data = {
        "model_type": "clip",
        "projection_dim": 32,
        "text_config": TEXT,
        "vision_config": IMAGE,
        "architectures": ["CLIPModel"],
    }
    result = scanned(config(data))
    assert result.model.sites == 8
    assert all(p.grad_state == "norm" for p in result.parameters if p.kind == "parameter" and "layers" in p.name)


def test_evaluation_mode_reaches_the_model_and_training_is_the_default(config):
    name = config(LLAMA)
    assert built(name)[1].training
    assert not built(name, "scan.mode=eval")[1].training


def test_there_is_no_cache_and_no_quantisation(config):
    task, model, _ = built(
        config({**LLAMA, "use_cache": True, "quantization_config": {"quant_method": "fp8"}, "dtype": "float32"})
    )
    assert model.config.use_cache is False
    assert not hasattr(model.config, "quantization_config")
    assert task.notes == (
        "quantization_config is ignored: the model is scanned as in training, not as a quantised checkpoint.",
    )


def test_keys_of_the_config_are_overridden_by_any_of_their_names(config):
    name = config({"model_type": "gpt2", "vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 4})
    for key in ("n_layer", "num_hidden_layers"):
        assert len(built(name, f"huggingface.overrides.{key}=3")[1].transformer.h) == 3
    nested = config({"model_type": "llava", "text_config": {**TEXT, "model_type": "llama"}}, "nested")
    model = built(nested, "huggingface.overrides.text_config.num_hidden_layers=3")[1]
    assert len(model.model.layers) == 3
    assert model.config.hidden_size == 64


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("num_hiden_layers=3", "unknown key huggingface.overrides.num_hiden_layers; did you mean num_hidden_layers?"),
        ("zzz=3", "unknown key huggingface.overrides.zzz; LlamaConfig has no such key"),
    ],
)
def test_an_unknown_key_of_the_config_is_refused_with_the_nearest(config, override, expected):
    assert message(config(LLAMA), f"huggingface.overrides.{override}") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[1]", "must hold a JSON object, not a list"),
        ("{}", "has no model_type, so it is not a transformers config"),
        ('{"model_type": "lama"}', "model_type 'lama' is unknown to transformers "),
        ('{"model_type": 3}', "model_type 3 is unknown to transformers "),
        (
            '{"model_type": "llama", "auto_map": {"AutoModel": "modeling.X"}}',
            (
                "auto_map needs remote code, which propcheck never runs; write a callable that builds the model and scan "
                "package.module:callable"
            ),
        ),
        (
            json.dumps({**LLAMA, "architectures": ["GPT2LMHeadModel"]}),
            "architectures names GPT2LMHeadModel, which takes model_type 'gpt2', not 'llama'",
        ),
        (
            json.dumps({**LLAMA, "dtype": "float64"}),
            "dtype torch.float64 is not a training precision; set --precision bf16, fp16, fp32 or",
        ),
        (json.dumps({**LLAMA, "num_hidden_layers": "two"}), "LlamaConfig: "),
    ],
)
def test_a_wrong_config_is_one_line_that_names_the_file(config, text, expected):
    assert message(config(text)).startswith(f"{load_probe('model').huggingface.config}/config.json: {expected}")


def test_an_unknown_type_has_its_nearest(config):
    assert message(config('{"model_type": "lama"}')).endswith("; did you mean 'llama'?")


def test_a_file_that_is_not_there_is_named(tmp_path):
    assert message(str(tmp_path / "nix.json")) == f"{tmp_path}/nix.json: No such file or directory"


def test_more_tokens_than_positions_are_refused(config):
    with pytest.raises(
        PropcheckError, match=r"inputs.tokens = 65 exceeds max_position_embeddings = 64 of the config; use --tok"
    ):
        scanned(config(LLAMA), "inputs.tokens=65")


def test_an_input_that_no_config_describes_is_refused(config):
    with pytest.raises(
        PropcheckError, match="takes inputs, which cannot be drawn from a config; write a callable that returns"
    ):
        scanned(config({"model_type": "perceiver"}))


def test_without_transformers_the_extra_is_named(config, monkeypatch):
    import sys

    name = config(LLAMA)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert message(name).endswith("config.json: needs transformers (extra hf): pip install 'transformers>=5'")


def test_the_environment_and_the_log_level_are_left_as_they_were(config, monkeypatch):
    import os

    from transformers.utils import logging

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    before = logging.get_verbosity()
    scanned(config(LLAMA))
    assert "HF_HUB_OFFLINE" not in os.environ
    assert logging.get_verbosity() == before


def test_the_command_line_scans_a_folder_and_says_nothing_else(config, capsys):
    config({**LLAMA, "dtype": "bfloat16"})
    assert run(["scan", "model", "--no-plots", "--tokens", "8", "--output-format", "json"]) in (0, 1)
    out, err = capsys.readouterr()
    assert err == "propcheck: wrote reports/model\n"
    assert json.loads(out)["run"]["precision"] == "bf16"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"model_type": "nix"}', '{"auto_map": {}}'])
def test_a_wrong_config_is_status_2(config, capsys, text):
    config(text)
    assert run(["scan", "model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_every_config_class_that_builds_by_default_gives_its_keys():
    from propcheck.targets.hf_config import config_keys

    assert {"num_hidden_layers", "rope_parameters", "dtype"} <= config_keys(CONFIG_MAPPING["llama"])


def test_tokens_that_nobody_asked_for_are_no_more_than_the_positions(tmp_path):
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = propcheck.scan(str(tmp_path))
    assert run.record.inputs.tokens == 64
    assert "inputs.tokens is 64: the config has no more positions." in run.notes
