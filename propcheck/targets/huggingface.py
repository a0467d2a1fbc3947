"""A model of transformers from its ``config.json``: the class that the config names, at its own initialisation, offline."""

from __future__ import annotations

import copy
import difflib
import json
import os
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from propcheck.errors import PropcheckError
from propcheck.targets.hf_inputs import draw_batch, head_of, source_of, within_positions
from propcheck.targets.losses import random_direction
from propcheck.targets.precision import PRESETS, preset_of
from propcheck.targets.target import Target, Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

    from propcheck.config.probe import Probe

# Where no architecture is named: the first kind of model that the type has.
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
class _Choice:
    """What is built of a config, and what the user should know about the choice."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    notes: tuple[str, ...]


def huggingface_task(probe: Probe) -> Task:
    """Return the model of ``probe``'s ``[huggingface]`` section.

    It is initialised as ``from_config`` does it, all parameters in the config's dtype (``--precision`` for another) but those
    that the class keeps in fp32, in training mode, without cache. Quantisation is not done.

    Raises
    ------
    PropcheckError
        If transformers is missing, or the config is not one that it can build without code or files from elsewhere.
    """
    path = Path(probe.huggingface.config)
    path = path / "config.json" if path.is_dir() else path
    with _offline():
        try:
            import transformers
        except ImportError as error:
            raise PropcheckError(f"{path}: needs transformers (extra hf): pip install 'transformers>=5'") from error
        del transformers
        data = _read(path)
        chosen = _choose(path, _config(path, data, probe.huggingface.overrides), data)
        preset, notes = _preset(path, chosen.config, probe.precision.preset)
        if hasattr(chosen.config, "use_cache"):
            chosen.config.use_cache = False
        head = head_of(chosen.model_class, chosen.config)
    inputs, fewer = within_positions(probe.inputs, chosen.config)
    notes = (*notes, *fewer)
    precision = PRESETS[preset]
    if head == "none":
        without = (
            f"{chosen.model_class.__name__} has no loss of its own here: the gradients are those of its output along a fixed "
            "random direction, mean(output * u) with u ~ N(0, 1)."
        )
        notes = (*notes, without)

    def build() -> Target:
        try:
            model = chosen.model_class._from_config(copy.deepcopy(chosen.config), dtype=precision.parameters)  # noqa: SLF001
        except (ValueError, KeyError, TypeError, IndexError, AssertionError, ZeroDivisionError) as error:
            # The dimensions do not fit each other; what cannot be recorded is another kind of error.
            text = " ".join(f"{type(error).__name__}: {error}".split())
            raise PropcheckError(f"{path}: {chosen.model_class.__name__} cannot be built from it: {text}") from error
        _cast(model, precision.parameters)
        model.train(probe.scan.mode == "train")
        return Target(model, loss=random_direction if head == "none" else None)

    return Task(
        build=build,
        batch=lambda model, seed: draw_batch(model, head, inputs, seed),  # type: ignore[arg-type] # what build returns
        autocast=precision.autocast,
        loss_scale=precision.loss_scale,
        precision=preset,
        source=source_of(chosen.model_class.main_input_name, inputs),
        notes=(*chosen.notes, *notes),
        around=_offline,
    )


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give every parameter the dtype, as loading a checkpoint in it does, but those that the class keeps in fp32.

    A constructor may ask for float32 where the forward pass then meets products of two dtypes.
    """
    kept = model._keep_in_fp32_modules_strict or ()  # noqa: SLF001
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers off the network and its advice off the terminal; its errors are exceptions and come through."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub.constants as hub
        from transformers.utils import logging
    except ImportError:
        yield
        return
    saved = hub.HF_HUB_OFFLINE, logging.get_verbosity()
    hub.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"transformers\.")
            yield
    finally:
        hub.HF_HUB_OFFLINE = saved[0]
        logging.set_verbosity(saved[1])
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_number)
    except OSError as error:
        raise PropcheckError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        empty = path.stat().st_size == 0
        raise PropcheckError(f"{path}: {'is empty' if empty else f'not JSON: {error}'}") from error
    if not isinstance(data, dict):
        raise PropcheckError(f"{path}: must hold a table, not a {type(data).__name__}")
    if "auto_map" in data:
        raise PropcheckError(
            f"{path}: auto_map asks for code from elsewhere, which is never run; write a callable that builds the model and "
            "scan package.module:callable"
        )
    return data


def _number(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, since JSON has no infinity: ``{"__float__": "Infinity"}``."""
    text = value.get("__float__")
    return float(text) if len(value) == 1 and text in ("Infinity", "-Infinity", "NaN") else value


def _config(path: Path, data: Mapping[str, Any], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    from transformers import CONFIG_MAPPING

    kind = data.get("model_type")
    if kind is None:
        raise PropcheckError(f"{path}: has no model_type, so it is no config of transformers")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        import transformers

        near = difflib.get_close_matches(str(kind), list(CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PropcheckError(f"{path}: model_type {kind!r} is none that transformers {transformers.__version__} has{hint}")
    config_class = CONFIG_MAPPING[kind]
    merged = _overridden(data, overrides, config_class, "huggingface.overrides")
    # A quantised checkpoint's; what is trained is not.
    merged.pop("quantization_config", None)
    try:
        config: PreTrainedConfig = config_class.from_dict(merged)
    except Exception as error:
        raise PropcheckError(f"{path}: {config_class.__name__}: {' '.join(str(error).split())}") from error
    return config


def _overridden(data: Mapping[str, Any], overrides: Mapping[str, Any], config_class: Any, where: str) -> dict[str, Any]:
    """Return ``data`` with ``overrides``; ``PropcheckError`` for a key that neither the class nor the file has."""
    from transformers import CONFIG_MAPPING

    merged = dict(data)
    aliases = dict(getattr(config_class, "attribute_map", None) or {})
    known = {*data, *_keys_of(config_class), *aliases}
    for key, value in overrides.items():
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]}?" if near else f"{config_class.__name__} has no such key"
            raise PropcheckError(f"unknown key {where}.{key}; {hint}")
        own = aliases.get(key, key)
        below = merged.get(own)
        part = (getattr(config_class, "sub_configs", None) or {}).get(own)
        if isinstance(value, dict) and part is not None:
            kind = (below or {}).get("model_type") or value.get("model_type") or getattr(part, "model_type", None)
            inner = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING.keys() else part  # noqa: SIM118 - no dict: it imports
            merged[own] = _overridden(below or {}, value, inner, f"{where}.{key}")
            continue
        for alias in [alias for alias, name in aliases.items() if name == own]:
            merged.pop(alias, None)  # the same key by another name
        merged[own] = {**below, **value} if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def _keys_of(config_class: Any) -> set[str]:
    names: set[str] = set()
    for one in config_class.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
    return {name for name in names if not name.startswith("_")}


def _choose(path: Path, config: PreTrainedConfig, data: Mapping[str, Any]) -> _Choice:
    """Choose the class: the text model of a multimodal one, what ``architectures`` names, or the type's first kind."""
    notes: list[str] = []
    if data.get("quantization_config") is not None:
        notes.append("quantization_config is left out: the model is scanned as it is trained, not as a quantised checkpoint.")
    given = config.architectures
    named = given if isinstance(given, str) else next(iter(given or ()), None)
    text = getattr(config, "text_config", None)
    if text is not None and not config.is_encoder_decoder and (named is None or named.endswith("ForConditionalGeneration")):
        text_class = _mapped("MODEL_FOR_CAUSAL_LM_MAPPING", text) or _text_model(text)
        if text_class is not None:
            _inherit(text, config, data)
            whole = named or config.model_type
            notes.append(f"The text model of {whole}, {text_class.__name__}, is scanned; its other parts are not.")
            return _Choice(text_class, text, tuple(notes))
    if named is not None:
        own = _named(path, named, config)
        if own is not None:
            return _Choice(own, config, tuple(notes))
    found = next((one for kind in _KINDS if (one := _mapped(kind, config)) is not None), None) or _text_model(config)
    if found is None:
        raise PropcheckError(f"{path}: transformers has no model class for {type(config).__name__}")
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    part = next((one for one in parts if found.config_class is not None and isinstance(one, found.config_class)), None)
    if part is not None and not isinstance(config, found.config_class or ()):  # the decoder of a model of several parts
        _inherit(part, config, data)
        notes.append(f"The text model of {config.model_type}, {found.__name__}, is scanned; its other parts are not.")
        return _Choice(found, part, tuple(notes))
    if named is not None:
        notes.append(f"architectures names {named}, which transformers does not have; {found.__name__} is scanned.")
    return _Choice(found, config, tuple(notes))


def _named(path: Path, name: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    import transformers

    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        return None
    takes = found.config_class
    if takes is not None and not isinstance(config, takes):
        raise PropcheckError(
            f"{path}: architectures names {name}, which takes model_type {takes.model_type!r}, not {config.model_type!r}"
        )
    return found


def _mapped(kind: str, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    from transformers.models.auto import modeling_auto

    mapping = getattr(modeling_auto, kind)
    try:
        found = mapping[type(config)]
    except (KeyError, ValueError, AttributeError):  # listed, and not shipped
        return None
    chosen: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    return chosen


def _text_model(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the causal model of a text config that is listed under the whole model's type, in the same package."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    package = type(config).__module__.rpartition(".")[0]
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if package.rpartition(".")[2] == kind.replace("-", "_"):
            found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
            return found if found.config_class is type(config) else None
    return None


def _inherit(text: PreTrainedConfig, config: PreTrainedConfig, data: Mapping[str, Any]) -> None:
    """Give the text config what the file says of the whole model and not of its text part."""
    own = data.get("text_config") or {}
    if text.dtype is None:
        text.dtype = config.dtype
    if "tie_word_embeddings" in data and "tie_word_embeddings" not in own:
        text.tie_word_embeddings = data["tie_word_embeddings"]


def _preset(path: Path, config: PreTrainedConfig, given: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the precision: as given, else the config's dtype, else fp32 with a note."""
    if given is not None:
        return given, ()
    dtype = config.dtype
    if dtype is None:
        return "fp32", ("The config names no dtype: fp32 (--precision for another).",)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    preset = preset_of(dtype) if isinstance(dtype, torch.dtype) else None
    if preset is None:
        raise PropcheckError(f"{path}: dtype {config.dtype!r} is none to train in; --precision bf16, fp16, fp32 or bf16-mixed")
    return preset, ()
