"""One scan: its model, inputs, engine, loss, and the records of every site, norm and parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable

    from propcheck.records.finding import Finding
    from propcheck.records.growth import StreamGrowth
    from propcheck.records.norm import NormRecord
    from propcheck.records.parameter import ParameterRecord
    from propcheck.records.site import SiteRecord

SCHEMA_VERSION = 1

# Keys of ``Run.settings`` that hold paths, by section; a relative path is resolved against the file that sets it.
PATH_SETTINGS = {"inputs": ("file", "tokenizer"), "huggingface": ("config",), "python": ("target",)}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Class and size of the scanned model."""

    class_name: str
    parameters: int
    blocks: int
    sites: int
    width: int
    placement: str


@dataclass(frozen=True, slots=True)
class InputInfo:
    """The input batch: ``batch`` sequences of ``tokens`` tokens from ``source``."""

    batch: int
    tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """How the scan ran. ``mode`` is resident, streamed or partly resident; ``peak_rss_bytes`` is the peak of the process."""

    mode: str
    wall_seconds: float
    peak_rss_bytes: int
    threads: int
    device: str
    memory_budget_bytes: int


@dataclass(frozen=True, slots=True)
class LossInfo:
    """The first loss and the scale of the logits.

    Attributes
    ----------
    value
        First loss, mean over the seeds.
    uniform
        ln(vocabulary), the loss of a uniform guess; None if there is no vocabulary.
    logit_std
        Standard deviation of a token's logits over the vocabulary (root of the mean variance over the tokens); None if the
        logits were not observed.
    logit_absmax
        Largest magnitude of the logits; None if they were not observed.
    lowest, highest
        Lowest and highest first loss of the seeds; None for one seed.
    by_seed
        First loss of each seed, in the order of the run's seeds.
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
    """An addition that counts the stream twice, ``x + x`` or ``x + (x + F)``; ``site`` is the first site after it."""

    site: int | None
    block: int | None
    module: str | None


@dataclass(frozen=True, slots=True)
class Angle:
    """A sine or cosine whose angles are too coarse.

    Attributes
    ----------
    module, block
        Where it is computed.
    parameter
        Tensor that holds the angles in ``dtype``; None if the forward pass computed it.
    dtype
        Coarsest dtype on the way to the angles.
    largest
        Largest angle, in radians.
    error
        Largest rounding error of an angle, in radians.
    """

    module: str | None
    block: int | None
    parameter: str | None
    dtype: str
    largest: float
    error: float


@dataclass(frozen=True, slots=True)
class Origin:
    """The first operation that turned finite numbers into a NaN or an infinity.

    Attributes
    ----------
    seed, direction, value
        Which pass it happened in, and whether it is a NaN or an infinity.
    function, module, block
        The operation and where it ran.
    inputs
        Description of the operation's inputs.
    tokens
        First affected token positions.
    affected, positions
        Number of affected positions, and of all; None if the result has no token dimension.
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
class Run:
    """One scan: everything that its directory holds except the plots.

    Attributes
    ----------
    sites, parameters, norms
        Rows of the Parquet files.
    growth
        Growth of each stream over the depth (:func:`propcheck.analysis.growth.with_growth`); empty for a run that was read
        without it.
    unobserved
        One sentence per place that could not be followed, starting with its module path.
    settings
        Every key of the probe, as it was used.
    derived
        Cache of values computed from this run (:func:`propcheck.analysis.profile.cached`). A copy that
        :func:`dataclasses.replace` makes starts with an empty one.
    """

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
    growth: tuple[StreamGrowth, ...] = ()
    doublings: tuple[Doubling, ...] = ()
    angles: tuple[Angle, ...] = ()
    origins: tuple[Origin, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    unobserved: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
