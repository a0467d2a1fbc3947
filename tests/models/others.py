"""Small models that are no causal LMs: encoders, encoder-decoders, vision, speech. Each with a batch that it runs on."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY, BATCH, LENGTH, CLASSES = 512, 2, 16, 4
PIXELS, PATCH = 32, 8

BuiltTarget = tuple[nn.Module, dict[str, Tensor]]

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": PIXELS,
    "patch_size": PATCH,
    "num_labels": CLASSES,
}
PYRAMID = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 2, 1, 1], "num_labels": CLASSES}
WAVES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 3,
    "mask_time_prob": 0.0,  # a mask drawn by numpy, longer than these few frames
    "layerdrop": 0.0,
}


def masked(name: str, **sizes: Any) -> BuiltTarget:
    """A masked LM; labels other than its input, which tied embeddings would find by heart."""
    return _model(f"{name}ForMaskedLM", f"{name}Config", sizes), {"input_ids": _ids(), "labels": _ids(seed=1)}


def seq2seq(name: str, **sizes: Any) -> BuiltTarget:
    """An encoder-decoder; the decoder's input is the labels, shifted."""
    model = _model(f"{name}ForConditionalGeneration", f"{name}Config", sizes)
    return model, {"input_ids": _ids(), "labels": _ids(seed=1)}


def image(name: str, *, pixels: int = PIXELS, **sizes: Any) -> BuiltTarget:
    """An image classifier."""
    model = _model(f"{name}ForImageClassification", f"{name}Config", sizes)
    return model, {"pixel_values": _noise(BATCH, 3, pixels, pixels), "labels": _classes()}


def marian() -> BuiltTarget:
    model = _model("MarianMTModel", "MarianConfig", SEQ2SEQ | {"decoder_vocab_size": VOCABULARY})
    return model, {"input_ids": _ids(), "labels": _ids(seed=1)}


def xlnet() -> BuiltTarget:
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 128, "num_labels": CLASSES}
    return _model("XLNetForSequenceClassification", "XLNetConfig", sizes), {"input_ids": _ids(), "labels": _classes()}


def reformer() -> BuiltTarget:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "attention_head_size": 16,
        "feed_forward_size": 128,
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "is_decoder": True,
    }
    ids = _ids()
    return _model("ReformerModelWithLMHead", "ReformerConfig", sizes), {"input_ids": ids, "labels": ids}


def whisper() -> BuiltTarget:
    sizes = SEQ2SEQ | {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 128}
    del sizes["forced_eos_token_id"], sizes["max_position_embeddings"]
    model = _model("WhisperForConditionalGeneration", "WhisperConfig", sizes)
    return model, {"input_features": _noise(BATCH, 16, 64), "labels": _ids()}


def speech_to_text() -> BuiltTarget:
    sizes = SEQ2SEQ | {
        "input_feat_per_channel": 16,
        "conv_channels": 32,
        "max_source_positions": 64,
        "max_target_positions": 128,
    }
    del sizes["forced_eos_token_id"], sizes["max_position_embeddings"]
    model = _model("Speech2TextForConditionalGeneration", "Speech2TextConfig", sizes)
    return model, {"input_features": _noise(BATCH, 64, 16), "labels": _ids()}


def speech(name: str) -> BuiltTarget:
    """A CTC model over raw samples; labels no longer than the frames."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, 32, (BATCH, 8), generator=generator)
    return _model(f"{name}ForCTC", f"{name}Config", WAVES), {"input_values": _noise(BATCH, 2400), "labels": labels}


def spectrogram() -> BuiltTarget:
    sizes = VISION | {"max_length": 32, "num_mel_bins": 16}
    model = _model("ASTForAudioClassification", "ASTConfig", {k: v for k, v in sizes.items() if k != "image_size"})
    return model, {"input_values": _noise(BATCH, 32, 16), "labels": _classes()}


def video() -> BuiltTarget:
    model = _model("VideoMAEForVideoClassification", "VideoMAEConfig", VISION | {"num_frames": 4})
    return model, {"pixel_values": _noise(BATCH, 4, 3, PIXELS, PIXELS), "labels": _classes()}


def two_towers(name: str) -> BuiltTarget:
    """Text and vision contrasted: two streams that meet in the loss only."""
    vision = {k: v for k, v in VISION.items() if k != "num_labels"}
    text = TEXT | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    parts = {"text_config": text, "vision_config": vision}
    model = _model(f"{name}Model", f"{name}Config", parts | ({"projection_dim": 64} if name == "CLIP" else {}))
    return model, {
        "input_ids": _ids(),
        "pixel_values": _noise(BATCH, 3, PIXELS, PIXELS),
        "return_loss": torch.tensor(data=True),
    }


def caption() -> BuiltTarget:
    """BLIP: the text decoder attends to the image."""
    vision = {k: v for k, v in VISION.items() if k != "num_labels"}
    text = TEXT | {"encoder_hidden_size": 64, "pad_token_id": 0, "bos_token_id": 1, "sep_token_id": 2, "eos_token_id": 2}
    model = _model("BlipForConditionalGeneration", "BlipConfig", {"text_config": text, "vision_config": vision})
    ids = _ids()
    return model, {"input_ids": ids, "pixel_values": _noise(BATCH, 3, PIXELS, PIXELS), "labels": ids}


def segmentation() -> BuiltTarget:
    sizes = PYRAMID | {"num_attention_heads": [1, 2, 4, 4], "decoder_hidden_size": 32}
    model = _model("SegformerForSemanticSegmentation", "SegformerConfig", sizes)
    return model, {"pixel_values": _noise(BATCH, 3, 64, 64), "labels": torch.zeros(BATCH, 64, 64, dtype=torch.int64)}


def detection() -> BuiltTarget:
    """Without the head, whose loss takes labels that are no tensors."""
    stages: dict[str, Any] = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "out_features": ["stage4"]}
    backbone = hf.ResNetConfig(embedding_size=16, **stages)
    sizes: dict[str, Any] = {
        k: v for k, v in SEQ2SEQ.items() if "token" not in k and k not in {"vocab_size", "max_position_embeddings"}
    }
    sizes |= {"backbone_config": backbone, "use_timm_backbone": False, "use_pretrained_backbone": False, "num_queries": 8}
    model = _model("DetrModel", "DetrConfig", sizes)
    return model, {"pixel_values": _noise(BATCH, 3, 64, 64), "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.int64)}


def masks() -> BuiltTarget:
    """Without the head, as for detection."""
    stages: dict[str, Any] = {"depths": [1, 1, 1, 1], "out_features": ["stage1", "stage2", "stage3", "stage4"]}
    backbone = hf.SwinConfig(image_size=64, embed_dim=16, num_heads=[1, 2, 2, 4], window_size=2, **stages)
    sizes = {
        "backbone_config": backbone,
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
        "encoder_layers": 2,
        "decoder_layers": 4,
        "num_attention_heads": 4,
        "num_queries": 8,
    }
    return _model("Mask2FormerModel", "Mask2FormerConfig", sizes), {"pixel_values": _noise(BATCH, 3, 64, 64)}


def _model(cls: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    model: nn.Module = getattr(hf, cls)(getattr(hf, config)(**sizes))
    return model.train()


def _ids(seed: int = 0) -> Tensor:
    """Ids above the special tokens."""
    return torch.randint(8, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _classes() -> Tensor:
    return torch.arange(BATCH) % CLASSES


OTHERS: dict[str, Callable[[], BuiltTarget]] = {
    "albert": lambda: masked("Albert", **TEXT, embedding_size=32),
    "bert": lambda: masked("Bert", **TEXT),
    "deberta-v2": lambda: masked("DebertaV2", **TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"], conv_kernel_size=3),
    "distilbert": lambda: masked(
        "DistilBert", vocab_size=VOCABULARY, dim=64, n_layers=3, n_heads=4, hidden_dim=128, max_position_embeddings=128
    ),
    "electra": lambda: masked("Electra", **TEXT, embedding_size=32),
    "fnet": lambda: masked("FNet", **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    "funnel": lambda: masked(
        "Funnel", vocab_size=VOCABULARY, d_model=64, n_head=4, d_head=16, d_inner=128, block_sizes=[1, 2], num_decoder_layers=1
    ),
    "longformer": lambda: masked("Longformer", **TEXT | {"max_position_embeddings": 130}, attention_window=[8, 8, 8]),
    "modernbert": lambda: masked("ModernBert", **TEXT, local_attention=8, pad_token_id=0, cls_token_id=1, sep_token_id=2),
    "perceiver": lambda: masked(
        "Perceiver",
        vocab_size=VOCABULARY,
        d_model=32,
        d_latents=64,
        num_latents=8,
        num_blocks=1,
        num_self_attends_per_block=3,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=64,
        max_position_embeddings=LENGTH,
    ),
    "roberta": lambda: masked("Roberta", **TEXT),
    "xlnet": xlnet,
    "reformer": reformer,
    "bart": lambda: seq2seq("Bart", **SEQ2SEQ),
    "mbart": lambda: seq2seq("MBart", **SEQ2SEQ),
    "pegasus": lambda: seq2seq("Pegasus", **SEQ2SEQ),
    "marian": marian,
    "t5": lambda: seq2seq(
        "T5",
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "whisper": whisper,
    "speech-to-text": speech_to_text,
    "wav2vec2": lambda: speech("Wav2Vec2"),
    "hubert": lambda: speech("Hubert"),
    "ast": spectrogram,
    "vit": lambda: image("ViT", **VISION),
    "deit": lambda: image("DeiT", **VISION),
    "dinov2": lambda: image("Dinov2", **{k: v for k, v in VISION.items() if k != "intermediate_size"}, mlp_ratio=2),
    "beit": lambda: image("Beit", **VISION),
    "swin": lambda: image(
        "Swin",
        image_size=PIXELS,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    ),
    "convnext": lambda: image("ConvNext", **PYRAMID),
    # Its last stage has more than one pixel, whose mean less itself would be nothing.
    "poolformer": lambda: image("PoolFormer", pixels=2 * PIXELS, **PYRAMID),
    "segformer": segmentation,
    "detr": detection,
    "mask2former": masks,
    "videomae": video,
    "clip": lambda: two_towers("CLIP"),
    "siglip": lambda: two_towers("Siglip"),
    "blip": caption,
}

CANNOT_BF16 = {"fnet": "its Fourier transform has no bfloat16 on the CPU"}
