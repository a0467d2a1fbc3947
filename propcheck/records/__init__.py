"""What one scan knows: plain records that the engine fills and that rules and views read.

No torch here: rules, tables and plots work from these alone, whether a run was just made or read back from disk.
Units: every ``*_rms`` is sqrt(mean of squares) over all elements; an activation ``*_norm`` is the root of the mean over
tokens of the squared L2 norm, so norm = rms * sqrt(width); a gradient norm is Frobenius over the batch. ``None`` means
"does not apply or was not observed"; a computed NaN or infinity is kept as such.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Sublayer = Literal["attention", "linear_attention", "ssm", "mlp", "moe", "other"]
Severity = Literal["error", "warning", "note"]
FailLevel = Literal["error", "warning", "note", "never"]
GradState = Literal["norm", "zero", "none", "nonfinite"]
NormPlace = Literal["read", "inside", "written", "stream", "outside"]
NormKind = Literal["mean_square", "variance", "length"]


SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")  # worst first


def failing(level: FailLevel) -> tuple[Severity, ...]:
    """Return the severities that are at or above a fail level, worst first; none for ``never``."""
    return () if level == "never" else SEVERITIES[: SEVERITIES.index(level) + 1]


@dataclass(frozen=True, slots=True)
class SiteRecord:
    """One residual addition of one seed; the fields are the columns of ``sublayers.parquet``, in order."""

    seed: int
    site: int
    block: int | None
    sublayer: Sublayer
    module: str | None
    placement: str | None
    continues: int | None = None
    masked: bool | None = None
    promoted: str | None = None
    stream_dtype: str | None = None
    update_dtype: str | None = None
    stream_norm: float | None = None
    update_norm: float | None = None
    sum_norm: float | None = None
    stream_rms: float | None = None
    update_rms: float | None = None
    sum_rms: float | None = None
    stream_mean: float | None = None
    update_mean: float | None = None
    sum_mean: float | None = None
    sum_absmax: float | None = None
    update_ratio: float | None = None
    cosine: float | None = None
    add_error: float | None = None
    swallowed: float | None = None
    nonfinite: int | None = None
    token_correlation: float | None = None
    norm_input_rms: float | None = None
    norm_output_rms: float | None = None
    epsilon_share: float | None = None
    bare_read: bool | None = None
    attention_logit_rms: float | None = None
    attention_logit_absmax: float | None = None
    attention_entropy: float | None = None
    grad_stream_norm: float | None = None
    grad_update_norm: float | None = None
    grad_sum_norm: float | None = None
    param_grad_norm: float | None = None
    theory_sum_rms: float | None = None
    theory_grad_norm: float | None = None
    shadow_stream_error: float | None = None
    shadow_update_error: float | None = None
    shadow_grad_stream_error: float | None = None
    shadow_grad_update_error: float | None = None


@dataclass(frozen=True, slots=True)
class NormRecord:
    """One normalisation of one seed; the fields are the columns of ``norms.parquet``, in order."""

    seed: int
    norm: int
    site: int | None
    block: int | None
    place: NormPlace
    module: str | None
    parameter: str | None
    kind: NormKind
    dtype: str
    width: int
    eps: float | None = None
    input_rms: float | None = None
    input_absmax: float | None = None
    output_rms: float | None = None
    gain: float | None = None
    epsilon_share: float | None = None
    zero_share: float | None = None


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter or buffer; the fields are the columns of ``parameters.parquet``, in order."""

    name: str
    role: str | None
    block: int | None
    sublayer: Sublayer | None
    kind: Literal["parameter", "buffer"]
    shape: tuple[int, ...]
    dtype: str
    numel: int
    site: int | None = None
    branches: int | None = None
    writes: bool | None = None
    fan_in: int | None = None
    fan_out: int | None = None
    init_calls: str | None = None
    mean: float | None = None
    std: float | None = None
    absmax: float | None = None
    zeros: int | None = None
    nonfinite: int | None = None
    duplicate_rows: int | None = None
    fp64_error: float | None = None
    requires_grad: bool = True
    grad_state: GradState | None = None
    grad_norm: float | None = None
    grad_spread: float | None = None
    used: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Size and kind of the scanned model."""

    class_name: str
    parameters: int
    blocks: int
    sites: int
    width: int
    placement: str


@dataclass(frozen=True, slots=True)
class InputInfo:
    """What was fed: ``batch`` sequences of ``tokens`` tokens from ``source``."""

    batch: int
    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How it ran. ``mode`` is resident, streamed or partly resident; ``peak_rss_bytes`` is the process's peak."""

    mode: str
    wall_seconds: float
    peak_rss_bytes: int
    threads: int
    device: str
    memory_budget_bytes: int


@dataclass(frozen=True, slots=True)
class LossInfo:
    """First loss (mean over seeds) and ln(vocabulary), the loss of a uniform guess; None where there is no vocabulary.

    ``lowest`` and ``highest`` are the first losses of the seeds that lie farthest apart, None where there is one seed;
    ``by_seed`` are all of them, in the order of the run's seeds.
    ``logit_std`` is the standard deviation of a token's logits over the vocabulary (root of the mean variance over the tokens),
    ``logit_absmax`` the largest magnitude among them; None where the logits were not seen.
    """

    value: float | None
    uniform: float | None
    logit_std: float | None = None
    logit_absmax: float | None = None
    lowest: float | None = None
    highest: float | None = None
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Doubling:
    """An addition that counts the stream twice, ``x + x`` or ``x + (x + F)``; ``site`` is the first site that continues it."""

    site: int | None
    block: int | None
    module: str | None


@dataclass(frozen=True, slots=True)
class Angle:
    """A sine or cosine of angles that are too coarse.

    ``largest`` is the largest angle and ``error`` what rounding may have taken from it, both in radians; ``dtype`` is the
    coarsest on the way to it, and ``parameter`` the tensor that has it (None: one that the forward pass computed).
    """

    module: str | None
    block: int | None
    parameter: str | None
    dtype: str
    largest: float
    error: float


@dataclass(frozen=True, slots=True)
class Origin:
    """The first operation that made a NaN or an infinity out of finite numbers.

    ``inputs`` says what it was given, in words; ``tokens`` are the first positions that it spoilt, ``affected`` of
    ``positions`` in all (None where its result has no tokens).
    """

    seed: int
    direction: Literal["forward", "backward"]
    value: Literal["NaN", "infinity"]
    function: str
    module: str | None
    block: int | None
    inputs: str
    tokens: tuple[int, ...] = ()
    affected: int | None = None
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a finding is; every part may be None."""

    site: int | None = None
    block: int | None = None
    sublayer: str | None = None
    module: str | None = None
    parameter: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule at one place. ``message`` says what and where in words, ``remedy`` what to change."""

    rule: str
    name: str
    severity: Severity
    site: Place | None
    metric: str
    value: float | str | None
    expected: float | str | None
    message: str
    remedy: str
    source: str = ""  # of the rule
    also: tuple[str, ...] = ()  # consequences that are not findings of their own: "PC302 at 41 sites"


@dataclass(frozen=True, slots=True)
class Run:
    """One scan: everything that its directory holds except the plots."""

    path: str | None
    target: str
    model: ModelInfo
    precision: str
    inputs: InputInfo
    seeds: tuple[int, ...]
    engine: EngineInfo
    versions: dict[str, str]
    loss: LossInfo
    config_hash: str
    command: str | None
    sites: tuple[SiteRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    norms: tuple[NormRecord, ...] = ()
    doublings: tuple[Doubling, ...] = ()
    angles: tuple[Angle, ...] = ()
    origins: tuple[Origin, ...] = ()
    findings: tuple[Finding, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())
    unobserved: tuple[str, ...] = field(default=())  # one sentence a place that could not be followed, its module path first
    settings: dict[str, Any] = field(default_factory=dict)  # every key of the probe, as it was used
