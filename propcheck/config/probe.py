"""The probe schema, and reading a probe: what is scanned, in which precision, on which inputs, and how it is judged.

A probe file is TOML. ``[model]``, ``[residual]`` and ``[init]`` belong to the reference decoder
(``propcheck.config.decoder``); this module defines the other sections. ``load_probe`` validates the keys that
``propcheck.config.resolve`` gathers for a target and reports a mistake in one line. This module does not import torch.
"""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, field_validator, model_validator

from propcheck.config.decoder import DecoderConfig, InitConfig, InitScheme, ModelConfig, ResidualConfig, Section
from propcheck.config.resolve import (
    Override,
    Source,
    apply_override,
    check_target_kind,
    parse_override,
    read_target,
)
from propcheck.config.schema_docs import explain
from propcheck.config.tolerances import Gated, Quantity, Tolerances, parse_tolerance
from propcheck.errors import PropcheckError
from propcheck.records import PATH_SETTINGS, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Preset = Literal["bf16", "fp16", "fp32", "bf16-mixed"]
# Only parameters outside matrix products: torch multiplies no fp32 weight with half-precision activations.
KeptName = Literal["A_log", "dt_bias", "scale"]
TokenSource = Literal["zipf", "uniform", "tokens", "text"]
TOKEN_SOURCES = typing.get_args(TokenSource)
RuleId = Annotated[str, StringConstraints(pattern=r"^PC\d{3}$")]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Tolerance = Annotated[float, BeforeValidator(parse_tolerance)]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
_EXPONENT = {"K": 1, "M": 2, "G": 3, "T": 4}


class PrecisionConfig(Section):
    """The `[precision]` section: the dtypes of training."""

    preset: Preset | None = Field(
        None,
        description="bf16, fp16, fp32: dtype of parameters and activations; bf16-mixed: fp32 parameters, bf16 matrix products "
        "(autocast). fp16 scales the loss by 1024 for the backward pass and divides the gradients by 1024. Default: bf16 for "
        "the reference decoder, the config's dtype for a config.json, and for your own code the dtypes that it builds.",
    )
    keep_fp32: tuple[KeptName, ...] = Field(
        (),
        description="Parameters of the reference decoder that stay fp32 under every preset, by the last part of their name.",
    )


class HuggingFaceConfig(Section):
    """The `[huggingface]` section: a transformers model."""

    config: str = Field("", description="Path of a config.json or of the folder that holds it, relative to the probe file.")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Config keys to override, as in `{ num_hidden_layers = 4 }`."
    )


class PythonConfig(Section):
    """The `[python]` section: code that builds a model."""

    target: str = Field(
        "", description="package.module:callable, or path/to/file.py:callable with the path relative to the probe file."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the callable.")


class ExpectConfig(Section):
    """The `[expect]` section: the init scheme that the weights should follow; PC104 checks them against it."""

    init: InitScheme | None = Field(
        None,
        description="Expected scheme; `init.scheme` lists the formulas. Default: the reference decoder is checked against its "
        "own `[init]`, other targets against no scheme.",
    )
    std: float = Field(0.02, gt=0, description="Standard deviation for `normal`, `gpt2`, `megatron` and `olmo-llama`.")
    embedding_std: float | None = Field(
        None, gt=0, description="Standard deviation of the token embedding; default: given by the scheme."
    )

    @model_validator(mode="after")
    def _scheme_is_named(self) -> ExpectConfig:
        if self.init is None and self.model_fields_set - {"init"}:
            keys = ", ".join(sorted(self.model_fields_set - {"init"}))
            raise ValueError(f'{keys} needs init, the expected scheme, as in init = "gpt2"')
        return self


class InputsConfig(Section):
    """The `[inputs]` section: what the model runs on if the target supplies no batch."""

    source: TokenSource = Field(
        "zipf",
        description="zipf: p(id) ~ 1/(id + 1)^exponent over the whole vocabulary; uniform: all ids equally likely; tokens: a "
        "file of ids; text: a text file and its tokenizer.",
    )
    file: str | None = Field(
        None,
        description="For tokens: a flat .npy or raw .bin file of ids; for text: a UTF-8 file. Relative to the probe file.",
    )
    tokenizer: str | None = Field(None, description="For text: a tokenizer.json (extra `hf`). Relative to the probe file.")
    dtype: Literal["uint16", "uint32"] | None = Field(None, description="Integer type of a .bin file, little-endian.")
    vocabulary: int | None = Field(
        None, ge=2, description="All ids are below this number; default: the rows of the model's token embedding."
    )
    batch: int = Field(1, ge=1, description="Sequences per batch; images or recordings for models that take those.")
    tokens: int = Field(256, ge=2, description="Tokens per sequence. The loss predicts each token from those before it.")
    exponent: float = Field(1.0, ge=0, allow_inf_nan=False, description="Exponent of zipf; 1 is Zipf's law, 0 is uniform.")

    @model_validator(mode="after")
    def _files_fit_source(self) -> InputsConfig:
        needed = {"tokens": ("file",), "text": ("file", "tokenizer")}.get(self.source, ())
        for key in needed:
            if getattr(self, key) is None:
                raise ValueError(f'source = "{self.source}" needs {key}')
        for key in ("file", "tokenizer"):
            if key not in needed and getattr(self, key) is not None:
                raise ValueError(f'source = "{self.source}" does not use {key}; remove the key or change source')
        suffix = Path(self.file).suffix if self.file is not None and self.source == "tokens" else None
        if suffix not in (None, ".npy", ".bin"):
            raise ValueError(f'file = "{self.file}" must end in .npy or .bin')
        if suffix == ".bin" and self.dtype is None:
            raise ValueError('a .bin file needs dtype = "uint16" or "uint32"')
        if suffix != ".bin" and self.dtype is not None:
            raise ValueError("dtype applies to a .bin file of tokens only; remove it")
        return self


class ScanConfig(Section):
    """The `[scan]` section: how the scan runs."""

    seeds: tuple[Seed, ...] = Field(
        (0,), min_length=1, description="One pass runs per seed; the seed determines weights and inputs."
    )
    memory: str = Field("auto", description='Memory budget, such as "5GiB"; auto: the free memory, less a margin.')
    device: str = Field("cpu", description="Where the model runs: cpu or cuda[:N].")
    mode: Literal["train", "eval"] = Field("train", description="train: as in training, with dropout; eval: without.")
    shadow: Literal["none", "fp32"] = Field(
        "none", description="fp32: run the same weights again in fp32 and report how far the two runs differ at each site."
    )

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("each seed may appear only once")
        return seeds

    @field_validator("memory", mode="before")
    @classmethod
    def _memory_is_a_size(cls, memory: Any) -> Any:
        if memory != "auto":
            parse_size(str(memory))
        return memory

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ValueError('must be "cpu", "cuda" or "cuda:N"')
        return device

    @property
    def memory_bytes(self) -> int | None:
        """The budget in bytes; None for auto."""
        return None if self.memory == "auto" else parse_size(self.memory)


class RuleSettings(Section):
    """A `[rules.PCnnn]` table: settings of one rule."""

    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="The rule's threshold, in the unit that `propcheck rules PCnnn` shows; above 0, or above 1 for a factor.",
    )
    severity: Severity | None = Field(None, description="Severity of its findings; default: the rule's own.")


class GateConfig(Section):
    """The `[gate]` section: how far a run may differ from its baseline."""

    tolerance: Tolerance = Field(
        0.05,
        description='Allowed difference, such as "5%" or 0.05: values pass if larger by at most this share, or smaller by the '
        "same factor.",
    )
    quantities: dict[Gated, Tolerance] = Field(
        default_factory=dict,
        description='Tolerances of single quantities, as in `{ loss = "1%" }`; they override `tolerance`. Quantities: '
        + ", ".join(f"`{name}`" for name in typing.get_args(Gated))
        + ".",
    )
    modules: dict[str, Tolerance] = Field(
        default_factory=dict,
        description='Tolerances by glob over module paths and parameter names, as in `{ "layers.0.*" = "20%" }`; they override '
        "`tolerance` and `quantities`. If several globs match, the last one applies.",
    )
    floor: float = Field(
        1e-12,
        ge=0,
        le=1e-3,  # the gradients of a healthy model of 27 billion parameters go down to 3e-3
        description="Values of at most this magnitude in both runs count as zero and pass.",
    )

    @property
    def tolerances(self) -> Tolerances:
        """The section in the form that the gate takes."""
        quantities: dict[Quantity, float] = dict(self.quantities.items())
        return Tolerances(self.tolerance, quantities, self.modules, self.floor)


class Probe(Section):
    """A whole probe file."""

    name: str = Field("", description="Name of the run directory, reports/NAME; default: the name of the file.")
    description: str = Field("", description="One line, listed by `propcheck probes`.")
    base: str = Field(
        "",
        description="A bundled probe, or a file relative to this one, that supplies defaults for keys not set here. The scan "
        "lists the keys that differ.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Shape of the decoder.")
    residual: ResidualConfig = Field(default_factory=ResidualConfig, description="How updates are added to the stream.")
    init: InitConfig = Field(
        default_factory=InitConfig, description="How the weights are initialised. Biases are zero, norm gains one."
    )
    huggingface: HuggingFaceConfig = Field(
        default_factory=HuggingFaceConfig,
        description="A transformers model (extra `hf`), instead of `[model]`, `[residual]` and `[init]`.",
    )
    python: PythonConfig = Field(
        default_factory=PythonConfig, description="Your own code, instead of `[model]`, `[residual]` and `[init]`."
    )
    expect: ExpectConfig = Field(
        default_factory=ExpectConfig,
        description="The init scheme that the weights should follow. PC104 checks the weights of any target against it.",
    )
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="The dtypes of training.")
    inputs: InputsConfig = Field(
        default_factory=InputsConfig, description="What the model runs on if the target supplies no batch."
    )
    scan: ScanConfig = Field(default_factory=ScanConfig, description="How the scan runs.")
    rules: dict[RuleId, RuleSettings] = Field(default_factory=dict, description="Settings of one rule, e.g. `[rules.PC204]`.")
    gate: GateConfig = Field(
        default_factory=GateConfig, description="How far a run may differ from its baseline (`propcheck gate`)."
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_directory(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("must be a directory name: letters, digits, '.', '_' and '-', beginning with a letter or digit")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Probe:
        if self.kind != "decoder":
            if self.precision.keep_fp32:
                raise ValueError("precision.keep_fp32 applies to the reference decoder only; remove it")
            return self
        positions, tokens = self.model.positions, self.inputs.tokens
        if positions and tokens > positions:
            raise ValueError(f"inputs.tokens = {tokens} exceeds model.positions = {positions}")
        return self

    @property
    def kind(self) -> Literal["decoder", "huggingface", "python"]:
        """The kind of the target."""
        return "huggingface" if self.huggingface.config else "python" if self.python.target else "decoder"

    @property
    def decoder(self) -> DecoderConfig:
        """The settings of the reference decoder."""
        return DecoderConfig(model=self.model, residual=self.residual, init=self.init, keep_fp32=self.precision.keep_fp32)


def load_probe(
    target: str | Source, overrides: Sequence[str | Override] = (), defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Probe:
    """Load the probe that a target names, or make one for a config.json or a callable.

    Parameters
    ----------
    target
        A string as ``propcheck.config.resolve.read_target`` takes it, or the ``Source`` that it returns.
    overrides
        ``key=value`` strings (dotted key, TOML value, quotes optional around a plain word) or ``Override`` objects;
        applied in order. Paths in overrides are relative to the working directory, paths in a file to that file.
    defaults
        Sections with values for keys that the file does not set.

    Raises
    ------
    PropcheckError
        If there is no such target, the file is not TOML, or the schema refuses a key or value.
    """
    source = read_target(target) if isinstance(target, str) else target
    data = source.keys
    for name, section in (defaults or {}).items():
        if isinstance(in_file := data.setdefault(name, {}), dict):
            data[name] = {**section, **in_file}
    before_overrides = json.dumps(data, default=str)
    parsed = [parse_override(override) if isinstance(override, str) else override for override in overrides]
    if any(override.key == "inputs.source" for override in parsed) and isinstance(inputs := data.get("inputs"), dict):
        # The files of the replaced source do not apply to the new one.
        data["inputs"] = {key: value for key, value in inputs.items() if key not in {*PATH_SETTINGS["inputs"], "dtype"}}
    for override in parsed:
        apply_override(data, override)
    check_target_kind(data, parsed, source.origin)
    try:
        return _validate(json.dumps(data, default=str))
    except ValidationError as error:
        key, message = explain(error, Probe)
        raise PropcheckError(f"{_overrides_at_fault(key, parsed, before_overrides) or source.origin}: {message}") from error


def _validate(document: str) -> Probe:
    # Strict, so that "64" is not an integer and neither is true; from JSON, where a list is accepted for a tuple.
    return Probe.model_validate_json(document, strict=True)


def _overrides_at_fault(fault: tuple[str, ...], overrides: Sequence[Override], before_overrides: str) -> str | None:
    """Return the options that caused the fault at a key; None if the file is at fault.

    The last override of that key is named. If no override sets it but the file alone is valid, all overrides inside the
    faulty section are named.
    """
    keys = [tuple(override.key.split(".")) for override in overrides]
    for key, override in zip(reversed(keys), reversed(overrides), strict=True):
        if fault and key == fault[: len(key)]:
            return override.origin
    try:
        _validate(before_overrides)
    except ValidationError:
        return None
    inside = [override for key, override in zip(keys, overrides, strict=True) if key[: len(fault)] == fault]
    return " ".join(override.origin for override in inside or overrides)


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as ``5GiB``, ``512 MiB`` or ``4.5GB``.

    Raises
    ------
    ValueError
        If the text is not a size with a unit, or the size is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError('must be "auto" or a size with its unit, as in "5GiB" or "800MB"')
    number, prefix = match[1], (match[2] or "").upper()
    unit = (1024 if prefix.endswith("I") else 1000) ** _EXPONENT.get(prefix[:1], 0)
    if (size := int(float(number) * unit)) == 0:
        raise ValueError("must be at least one byte")
    return size
