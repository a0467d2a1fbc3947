"""Select the transformers model class for a config: the text model, the named architecture, or the type's first kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig, PreTrainedModel

# Without a named architecture, the first of these kinds of model that transformers has for the type.
_KINDS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING",
    "MODEL_MAPPING",
)


@dataclass(frozen=True, slots=True)
class Selection:
    """A model class, the config that it is built from, and a note for the user if this is not the obvious choice."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    note: str | None = None


def select_model(path: Path, config: PreTrainedConfig, data: Mapping[str, Any]) -> Selection:
    """Select the class and config to build.

    Parameters
    ----------
    path
        The config.json, for messages.
    config
        The config of the whole model.
    data
        The keys of the file.

    Raises
    ------
    PropcheckError
        If transformers has no class for the config, or the named class takes another type.
    """
    architectures = config.architectures
    architecture = architectures if isinstance(architectures, str) else next(iter(architectures or ()), None)
    multimodal = getattr(config, "text_config", None) is not None and not config.is_encoder_decoder
    if multimodal and (architecture is None or architecture.endswith("ForConditionalGeneration")):
        text_config: PreTrainedConfig = config.text_config
        text_class = _listed("MODEL_FOR_CAUSAL_LM_MAPPING", text_config) or _causal_class(text_config)
        if text_class is not None:
            return _text_model(text_class, text_config, config, data, architecture)
    if architecture is not None and (model_class := _named(path, architecture, config)) is not None:
        return Selection(model_class, config)
    listed = (_listed(kind, config) for kind in _KINDS)
    model_class = next((candidate for candidate in listed if candidate is not None), None) or _causal_class(config)
    if model_class is None:
        raise PropcheckError(f"{path}: transformers has no model class for {type(config).__name__}")
    decoder_config = _part_of_class(config, model_class)
    if decoder_config is not None:
        return _text_model(model_class, decoder_config, config, data)
    note = None
    if architecture is not None:
        note = f"transformers has no class {architecture} (architectures in the config); {model_class.__name__} is scanned."
    return Selection(model_class, config, note)


def _text_model(
    text_class: type[PreTrainedModel],
    text_config: PreTrainedConfig,
    config: PreTrainedConfig,
    data: Mapping[str, Any],
    architecture: str | None = None,
) -> Selection:
    """Return the text model of a larger model, with the keys that the file sets for the whole model only."""
    if text_config.dtype is None:
        text_config.dtype = config.dtype
    if "tie_word_embeddings" in data and "tie_word_embeddings" not in (data.get("text_config") or {}):
        text_config.tie_word_embeddings = data["tie_word_embeddings"]
    whole = architecture or config.model_type
    return Selection(text_class, text_config, f"Only {text_class.__name__}, the text model of {whole}, is scanned.")


def _part_of_class(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> PreTrainedConfig | None:
    """Return the sub-config that ``model_class`` takes, if it does not take the whole config."""
    config_class = model_class.config_class
    if config_class is None or isinstance(config, config_class):
        return None
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    return next((part for part in parts if isinstance(part, config_class)), None)


def _named(path: Path, architecture: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that ``architectures`` names, if transformers has it."""
    import transformers

    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    config_class = model_class.config_class
    if config_class is not None and not isinstance(config, config_class):
        raise PropcheckError(
            f"{path}: architectures names {architecture}, which takes model_type {config_class.model_type!r}, not "
            f"{config.model_type!r}"
        )
    return model_class


def _listed(kind: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class that transformers' auto mapping ``kind`` lists for the config."""
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, kind)
    try:
        classes = mapping[type(config)]
    except (KeyError, ValueError, AttributeError):  # AttributeError: listed but not shipped
        return None
    model_class: type[PreTrainedModel] = classes[0] if isinstance(classes, tuple | list) else classes
    return model_class


def _causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the causal model of a text config that transformers lists only under the type of the whole model."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    package = type(config).__module__.rpartition(".")[0].rpartition(".")[2]
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if package == model_type.replace("-", "_"):
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]
            return model_class if model_class.config_class is type(config) else None
    return None
