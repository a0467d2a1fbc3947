"""What a model of transformers is fed, from its config and the names of its inputs: no model is known by its name here."""

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

Head = Literal["next token", "masked tokens", "sequence", "characters", "class", "token classes", "none"]

# How transformers names a class by what its labels are.
_HEADS: tuple[tuple[str, Head], ...] = (
    ("ForMaskedLM", "masked tokens"),
    ("ForCTC", "characters"),
    ("ForSequenceClassification", "class"),
    ("ForImageClassification", "class"),
    ("ForAudioClassification", "class"),
    ("ForVideoClassification", "class"),
    ("ForTokenClassification", "token classes"),
)
_IGNORED = -100  # the label that torch's and transformers' losses leave out
_CHARACTERS = 8  # of a transcription: few enough for any recording
# Where a config says nothing: the size that such models were published for.
_IMAGE_SIZE, _CHANNELS = 224, 3


def head_of(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Head:
    """Return what the labels of ``model_class`` are; "none" where it computes no loss from a kind of labels known here."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_class.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return "next token"  # of the logits: no labels are needed
    takes = signature(model_class.forward).parameters
    if "labels" in takes:
        for ending, head in _HEADS:
            if model_class.__name__.endswith(ending):
                single = head in ("class", "token classes") and getattr(config, "num_labels", 2) < 2  # a regression
                return "none" if single else head
        if config.is_encoder_decoder and "decoder_input_ids" in takes:
            return "sequence"
    return "none"


def draw_batch(model: PreTrainedModel, head: Head, inputs: InputsConfig, seed: int) -> dict[str, Tensor]:
    """Return keyword arguments for ``model``: token ids as ``inputs`` has it, N(0, 1) for pixels and sound, random labels.

    Parameters
    ----------
    model
        Its signature and its main input's name decide what is drawn, its config the shapes.
    head
        From ``head_of``.
    inputs
        The probe's ``[inputs]``.
    seed
        Decides every draw.

    Raises
    ------
    PropcheckError
        If its main input is of a kind that cannot be drawn from a config, or the tokens are more than its positions.
    """
    draw = _Draw(model, inputs, seed)
    takes = signature(model.forward).parameters
    main = model.main_input_name
    if main not in draw.makers:
        raise PropcheckError(
            f"{type(model).__name__} takes {main}, which cannot be drawn from a config; write a callable that returns "
            "propcheck.Target(model, batch=...)"
        )
    # A model of several parts gets an input for each, unless it predicts tokens, which it does from tokens alone.
    parts = {"input_ids": "text_config", "pixel_values": "vision_config", "input_features": "audio_config"}
    others = [name for name, part in parts.items() if name != main and name in takes and hasattr(model.config, part)]
    others = [] if head == "next token" else others
    batch = {name: draw.makers[name]() for name in (main, *others)}
    if model.config.is_encoder_decoder and "decoder_input_ids" in takes:
        batch["decoder_input_ids"] = draw.tokens(of_decoder=True)
    labels = draw.labels(head, batch)
    return batch if labels is None else {**batch, "labels": labels}


# What configs call the number of their positions: of the model, or of its decoder.
_POSITIONS = (("max_position_embeddings", "n_positions"), ("max_target_positions",))


def _most_tokens(config: PreTrainedConfig, names: Iterable[str]) -> int | None:
    text = _text(config)
    return min((value for name in names if isinstance(value := getattr(text, name, None), int) and value > 0), default=None)


def within_positions(inputs: InputsConfig, config: PreTrainedConfig) -> tuple[InputsConfig, tuple[str, ...]]:
    """Return the inputs with no more tokens than the config has positions, where nobody asked for a number; and a note."""
    most = min((one for names in _POSITIONS if (one := _most_tokens(config, names)) is not None), default=None)
    if most is None or inputs.tokens <= most or "tokens" in inputs.model_fields_set:
        return inputs, ()
    return inputs.model_copy(update={"tokens": most}), (f"{most} tokens: the config has positions for no more.",)


class _Draw:
    """The draws of one batch, in order."""

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

    def tokens(self, *, of_decoder: bool = False) -> Tensor:
        """Draw token ids [batch, tokens], the padding id left out, which models mask."""
        text = _text(self.config)
        tokens = self.inputs.tokens
        names = _POSITIONS[of_decoder]
        most = _most_tokens(self.config, names)
        if most is not None and tokens > most:
            raise PropcheckError(f"inputs.tokens = {tokens} is more than the config's {names[0]} = {most}; --tokens {most}")
        vocabulary = self._vocabulary(text)
        padding = getattr(text, "pad_token_id", None)
        drawn = self.inputs.source in ("zipf", "uniform")
        if not drawn or not isinstance(padding, int) or not 0 <= padding < vocabulary:
            return token_ids(self.inputs, vocabulary, self.seed)
        ids = token_ids(self.inputs, vocabulary - 1, self.seed)
        return torch.where(ids >= padding, ids + 1, ids)

    def images(self) -> Tensor:
        """Draw pixels [batch, channels, height, width]; [batch, frames, channels, height, width] where there are frames."""
        config = self._part("vision_config")
        size = _first(config, ("image_size", "crop_size", "img_size"), _IMAGE_SIZE)
        if isinstance(size, dict):
            size = (size.get("height", _IMAGE_SIZE), size.get("width", _IMAGE_SIZE))
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = _first(config, ("num_channels", "in_channels", "in_chans"), _CHANNELS)
        frames = _first(config, ("num_frames", "frames_per_clip"), None)
        return self._normal(*((channels,) if frames is None else (frames, channels)), height, width)

    def features(self) -> Tensor:
        """Draw spectrograms: [batch, bins, frames] where the positions of the encoder are fixed, or [batch, frames, bins]."""
        config = self._part("audio_config")
        channels = _first(config, ("input_feat_per_channel",), None)
        if channels is not None:
            return self._normal(self.inputs.tokens, channels * getattr(config, "input_channels", 1))
        bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
        if bins is not None and positions is not None:
            return self._normal(bins, 2 * positions)  # the encoder's second convolution halves them
        width = _first(config, ("feature_projection_input_dim", "num_mel_bins", "input_dim", "input_feat_size"), None)
        if width is None:
            raise self._unknown("input_features")
        return self._normal(self.inputs.tokens, width)

    def sound(self) -> Tensor:
        """Draw a waveform [batch, samples], as many frames as there are tokens, or spectrograms [batch, frames, bins]."""
        strides = getattr(self.config, "conv_stride", None)
        if strides is not None:
            kernels = getattr(self.config, "conv_kernel", strides)
            samples = self.inputs.tokens
            for kernel, stride in zip(reversed(kernels), reversed(strides), strict=True):
                samples = (samples - 1) * stride + kernel
            return self._normal(samples)
        bins, frames = (getattr(self.config, name, None) for name in ("num_mel_bins", "max_length"))
        if bins is None or frames is None:
            raise self._unknown("input_values")
        return self._normal(frames, bins)

    def labels(self, head: Head, batch: dict[str, Tensor]) -> Tensor | None:
        """Draw labels of the kind that ``head`` is; None where the loss needs none."""
        if head == "masked tokens":
            return batch["input_ids"]
        if head == "sequence":
            ids = batch["decoder_input_ids"]
            return torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], _IGNORED)), dim=1)
        if head == "class":
            return self._integers(0, int(self.config.num_labels or 2), (self.inputs.batch,))
        if head == "token classes":
            return self._integers(0, int(self.config.num_labels or 2), tuple(batch["input_ids"].shape))
        if head == "characters":
            return self._integers(1, self.config.vocab_size, (self.inputs.batch, _CHARACTERS))
        return None

    def _vocabulary(self, text: PreTrainedConfig) -> int:
        try:
            rows = getattr(self.model.get_input_embeddings(), "num_embeddings", None)
        except NotImplementedError:  # a model of several parts
            rows = None
        sizes = [size for size in (rows, getattr(text, "vocab_size", None), self.inputs.vocabulary) if isinstance(size, int)]
        if not sizes:
            raise PropcheckError(f"{type(self.config).__name__} has no vocab_size; give --set inputs.vocabulary=N")
        return min(sizes)

    def _part(self, name: str) -> Any:
        return getattr(self.config, name, None) or getattr(self.config, "encoder", None) or self.config

    def _normal(self, *shape: int) -> Tensor:
        values = torch.randn((self.inputs.batch, *shape), generator=self.generator)
        return values.to(self.model.dtype)

    def _integers(self, low: int, high: int, shape: Iterable[int]) -> Tensor:
        return torch.randint(low, high, tuple(shape), generator=self.generator)

    def _unknown(self, name: str) -> PropcheckError:
        return PropcheckError(
            f"{type(self.config).__name__} does not say the shape of {name}; write a callable that returns "
            "propcheck.Target(model, batch=...)"
        )


def _text(config: PreTrainedConfig) -> Any:
    try:
        return config.get_text_config()
    except ValueError:  # several of them
        return config


def _first(config: Any, names: Iterable[str], default: Any) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), default)


def source_of(main_input: str, inputs: InputsConfig) -> str:
    """Say what is fed: the source of the token ids, or ``normal`` for pixels and sound."""
    return inputs.source if main_input == "input_ids" else "normal"
