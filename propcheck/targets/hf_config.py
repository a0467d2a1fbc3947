"""Read a transformers ``config.json`` and apply the overrides of the ``[huggingface]`` section."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import PreTrainedConfig


def read_json(path: Path) -> dict[str, Any]:
    """Read the keys of a ``config.json``.

    Raises
    ------
    PropcheckError
        If the file cannot be read, does not hold a JSON object, or needs remote code.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"), object_hook=_float_from_object)
    except OSError as error:
        raise PropcheckError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        empty = path.stat().st_size == 0
        raise PropcheckError(f"{path}: {'is empty' if empty else f'not JSON: {error}'}") from error
    if not isinstance(data, dict):
        raise PropcheckError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    if "auto_map" in data:
        raise PropcheckError(
            f"{path}: auto_map needs remote code, which propcheck never runs; write a callable that builds the model and scan "
            "package.module:callable"
        )
    return data


def _float_from_object(value: dict[str, Any]) -> Any:
    """Return the number that transformers writes as ``{"__float__": "Infinity"}``, since JSON has no infinity."""
    text = value.get("__float__")
    return float(text) if len(value) == 1 and text in ("Infinity", "-Infinity", "NaN") else value


def make_config(path: Path, data: Mapping[str, Any], overrides: Mapping[str, Any]) -> PreTrainedConfig:
    """Make the config object of the file's ``model_type``, without quantisation.

    Parameters
    ----------
    path
        The file, for messages.
    data
        Its keys.
    overrides
        Keys that replace those of the file, under any of their names.

    Raises
    ------
    PropcheckError
        If transformers does not know the type or a key, or refuses a value.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    model_type = data.get("model_type")
    if model_type is None:
        raise PropcheckError(f"{path}: has no model_type, so it is not a transformers config")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING.keys()), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PropcheckError(f"{path}: model_type {model_type!r} is unknown to transformers {transformers.__version__}{hint}")
    config_class = CONFIG_MAPPING[model_type]
    merged = _overridden(data, overrides, config_class, "huggingface.overrides")
    merged.pop("quantization_config", None)  # describes a quantised checkpoint, not the model in training
    try:
        config: PreTrainedConfig = config_class.from_dict(merged)
    except Exception as error:
        raise PropcheckError(f"{path}: {config_class.__name__}: {' '.join(str(error).split())}") from error
    return config


def _overridden(data: Mapping[str, Any], overrides: Mapping[str, Any], config_class: Any, section: str) -> dict[str, Any]:
    """Return ``data`` with ``overrides``; refuse a key that neither the class nor the file has."""
    from transformers import CONFIG_MAPPING

    merged = dict(data)
    aliases = dict(getattr(config_class, "attribute_map", None) or {})
    sub_configs = getattr(config_class, "sub_configs", None) or {}
    known_keys = {*data, *config_keys(config_class), *aliases}
    for key, value in overrides.items():
        if key not in known_keys:
            near = difflib.get_close_matches(key, sorted(known_keys), n=1)
            hint = f"did you mean {near[0]}?" if near else f"{config_class.__name__} has no such key"
            raise PropcheckError(f"unknown key {section}.{key}; {hint}")
        canonical = aliases.get(key, key)
        current = merged.get(canonical)
        sub_config = sub_configs.get(canonical)
        if isinstance(value, dict) and sub_config is not None:
            current = current or {}
            model_type = current.get("model_type") or value.get("model_type") or getattr(sub_config, "model_type", None)
            is_known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
            sub_class = CONFIG_MAPPING[str(model_type)] if is_known else sub_config
            merged[canonical] = _overridden(current, value, sub_class, f"{section}.{key}")
            continue
        for alias in [alias for alias, name in aliases.items() if name == canonical]:
            merged.pop(alias, None)
        merged[canonical] = {**current, **value} if isinstance(value, dict) and isinstance(current, dict) else value
    return merged


def config_keys(config_class: Any) -> set[str]:
    """Return the keys that a config class and its bases declare."""
    names: set[str] = set()
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return {name for name in names if not name.startswith("_")}
