"""Generate the inputs and labels of a transformers model from its config and signature, without knowing models by name."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from propcheck.errors import PropcheckError
from propcheck.seeding import generator_for
from propcheck.targets.inputs import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from transformers import PreTrainedConfig, PreTrainedModel

    from propcheck.config.probe import InputsConfig

# The kind of labels that a model's loss takes.
Head = Literal["next token", "masked tokens", "sequence", "characters", "class", "token classes", "none"]

# The endings by which transformers names classes, and the labels that those take.
_HEAD_OF_ENDING: tuple[tuple[str, Head], ...] = (
    ("ForMaskedLM", "masked tokens"),
    ("ForCTC", "characters"),
    ("ForSequenceClassification", "class"),
    ("ForImageClassification", "class"),
    ("ForAudioClassification", "class"),
    ("ForVideoClassification", "class"),
    ("ForTokenClassification", "token classes"),
)
_IGNORED = -100  # the label that the losses of torch and transformers ignore
_CHARACTERS = 8  # length of a transcription: short enough for any recording
_IMAGE_SIZE, _CHANNELS = 224, 3  # the usual published size, for configs without one
# Config keys for the number of positions: of the model, and of its decoder.
_POSITIONS = ("max_position_embeddings", "n_positions")
_DECODER_POSITIONS = ("max_target_positions",)
# The main inputs of the parts of a multimodal model, and the config of each part.
_PARTS = {"input_ids": "text_config", "pixel_values": "vision_config", "input_features": "audio_config"}


def head_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Head:
    """Return the kind of labels that ``model_class`` takes; "none" if labels cannot be drawn for its loss."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_class.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "next token"  # computed from the logits, without labels
    parameters = signature(model_class.forward).parameters
    if "labels" not in parameters:
        return "none"
    for ending, head in _HEAD_OF_ENDING:
        if model_class.__name__.endswith(ending):
            is_regression = head in ("class", "token classes") and getattr(config, "num_labels", 2) < 2
            return "none" if is_regression else head
    return "sequence" if config.is_encoder_decoder and "decoder_input_ids" in parameters else "none"


def draw_batch(model: PreTrainedModel, head: Head, inputs: InputsConfig, seed: int) -> dict[str, Tensor]:
    """Return keyword arguments for ``model``: token ids as in ``inputs``, N(0, 1) for pixels and sound, random labels.

    Parameters
    ----------
    model
        Its signature and its main input's name decide what is drawn, its config the shapes.
    head
        From ``head_of``.
    inputs
        The probe's ``[inputs]``.
    seed
        Determines every draw.

    Raises
    ------
    PropcheckError
        If the config does not describe the main input, or there are more tokens than positions.
    """
    draw = _Draw(model, inputs, seed)
    parameters = signature(model.forward).parameters
    main = model.main_input_name
    if main not in draw.makers:
        raise PropcheckError(
            f"{type(model).__name__} takes {main}, which cannot be drawn from a config; write a callable that returns "
            "propcheck.Target(model, batch=...)"
        )
    names = [main]
    if head != "next token":  # a multimodal model that predicts tokens can do so from tokens alone
        names += [name for name, part in _PARTS.items() if name != main and name in parameters and hasattr(model.config, part)]
    batch = {name: draw.makers[name]() for name in names}
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters:
        batch["decoder_input_ids"] = draw.tokens(_DECODER_POSITIONS)
    labels = draw.labels(head, batch)
    return batch if labels is None else {**batch, "labels": labels}


def limit_tokens(inputs: InputsConfig, config: PreTrainedConfig) -> tuple[InputsConfig, tuple[str, ...]]:
    """Return inputs with no more tokens than the config has positions, and a note if the default was too many.

    A number of tokens that the user sets stays as it is.
    """
    limit = _positions(config, (*_POSITIONS, *_DECODER_POSITIONS))
    if limit is None or inputs.tokens <= limit or "tokens" in inputs.model_fields_set:
        return inputs, ()
    return inputs.model_copy(update={"tokens": limit}), (f"inputs.tokens is {limit}: the config has no more positions.",)


def source_name(main_input: str, inputs: InputsConfig) -> str:
    """Return where the inputs come from: the source of the token ids, or ``normal`` for pixels and sound."""
    return inputs.source if main_input == "input_ids" else "normal"


class _Draw:
    """The draws of one batch, in order; ``makers`` maps the name of an input to the method that draws it."""

    def __init__(self, model: PreTrainedModel, inputs: InputsConfig, seed: int) -> None:
        self.model, self.config, self.inputs, self.seed = model, model.config, inputs, seed
        self.generator = generator_for("batch", seed)
        self.makers: dict[str, Callable[[], Tensor]] = {
            "input_ids": self.tokens,
            "pixel_values": self.images,
            "pixel_values_videos": self.images,
            "input_features": self.features,
            "input_values": self.sound,
        }

    def tokens(self, position_keys: tuple[str, ...] = _POSITIONS) -> Tensor:
        """Draw token ids [batch, tokens] without the padding id, which models mask."""
        tokens, limit = self.inputs.tokens, _positions(self.config, position_keys)
        if limit is not None and tokens > limit:
            raise PropcheckError(
                f"inputs.tokens = {tokens} exceeds {position_keys[0]} = {limit} of the config; use --tokens {limit}"
            )
        text_config = _text_config(self.config)
        vocabulary = self._vocabulary(text_config)
        padding = getattr(text_config, "pad_token_id", None)
        is_random = self.inputs.source in ("zipf", "uniform")
        if not is_random or not isinstance(padding, int) or not 0 <= padding < vocabulary:
            return token_ids(self.inputs, vocabulary, self.seed)
        ids = token_ids(self.inputs, vocabulary - 1, self.seed)
        return torch.where(ids >= padding, ids + 1, ids)

    def images(self) -> Tensor:
        """Draw pixels [batch, channels, height, width], or [batch, frames, channels, height, width] for video."""
        config = self._part("vision_config")
        size = _first_set(config, ("image_size", "crop_size", "img_size"), _IMAGE_SIZE)
        if isinstance(size, dict):
            size = (size.get("height", _IMAGE_SIZE), size.get("width", _IMAGE_SIZE))
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = _first_set(config, ("num_channels", "in_channels", "in_chans"), _CHANNELS)
        frames = _first_set(config, ("num_frames", "frames_per_clip"), None)
        return self._normal(*((channels,) if frames is None else (frames, channels)), height, width)

    def features(self) -> Tensor:
        """Draw spectrograms: [batch, bins, frames] for an encoder with fixed positions, else [batch, frames, bins]."""
        config = self._part("audio_config")
        channel_width = getattr(config, "input_feat_per_channel", None)
        if channel_width is not None:
            return self._normal(self.inputs.tokens, channel_width * getattr(config, "input_channels", 1))
        bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
        if bins is not None and positions is not None:
            return self._normal(bins, 2 * positions)  # the encoder's second convolution halves the frames
        width = _first_set(config, ("feature_projection_input_dim", "num_mel_bins", "input_dim", "input_feat_size"), None)
        if width is None:
            raise self._undefined("input_features")
        return self._normal(self.inputs.tokens, width)

    def sound(self) -> Tensor:
        """Draw a waveform [batch, samples] with as many frames as tokens, or spectrograms [batch, frames, bins]."""
        strides = getattr(self.config, "conv_stride", None)
        if strides is not None:
            kernels = getattr(self.config, "conv_kernel", strides)
            samples = self.inputs.tokens
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                samples = (samples - 1) * stride + kernel
            return self._normal(samples)
        bins, frames = (getattr(self.config, name, None) for name in ("num_mel_bins", "max_length"))
        if bins is None or frames is None:
            raise self._undefined("input_values")
        return self._normal(frames, bins)

    def labels(self, head: Head, batch: dict[str, Tensor]) -> Tensor | None:
        """Draw the labels of ``head``; None if its loss needs none."""
        match head:
            case "masked tokens":
                return batch["input_ids"]
            case "sequence":
                ids = batch["decoder_input_ids"]  # [batch, tokens]
                return torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], _IGNORED)), dim=1)
            case "class":
                return self._integers(0, int(self.config.num_labels or 2), (self.inputs.batch,))
            case "token classes":
                return self._integers(0, int(self.config.num_labels or 2), tuple(batch["input_ids"].shape))
            case "characters":
                return self._integers(1, self.config.vocab_size, (self.inputs.batch, _CHARACTERS))
            case _:
                return None

    def _vocabulary(self, text_config: Any) -> int:
        try:
            rows = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        except NotImplementedError:  # a model of several parts
            rows = None
        sizes = (rows, getattr(text_config, "vocab_size", None), self.inputs.vocabulary)
        vocabulary = min((size for size in sizes if isinstance(size, int)), default=None)
        if vocabulary is None:
            raise PropcheckError(f"{type(self.config).__name__} has no vocab_size; use --set inputs.vocabulary=N")
        return vocabulary

    def _part(self, name: str) -> Any:
        return getattr(self.config, name, None) or getattr(self.config, "encoder", None) or self.config

    def _normal(self, *shape: int) -> Tensor:
        values = torch.randn((self.inputs.batch, *shape), generator=self.generator)
        return values.to(self.model.dtype)

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def _undefined(self, name: str) -> PropcheckError:
        return PropcheckError(
            f"{type(self.config).__name__} does not define the shape of {name}; write a callable that returns "
            "propcheck.Target(model, batch=...)"
        )


def _positions(config: PreTrainedConfig, keys: Iterable[str]) -> int | None:
    """Return the fewest positions that one of the keys gives."""
    text_config = _text_config(config)
    values = (getattr(text_config, key, None) for key in keys)
    return min((value for value in values if isinstance(value, int) and value > 0), default=None)


def _text_config(config: PreTrainedConfig) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # there are several
        return config


def _first_set(config: Any, keys: Iterable[str], default: Any) -> Any:
    return next((value for key in keys if (value := getattr(config, key, None)) is not None), default)
