"""Build a transformers model from its ``config.json``, with its own initialisation, offline."""

from __future__ import annotations

import copy
import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from propcheck.errors import PropcheckError
from propcheck.targets.hf_config import make_config, read_json
from propcheck.targets.hf_inputs import draw_batch, head_of, limit_tokens, source_name
from propcheck.targets.hf_model_class import Selection, select_model
from propcheck.targets.losses import random_direction
from propcheck.targets.precision import PRESETS, preset_of
from propcheck.targets.target import Target, Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

    from propcheck.config.probe import HuggingFaceConfig, Probe


def huggingface_task(probe: Probe) -> Task:
    """Return the task of ``probe``'s ``[huggingface]`` section.

    The model is initialised as by ``from_config``, without a cache and without quantisation. All parameters have the
    config's dtype (or that of ``--precision``), except those that the class keeps in fp32.

    Raises
    ------
    PropcheckError
        If transformers is missing, or cannot build the config without remote code or files.
    """
    path = Path(probe.huggingface.config)
    path = path / "config.json" if path.is_dir() else path
    with _offline():
        selection, notes = _select(path, probe.huggingface)
        model_class, config = selection.model_class, selection.config
        preset, dtype_notes = _preset(path, config, probe.precision.preset)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        head = head_of(model_class, config)
    inputs, token_notes = limit_tokens(probe.inputs, config)
    notes = (*notes, *dtype_notes, *token_notes)
    precision = PRESETS[preset]
    if head == "none":
        no_loss = (
            f"{model_class.__name__} has no loss that labels can be drawn for: the gradients are those of "
            "mean(output * u), u ~ N(0, 1) a fixed random direction."
        )
        notes = (*notes, no_loss)

    def build() -> Target:
        model = _build_model(path, selection, precision.parameters)
        model.train(probe.scan.mode == "train")
        return Target(model, loss=random_direction if head == "none" else None)

    return Task(
        build=build,
        batch=lambda model, seed: draw_batch(model, head, inputs, seed),  # type: ignore[arg-type] # what build returns
        autocast=precision.autocast,
        loss_scale=precision.loss_scale,
        precision=preset,
        source=source_name(model_class.main_input_name, inputs),
        notes=notes,
        around=_offline,
    )


def _select(path: Path, section: HuggingFaceConfig) -> tuple[Selection, tuple[str, ...]]:
    """Return the class and config to build, and notes on that choice."""
    try:
        import transformers
    except ImportError as error:
        raise PropcheckError(f"{path}: needs transformers (extra hf): pip install 'transformers>=5'") from error
    del transformers
    data = read_json(path)
    selection = select_model(path, make_config(path, data, section.overrides), data)
    notes = []
    if data.get("quantization_config") is not None:
        notes.append("quantization_config is ignored: the model is scanned as in training, not as a quantised checkpoint.")
    if selection.note is not None:
        notes.append(selection.note)
    return selection, tuple(notes)


def _build_model(path: Path, selection: Selection, dtype: torch.dtype) -> PreTrainedModel:
    model_class = selection.model_class
    try:
        model: PreTrainedModel = model_class._from_config(copy.deepcopy(selection.config), dtype=dtype)  # noqa: SLF001
    except (ValueError, KeyError, TypeError, IndexError, AssertionError, ZeroDivisionError) as error:
        # Dimensions that do not fit each other raise these; a constructor that cannot be recorded raises another error.
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise PropcheckError(f"{path}: cannot build {model_class.__name__}: {text}") from error
    # Loading a checkpoint casts every parameter, also those that the constructor made in float32, which would meet
    # half-precision tensors in a matrix product.
    kept_fp32 = model._keep_in_fp32_modules_strict or ()  # noqa: SLF001
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and not any(part in name for part in kept_fp32):
            parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _offline() -> Iterator[None]:
    """Keep transformers off the network and its advice off the terminal; its exceptions come through."""
    env_before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import huggingface_hub.constants as hub
        from transformers.utils import logging
    except ImportError:
        yield
        return
    offline_before, verbosity_before = hub.HF_HUB_OFFLINE, logging.get_verbosity()
    hub.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"transformers\.")
            yield
    finally:
        hub.HF_HUB_OFFLINE = offline_before
        logging.set_verbosity(verbosity_before)
        if env_before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = env_before


def _preset(path: Path, config: PreTrainedConfig, preset: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the precision preset: as set in the probe, else the config's dtype, else fp32 with a note."""
    if preset is not None:
        return preset, ()
    if config.dtype is None:
        return "fp32", ("The config sets no dtype: fp32 is used (--precision sets another).",)
    dtype = getattr(torch, config.dtype, None) if isinstance(config.dtype, str) else config.dtype
    preset = preset_of(dtype) if isinstance(dtype, torch.dtype) else None
    if preset is None:
        raise PropcheckError(
            f"{path}: dtype {config.dtype!r} is not a training precision; set --precision bf16, fp16, fp32 or bf16-mixed"
        )
    return preset, ()
