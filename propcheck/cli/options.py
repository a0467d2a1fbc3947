"""The options that several commands share, each group written once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.config.probe import Probe
    from propcheck.config.pyproject import ToolSettings
    from propcheck.config.resolve import Override

_MOST_SEEDS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """How a target is scanned; every command that scans takes all of them."""

    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="A keyword argument of the callable; repeatable."),
    ] = None
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the probe (`propcheck keys`); repeatable."),
    ] = None
    precision: Annotated[
        Literal["bf16", "fp16", "fp32", "bf16-mixed"] | None,
        typer.Option(help="Override precision.preset; default: the probe's, the config's, or what the code builds."),
    ] = None
    tokens: Annotated[int | None, typer.Option(help="Override inputs.tokens: the tokens of each sequence.")] = None
    batch: Annotated[int | None, typer.Option(help="Override inputs.batch: the sequences or images.")] = None
    seeds: Annotated[str | None, typer.Option(help="Override scan.seeds: 0,1 or 0..4, both ends included.")] = None
    memory: Annotated[str | None, typer.Option(help="Override scan.memory: the budget, as in 5GiB, or auto.")] = None
    device: Annotated[str | None, typer.Option(help="Override scan.device: cpu or cuda[:N].")] = None
    shadow: Annotated[
        Literal["none", "fp32"] | None, typer.Option(help="Override scan.shadow: fp32 compares with the same weights in fp32.")
    ] = None
    evaluate: Annotated[bool, typer.Option("--eval", help="Run in evaluation mode, without dropout.")] = False
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="Judge by these rules only: ids or names, separated by commas; repeatable."),
    ] = None
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="Leave these rules out, written in the same way; repeatable.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: as many as torch takes.")] = None

    def overrides(self) -> list[str | Override]:
        """Return what the options say of the probe, each with the option that a message about it names."""
        from propcheck.config.resolve import Override, parse_override

        options: list[tuple[str, str, object]] = [
            ("--precision", "precision.preset", self.precision),
            ("--tokens", "inputs.tokens", self.tokens),
            ("--batch", "inputs.batch", self.batch),
            ("--seeds", "scan.seeds", None if self.seeds is None else _seeds(self.seeds)),
            ("--memory", "scan.memory", self.memory),
            ("--device", "scan.device", self.device),
            ("--shadow", "scan.shadow", self.shadow),
            ("--eval", "scan.mode", "eval" if self.evaluate else None),
        ]
        overrides: list[str | Override] = [*(self.assignments or ())]
        overrides += [parse_override(one, "--arg", "python.args") for one in self.arguments or ()]
        return overrides + [Override(key, value, option) for option, key, value in options if value is not None]

    def given(self) -> list[str]:
        """Return the options that were given, as they are typed."""
        flags = {"arguments": "--arg", "assignments": "--set", "evaluate": "--eval"}
        return [
            flags.get(f.name, f"--{f.name}") for f in dataclasses.fields(self) if getattr(self, f.name) not in (None, False)
        ]


@dataclass(frozen=True, slots=True)
class Request:
    """A target that can be scanned: its probe is read, its rules are known to exist."""

    target: str
    probe: Probe
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    threads: int | None


def request(target: str, options: ScanOptions, settings: ToolSettings, overrides: Sequence[Override] = ()) -> Request:
    """Read what ``target`` names and check all that can be checked before the scan; ``PropcheckError`` where it is wrong.

    ``overrides`` are applied after those of the options.
    """
    from propcheck.api.scan import check_rules
    from propcheck.config.probe import load_probe

    probe = load_probe(target, [*options.overrides(), *overrides], settings.defaults)
    selected = _rule_ids("--select", options.select) or settings.select
    ignored = _rule_ids("--ignore", options.ignore) or settings.ignore
    check_rules(probe, (*selected, *ignored))
    return Request(target, probe, selected, ignored, options.threads or settings.threads)


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take a group of options as one argument: a parameter whose annotation is such a dataclass.

    Typer sees the group's options one by one, in its place.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        annotation = hints[parameter.name]
        if not dataclasses.is_dataclass(annotation):
            parameters.append(parameter.replace(annotation=annotation))
            continue
        assert isinstance(annotation, type)
        groups[parameter.name] = annotation
        inside = typing.get_type_hints(annotation, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=inside[f.name])
            for f in dataclasses.fields(annotation)
        ]

    @functools.wraps(command)
    def wrapper(*args: Any, **values: Any) -> Any:
        filled = {
            name: group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)}) for name, group in groups.items()
        }
        return command(*args, **values, **filled)

    del wrapper.__wrapped__  # what is asked for is the signature below
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            ends = (int(first), int(last if dots else first))
        except ValueError:
            raise PropcheckError(f"--seeds {text}: must be whole numbers, as in 0,1 or 0..4") from None
        if ends[1] - ends[0] >= _MOST_SEEDS:  # each is a whole scan, so this is a slip of the hand
            raise PropcheckError(f"--seeds {text}: {part} is more than {_MOST_SEEDS} seeds")
        seeds += range(ends[0], ends[1] + 1)
    return seeds


def _rule_ids(option: str, values: Sequence[str] | None) -> tuple[str, ...]:
    """Split ``--select PC201,PC202 --select PC301``; empty where the option was not given."""
    for value in values or ():
        if not value.replace(",", "").strip():  # no rule is not all rules
            raise PropcheckError(f"{option} {value!r}: names no rule; it takes ids or names, as in PC201,PC202")
    return tuple(part for value in values or () for one in value.split(",") if (part := one.strip()))
