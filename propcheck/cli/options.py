"""The options that several commands share: those of a scan, made from the table that Python's keyword arguments have too."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import shlex
import typing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from propcheck.api.options import SCAN_OPTIONS, ScanOptions, given_options, key_overrides
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.api.options import Option

# More seeds than this are a typo: each is a whole scan.
_MOST_SEEDS = 10_000


def _annotation(option: Option) -> Any:
    least, most = option.limits or (None, None)
    described = typer.Option(option.typed, metavar=option.metavar, help=option.help, min=least, max=most)
    return Annotated[option.type if option.type is bool else option.type | None, described]


def _read(values: dict[str, Any], command: str) -> ScanOptions:
    """Read the options of a scan as they were typed.

    Raises
    ------
    PropcheckError
        A value has the wrong form.
    """
    from propcheck.config.resolve import parse_override

    seeds = values["seeds"]
    return ScanOptions(
        overrides=(
            *(parse_override(text) for text in values["set"] or ()),
            *(parse_override(text, "--arg", "python.args") for text in values["args"] or ()),
            *key_overrides({**values, "seeds": seeds if seeds is None else _seeds(seeds)}, lambda option: option.typed),
        ),
        select=_rule_names("--select", values["select"]),
        ignore=_rule_names("--ignore", values["ignore"]),
        threads=values["threads"],
        given=tuple(option.typed for option in given_options(values)),
        command=command,
    )


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take its shared options as dataclasses.

    A parameter annotated :class:`ScanOptions` is replaced by one option per entry of ``SCAN_OPTIONS``; one annotated with
    another dataclass, by one option per field.
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
        parameters += _parameters(annotation)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    @functools.wraps(command)
    def wrapper(ctx: typer.Context, **values: Any) -> Any:
        line = shlex.join(["propcheck", *ctx.obj])
        parsed = {name: _group(group, values, line) for name, group in groups.items()}
        return command(**values, **parsed)

    del wrapper.__wrapped__  # typer is to see the signature below
    wrapper.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in (context, *parameters)}
    return wrapper


def _parameters(group: type[Any]) -> list[inspect.Parameter]:
    options: list[tuple[str, Any, Any]]
    if group is ScanOptions:
        options = [(option.name, False if option.type is bool else None, _annotation(option)) for option in SCAN_OPTIONS]
    else:
        hints = typing.get_type_hints(group, include_extras=True)
        options = [(field.name, field.default, hints[field.name]) for field in dataclasses.fields(group)]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, default, annotation in options
    ]


def _group(group: type[Any], values: dict[str, Any], line: str) -> Any:
    if group is ScanOptions:
        return _read({option.name: values.pop(option.name) for option in SCAN_OPTIONS}, line)
    return group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            ends = (int(first), int(last if dots else first))
        except ValueError:
            raise PropcheckError(f"--seeds {text}: must be integers, e.g. 0,1 or 0..4") from None
        if ends[1] - ends[0] >= _MOST_SEEDS:
            raise PropcheckError(f"--seeds {text}: {part} is more than {_MOST_SEEDS} seeds")
        seeds += range(ends[0], ends[1] + 1)
    return seeds


def _rule_names(option: str, values: Sequence[str] | None) -> tuple[str, ...]:
    """Split ``--select PC201,PC202 --select PC3`` at the commas; empty if the option was not given."""
    for value in values or ():
        if not value.replace(",", "").strip():  # no rule does not mean all rules
            raise PropcheckError(f"{option} {value!r}: names no rule; give ids, names or families, e.g. PC201,PC3")
    return tuple(name for value in values or () for part in value.split(",") if (name := part.strip()))
