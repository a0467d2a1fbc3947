"""A probe: what is scanned, in which precision, on which inputs, and how strictly it is judged.

A probe file is TOML. ``[model]``, ``[residual]`` and ``[init]`` are the reference decoder's own sections
(``propcheck.config.decoder``); the others are defined here. ``load_probe`` makes one of what a target names
(``propcheck.config.resolve``) and answers every mistake with one line. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, field_validator, model_validator

from propcheck.config.decoder import DecoderConfig, InitConfig, InitScheme, ModelConfig, ResidualConfig, Section
from propcheck.config.resolve import DECODER, Override, Source, apply, check_kind, parse_override, read_target
from propcheck.config.schema_docs import explain
from propcheck.config.tolerances import Gated, Quantity, Tolerances, parse_tolerance
from propcheck.errors import PropcheckError
from propcheck.records import PATH_SETTINGS, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Preset = Literal["bf16", "fp16", "fp32", "bf16-mixed"]
# The decoder's parameters of their own; a weight or bias, in fp32 beside half-precision activations, would not multiply.
KeptName = Literal["A_log", "dt_bias", "scale"]
TokenSource = Literal["zipf", "uniform", "tokens", "text"]
TOKEN_SOURCES = typing.get_args(TokenSource)
RuleId = Annotated[str, StringConstraints(pattern=r"^PC\d{3}$")]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Share = Annotated[float, BeforeValidator(parse_tolerance)]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B", re.IGNORECASE)
_EXPONENT = {"K": 1, "M": 2, "G": 3, "T": 4}


class PrecisionConfig(Section):
    """The `[precision]` section: the dtypes of training."""

    preset: Preset | None = Field(
        None,
        description="bf16, fp16, fp32: parameters and activations; bf16-mixed: fp32 parameters, bf16 products (autocast). "
        "With fp16 the loss is scaled by 1024 for the backward pass, and the gradients are divided by it. Default: bf16 for "
        "the reference decoder, its own dtype for a config.json, and the dtypes that it builds for code.",
    )
    keep_fp32: tuple[KeptName, ...] = Field(
        (), description="Last name parts of parameters of the reference decoder that stay fp32 whatever the preset."
    )


class HuggingFaceConfig(Section):
    """The `[huggingface]` section: a model of transformers."""

    config: str = Field("", description="A config.json, or a folder that holds one. Relative to the probe file.")
    overrides: dict[str, Any] = Field(
        default_factory=dict, description="Keys of the config with other values, as in `{ num_hidden_layers = 4 }`."
    )


class PythonConfig(Section):
    """The `[python]` section: code that builds a model."""

    target: str = Field(
        "", description="package.module:callable, or path/to/file.py:callable with the path relative to the probe file."
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the callable.")


class ExpectConfig(Section):
    """The `[expect]` section: what the code is meant to draw, whatever it does draw; PC104 holds the weights against it."""

    init: InitScheme | None = Field(
        None,
        description="The scheme, one of those of `init.scheme`, whose formulas `init.scheme` gives; default: nothing is "
        "declared, but by the reference decoder its own `[init]`.",
    )
    std: float = Field(0.02, gt=0, description="Standard deviation of `normal`, `gpt2`, `megatron` and `olmo-llama`.")
    embedding_std: float | None = Field(
        None, gt=0, description="Standard deviation of the token embedding; default: as the scheme has it."
    )

    @model_validator(mode="after")
    def _scheme_is_named(self) -> ExpectConfig:
        if self.init is None and self.model_fields_set - {"init"}:
            given = ", ".join(sorted(self.model_fields_set - {"init"}))
            raise ValueError(f"{given} needs init, the scheme that it belongs to")
        return self


class InputsConfig(Section):
    """The `[inputs]` section: what the model is run on, where the target brings no batch of its own."""

    source: TokenSource = Field(
        "zipf",
        description="zipf: p(id) ~ 1/(id + 1)^exponent over the whole vocabulary; uniform; tokens: a file of ids; "
        "text: a text file and its tokenizer.",
    )
    file: str | None = Field(
        None,
        description="For tokens: a flat .npy or raw .bin of ids; for text: UTF-8 text. Relative to the probe file.",
    )
    tokenizer: str | None = Field(None, description="For text: a tokenizer.json (extra `hf`). Relative to the probe file.")
    dtype: Literal["uint16", "uint32"] | None = Field(None, description="What a .bin file holds, little-endian.")
    vocabulary: int | None = Field(
        None, ge=2, description="Ids lie below it; default: the rows of the model's token embedding."
    )
    batch: int = Field(1, ge=1, description="Sequences; images or recordings where the model takes those.")
    tokens: int = Field(256, ge=2, description="Tokens of each sequence; the loss predicts each from those before it.")
    exponent: float = Field(1.0, ge=0, allow_inf_nan=False, description="Exponent of zipf; 1 is Zipf's law, 0 is uniform.")

    @model_validator(mode="after")
    def _source_has_its_file(self) -> InputsConfig:
        needs = {"tokens": ("file",), "text": ("file", "tokenizer")}.get(self.source, ())
        for key in needs:
            if getattr(self, key) is None:
                raise ValueError(f'source = "{self.source}" needs {key}')
        for key in ("file", "tokenizer"):
            if key not in needs and getattr(self, key) is not None:
                raise ValueError(f'source = "{self.source}" reads no {key}; drop the key or change source')
        suffix = Path(self.file).suffix if self.file is not None and self.source == "tokens" else None
        if suffix not in (None, ".npy", ".bin"):
            raise ValueError(f'file = "{self.file}" must end in .npy or .bin')
        if suffix == ".bin" and self.dtype is None:
            raise ValueError('a .bin file does not say what it holds; give dtype = "uint16" or "uint32"')
        if suffix != ".bin" and self.dtype is not None:
            raise ValueError("dtype is for a .bin file of tokens; drop it")
        return self


class ScanConfig(Section):
    """The `[scan]` section: how the scan runs."""

    seeds: tuple[Seed, ...] = Field((0,), min_length=1, description="One pass is run for each; weights and inputs follow it.")
    memory: str = Field("auto", description='Budget such as "5GiB"; auto: what the machine has free, less a margin.')
    device: str = Field("cpu", description="Where the model runs: cpu or cuda[:N].")
    mode: Literal["train", "eval"] = Field("train", description="train: as in training, dropout included; eval: without.")
    shadow: Literal["none", "fp32"] = Field(
        "none", description="fp32: run the same weights once more in fp32, and say at each site how far the two are apart."
    )

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds):
            raise ValueError("each seed may stand once")
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
    """A `[rules.PCnnn]` table: how one rule judges."""

    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="The rule's limit, in the unit that `propcheck rules PCnnn` names; above 0, or above 1 for a factor.",
    )
    severity: Severity | None = Field(None, description="What its findings are worth; default: as the rule has it.")


class GateConfig(Section):
    """The `[gate]` section: by how much a run may differ from its baseline."""

    tolerance: Share = Field(
        0.05,
        description='Share such as "5%" or 0.05: values pass that are up to so much larger, or smaller by the same factor.',
    )
    quantities: dict[Gated, Share] = Field(
        default_factory=dict,
        description='Shares of single quantities, as in `{ loss = "1%" }`; they count before `tolerance`. There are '
        + ", ".join(f"`{name}`" for name in typing.get_args(Gated))
        + ".",
    )
    modules: dict[str, Share] = Field(
        default_factory=dict,
        description='Shares by glob over module paths and parameter names, as in `{ "layers.0.*" = "20%" }`; they count before '
        "both, the last that matches before the others.",
    )
    floor: float = Field(
        1e-12,
        ge=0,
        le=1e-3,  # the gradients of a healthy model of 27 billion parameters go down to 3e-3
        description="What is of at most this magnitude on both sides is taken for zero, and passes.",
    )

    @property
    def tolerances(self) -> Tolerances:
        """The section as the gate takes it."""
        quantities: dict[Quantity, float] = dict(self.quantities.items())
        return Tolerances(self.tolerance, quantities, self.modules, self.floor)


class Probe(Section):
    """A whole probe file."""

    name: str = Field("", description="Names the run's directory, reports/NAME; default: the file's name.")
    description: str = Field("", description="One line for `propcheck probes`.")
    base: str = Field(
        "",
        description="A bundled probe, or a file relative to this one, whose keys count where this file is silent; the table "
        "says what differs.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Shape of the decoder.")
    residual: ResidualConfig = Field(default_factory=ResidualConfig, description="How updates join the stream.")
    init: InitConfig = Field(
        default_factory=InitConfig, description="How the weights are drawn. Biases are zero, norm gains one."
    )
    huggingface: HuggingFaceConfig = Field(
        default_factory=HuggingFaceConfig,
        description="A model of transformers (extra `hf`), in the place of `[model]`, `[residual]` and `[init]`.",
    )
    python: PythonConfig = Field(
        default_factory=PythonConfig, description="Your own code, in the place of `[model]`, `[residual]` and `[init]`."
    )
    expect: ExpectConfig = Field(
        default_factory=ExpectConfig,
        description="What the code is meant to draw, whatever it does draw: PC104 holds the weights of any target against it.",
    )
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="The dtypes of training.")
    inputs: InputsConfig = Field(
        default_factory=InputsConfig, description="What the model is run on, where the target brings no batch of its own."
    )
    scan: ScanConfig = Field(default_factory=ScanConfig, description="How the scan runs.")
    rules: dict[RuleId, RuleSettings] = Field(default_factory=dict, description="How one rule judges, e.g. `[rules.PC204]`.")
    gate: GateConfig = Field(
        default_factory=GateConfig, description="By how much a run may differ from its baseline (`propcheck gate`)."
    )

    @field_validator("name")
    @classmethod
    def _name_is_a_directory(cls, name: str) -> str:
        if name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("it names a directory: letters, digits, '.', '_' and '-' only, a letter or digit first")
        return name

    @model_validator(mode="after")
    def _sections_agree(self) -> Probe:
        if self.kind != "decoder":
            if self.precision.keep_fp32:
                raise ValueError("precision.keep_fp32 is for the reference decoder; this target keeps what its code keeps")
            return self
        positions, tokens = self.model.positions, self.inputs.tokens
        if positions and tokens > positions:
            raise ValueError(f"inputs.tokens = {tokens} is more than the model's model.positions = {positions}")
        return self

    @property
    def kind(self) -> Literal["decoder", "huggingface", "python"]:
        """What kind of target it is."""
        return "huggingface" if self.huggingface.config else "python" if self.python.target else "decoder"

    @property
    def decoder(self) -> DecoderConfig:
        """What the reference decoder is built from."""
        return DecoderConfig(model=self.model, residual=self.residual, init=self.init, keep_fp32=self.precision.keep_fp32)


def load_probe(
    target: str | Source, overrides: Sequence[str | Override] = (), defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Probe:
    """Read the probe that ``target`` names, or make one for a target that is none.

    Parameters
    ----------
    target
        As ``propcheck.config.resolve.read_target`` takes it, or what that returns.
    overrides
        ``key=value`` strings (dotted key, TOML value, quotes optional around a plain word) or ``Override`` objects;
        applied in order. A path given here is relative to the working directory, one in the file to the file.
    defaults
        Sections whose values count where the file is silent.

    Raises
    ------
    PropcheckError
        No such target, not TOML, or a key or value that the schema refuses.
    """
    source = read_target(target) if isinstance(target, str) else target
    data = source.keys
    for name, section in (defaults or {}).items():
        if isinstance(own := data.setdefault(name, {}), dict):
            data[name] = {**section, **own}
    as_written = json.dumps(data, default=str)
    parsed = [parse_override(one) if isinstance(one, str) else one for one in overrides]
    if any(override.key == "inputs.source" for override in parsed) and isinstance(inputs := data.get("inputs"), dict):
        # Another source has no use for the file of the one that it replaces.
        data["inputs"] = {key: value for key, value in inputs.items() if key not in {*PATH_SETTINGS["inputs"], "dtype"}}
    for override in parsed:
        apply(data, override)
    check_kind(data, parsed, source.origin)
    try:
        return _validate(json.dumps(data, default=str))
    except ValidationError as error:
        where, message = explain(error, Probe)
        raise PropcheckError(f"{_origin(where, parsed, as_written) or source.origin}: {message}") from error


def _validate(document: str) -> Probe:
    # Strict, so that "64" is no number and true no integer; from JSON, in which a list may stand for a tuple.
    return Probe.model_validate_json(document, strict=True)


def _origin(where: tuple[str, ...], overrides: Sequence[Override], as_written: str) -> str | None:
    """Name the overrides at fault, if they are: the one that gave the key, or, where the file alone is right, all near it."""
    keys = [tuple(override.key.split(".")) for override in overrides]
    for key, override in zip(reversed(keys), reversed(overrides), strict=True):
        if where and key == where[: len(key)]:
            return override.origin
    try:
        _validate(as_written)
    except ValidationError:
        return None
    inside = [override for key, override in zip(keys, overrides, strict=True) if key[: len(where)] == where]
    return " ".join(override.origin for override in inside or overrides)


def config_hash(probe: Probe) -> str:
    """Return the SHA-256, in hexadecimal, of everything that decides a scan's numbers and findings.

    Left out: name, description and base, where files lie, the memory budget, which changes how a scan runs and not what
    it finds, and what a gate lets pass. Of a config.json or a Python file the content counts; of an installed module its name.
    """
    left_out: dict[str, Any] = {
        "name": True,
        "description": True,
        "base": True,
        "inputs": set(PATH_SETTINGS["inputs"]),
        "scan": {"memory"},
        "gate": True,
    }
    data = probe.model_dump(mode="python", exclude=left_out)
    if data["inputs"]["vocabulary"] is None:
        del data["inputs"]["vocabulary"]
    if probe.scan.shadow == "none":
        del data["scan"]["shadow"]
    if probe.expect.init is None:
        del data["expect"]
    if probe.kind == "decoder":
        data["precision"]["preset"] = probe.precision.preset or "bf16"
        del data["huggingface"], data["python"]
    elif probe.kind == "huggingface":
        data["huggingface"]["config"] = _digest(Path(probe.huggingface.config))
    else:
        place, _, name = probe.python.target.rpartition(":")
        data["python"]["target"] = f"{_digest(Path(place))}:{name}" if place.endswith(".py") else probe.python.target
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def _digest(path: Path) -> str:
    path = path / "config.json" if path.is_dir() else path
    return hashlib.sha256(path.read_bytes()).hexdigest()


def parse_size(text: str) -> int:
    """Return the bytes in a size such as ``5GiB``, ``512 MiB`` or ``4.5GB``; ``ValueError`` when it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError('must be "auto" or a size with its unit, as in "5GiB" or "800MB"')
    number, prefix = match[1], (match[2] or "").upper()
    unit = (1024 if prefix.endswith("I") else 1000) ** _EXPONENT.get(prefix[:1], 0)
    if (size := int(float(number) * unit)) == 0:
        raise ValueError("must be more than nothing")
    return size


def differences(probe: Probe, base: Probe) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two probes differ and that decide a scan's numbers: dotted key, value here, value there."""
    return differing(*(one.model_dump(include=_DECIDING) for one in (probe, base)))


_DECIDING = {*DECODER, "huggingface", "python", "precision", "inputs"}


def differing(settings: Mapping[str, Any], others: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the same of the settings that runs keep: every key of a probe, section by section.

    Of two kinds of target only what both have is compared: the other sections are defaults that one of them has no use for.
    """

    def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in section.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return found

    used = [_sections(one) for one in (settings, others)]
    here, there = (flat({key: one[key] for key in one if key in used[0] & used[1]}) for one in (settings, others))
    keys = dict.fromkeys((*here, *there))  # a table of the target's own keys may have one that the other lacks
    return [(key, here.get(key), there.get(key)) for key in keys if here.get(key) != there.get(key)]


def _sections(settings: Mapping[str, Any]) -> set[str]:
    """Return the sections that decide what the target of these settings is and how it is run."""
    own = {name for name, key in (("huggingface", "config"), ("python", "target")) if settings.get(name, {}).get(key)}
    return {*(own or DECODER), "precision", "inputs"}
