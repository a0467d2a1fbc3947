"""The options of a scan: one table for the keyword arguments in Python and the flags of the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.config.resolve import Override
    from propcheck.progress import Progress

Precision = Literal["bf16", "fp16", "fp32", "bf16-mixed"]


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a scan.

    ``name`` is its keyword argument in :func:`propcheck.scan`; ``type`` and ``help`` are those of its flag (``--name``, if
    ``flag`` is empty); ``key`` is the key of a probe that it overrides, if it overrides one.
    """

    name: str
    type: Any
    help: str
    key: str | None = None
    flag: str = ""
    metavar: str | None = None
    limits: tuple[int, int] | None = None

    @property
    def typed(self) -> str:
        """The flag as typed on the command line."""
        return self.flag or f"--{self.name}"


SCAN_OPTIONS: tuple[Option, ...] = (
    Option("args", list[str], "Keyword argument of the callable; repeatable.", flag="--arg", metavar="KEY=VALUE"),
    Option("set", list[str], "Override a key of the probe (`propcheck keys`); repeatable.", metavar="KEY=VALUE"),
    Option(
        "precision",
        Precision,
        "Override precision.preset; default: set by the probe, the config or the code.",
        key="precision.preset",
    ),
    Option("tokens", int, "Override inputs.tokens: tokens per sequence.", key="inputs.tokens"),
    Option("batch", int, "Override inputs.batch: number of sequences or images.", key="inputs.batch"),
    Option("seeds", str, "Override scan.seeds: 0,1 or 0..4 (inclusive).", key="scan.seeds"),
    Option("memory", str, "Override scan.memory: memory budget, e.g. 5GiB, or auto.", key="scan.memory"),
    Option("device", str, "Override scan.device: cpu or cuda[:N].", key="scan.device"),
    Option(
        "shadow",
        Literal["none", "fp32"],
        "Override scan.shadow: fp32 also runs the same weights in fp32 and reports the error.",
        key="scan.shadow",
    ),
    Option("eval", bool, "Run in evaluation mode (no dropout).", key="scan.mode"),
    Option(
        "select",
        list[str],
        "Apply only these rules: ids, names or families (PC1), separated by commas; repeatable.",
        metavar="RULES",
    ),
    Option("ignore", list[str], "Skip these rules, written like --select; repeatable.", metavar="RULES"),
    Option("threads", int, "Number of threads; default: chosen by torch.", limits=(1, 1024)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """The options of a scan after parsing, the same for both fronts."""

    overrides: tuple[Override, ...] = ()  # of keys of the probe, in the order in which they apply
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of an in-process callable: any objects
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    threads: int | None = None
    given: tuple[str, ...] = ()  # the options that were set, as the user wrote them
    command: str | None = None  # the command line, stored in the run
    progress: Progress | None = None


def given_options(values: Mapping[str, Any]) -> list[Option]:
    """Return the options that are set."""

    def is_set(option: Option) -> bool:
        value = values.get(option.name)
        empty = option.key is None and isinstance(value, list | tuple | Mapping) and not value
        return value is not None and value is not False and not empty

    return [option for option in SCAN_OPTIONS if is_set(option)]


def key_overrides(values: Mapping[str, Any], origin: Callable[[Option], str]) -> tuple[Override, ...]:
    """Turn the options that set one key of a probe into overrides; ``origin`` is how an error message names an option."""
    from propcheck.config.resolve import Override

    return tuple(
        Override(option.key, "eval" if option.name == "eval" else values[option.name], origin(option))
        for option in given_options(values)
        if option.key is not None
    )


def keyword_options(values: Mapping[str, Any]) -> ScanOptions:
    """Read keyword arguments of :func:`propcheck.scan`.

    Raises
    ------
    TypeError
        There is no such option.
    """
    from propcheck.config.resolve import Override

    names = [option.name for option in SCAN_OPTIONS]
    if unknown := [name for name in values if name not in names]:
        raise TypeError(f"unexpected option {unknown[0]!r}; options of a scan: {', '.join(names)}")
    arguments: Mapping[str, Any] = values.get("args") or {}
    seeds = values.get("seeds")
    listed = seeds if seeds is None else [seeds] if isinstance(seeds, int) else list(seeds)
    return ScanOptions(
        overrides=(
            *(Override(key, value, f"set[{key!r}]") for key, value in (values.get("set") or {}).items()),
            *(Override(f"python.args.{key}", storable(value), f"args[{key!r}]") for key, value in arguments.items()),
            *key_overrides({**values, "seeds": listed}, lambda option: option.name),
        ),
        arguments=arguments,
        select=_names(values.get("select")),
        ignore=_names(values.get("ignore")),
        threads=values.get("threads"),
        given=tuple(option.name for option in given_options(values)),
    )


def _names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def storable(value: Any) -> Any:
    """Return ``value`` in a form that a probe can hold: arguments of a Python call may be any objects."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, list | tuple):
        return [storable(item) for item in value]
    return {str(key): storable(item) for key, item in value.items()} if isinstance(value, dict) else repr(value)
