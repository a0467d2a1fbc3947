"""The keys that a configuration schema knows: their list, and what to say when a file breaks it.

Works on any tree of pydantic sections; the probe schema and the ``[tool.propcheck]`` table are two of them.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: its dotted name, what a value must be, its default as TOML ("" for none) and what it does."""

    name: str
    accepts: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class Table:
    """One section: its dotted name ("" for the top level), what it is about, and its keys."""

    name: str
    description: str
    keys: tuple[Key, ...]


def tables(schema: type[BaseModel], name: str = "", description: str = "") -> Iterator[Table]:
    """Yield the sections of ``schema`` in file order, each before those inside it."""
    own, inner = [], []
    for key, field in schema.model_fields.items():
        dotted = _join(name, _written(key, field))
        section, repeated = _section(field)
        if section is not None:
            inner.append((section, dotted + (".PCnnn" if repeated else ""), field.description or ""))
        else:
            own.append(Key(dotted, accepts(field.annotation, field.metadata), _default(field), field.description or ""))
    yield Table(name, description, tuple(own))
    for section, dotted, about in inner:
        yield from tables(section, dotted, about)


def accepts(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Say in words which values ``annotation`` takes, e.g. ``an integer >= 1``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(accepts(kind, metadata) for kind in arguments if kind is not type(None))
    if origin is typing.Annotated:
        return accepts(arguments[0], [*metadata, *arguments[1:]])
    if origin is typing.Literal:
        return "one of " + ", ".join(_toml(value) for value in arguments)
    if origin is tuple:
        some = "a list of at least one" if any(getattr(rule, "min_length", 0) for rule in metadata) else "a list"
        return f"{some}, each {accepts(arguments[0])}"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}.get(annotation, "a table")
    rules = [rule for one in metadata for rule in (one.metadata if isinstance(one, FieldInfo) else (one,))]
    bounds = [
        f"{sign} {value if isinstance(value, int) else format(value, 'g')}"
        for rule in rules
        for name, sign in _BOUNDS.items()
        if isinstance(value := getattr(rule, name, None), int | float)
    ]
    return " ".join((words, " and ".join(bounds))).rstrip()


def explain(error: ValidationError, schema: type[BaseModel]) -> tuple[tuple[str, ...], str]:
    """Turn pydantic's report into the dotted key at fault and one line that says what would be right.

    Unknown keys come first, since a value elsewhere is often wrong because of them.

    Returns
    -------
    key
        The parts of the key; empty when the fault lies between sections.
    message
        One line without the file's name.
    """
    faults = error.errors(include_url=False)
    fault = min(faults, key=lambda one: one["type"] != "extra_forbidden")
    where = _names(fault["loc"])
    # A list whose every item is refused is reported as too short as well: count keys, not reports.
    others = {_names(one["loc"]) for one in faults} - {where}
    return where, _message(fault, where, schema) + (f" (and {len(others)} more)" if others else "")


def _names(location: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(part for part in location if isinstance(part, str) and part != "[key]")


def _message(fault: Mapping[str, Any], where: tuple[str, ...], schema: type[BaseModel]) -> str:
    dotted = ".".join(where)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {dotted}; {_suggestion(where, schema)}"
    if fault["loc"] and fault["loc"][-1] == "[key]":
        if fault["type"] == "literal_error":
            return f"unknown key {dotted}; it must be {fault['ctx']['expected']}"
        return f"{dotted} is not a rule; a rule is PC and three digits, as in PC204"
    if fault["type"] == "value_error":
        reason = str(fault["ctx"]["error"])
        field = _find(schema, where)
        value = "" if field is None or _section(field)[0] else f" = {_toml(fault['input'])}"
        return f"{dotted}{value}: {reason}" if dotted else reason
    field = _find(schema, where)
    index = next((part for part in fault["loc"] if isinstance(part, int)), None)
    if field is None:
        right = "a table"
    elif index is None:
        right = accepts(field.annotation, field.metadata)
    else:
        dotted += f"[{index}]"
        right = accepts(typing.get_args(field.annotation)[0])
    hint = ""
    if right.startswith("one of ") and isinstance(fault["input"], str):
        near = difflib.get_close_matches(_toml(fault["input"]), right.removeprefix("one of ").split(", "), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
    return f"{dotted} = {_toml(fault['input'])} must be {right}{hint}".removeprefix(" = ")


def _suggestion(where: tuple[str, ...], schema: type[BaseModel]) -> str:
    """Name the right key: the same name in another section, a near name here, a near name anywhere, or all names here."""
    *section, name = where
    places: dict[str, list[str]] = {}  # key name -> the sections that have it
    siblings: list[str] = []
    for parent, key in _all_keys(schema):
        places.setdefault(key, []).append(parent)
        if parent == _pattern(".".join(section)):
            siblings.append(key)
    if name in places:
        return f"{name} belongs " + " or ".join(f"in [{place}]" if place else "at the top level" for place in places[name])
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {_join('.'.join(section), near[0])}?"
    if near := difflib.get_close_matches(name, places, n=1, cutoff=0.75):
        return "did you mean " + " or ".join(_join(place, near[0]) for place in places[near[0]]) + "?"
    here = f"[{'.'.join(section)}]" if section else "a file"
    return f"{here} takes {', '.join(siblings)}"


def _all_keys(schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    for table in tables(schema):
        parent, _, name = table.name.rpartition(".")
        if name and name != "PCnnn":
            yield parent, name
        elif name:
            grandparent, _, plain = parent.rpartition(".")
            yield grandparent, plain
        for key in table.keys:
            yield table.name, key.name.rpartition(".")[2]


def _pattern(section: str) -> str:
    """Name a section as ``tables`` does: every rule is ``PCnnn``."""
    return "rules.PCnnn" if section.startswith("rules.") else section


def _find(schema: type[BaseModel], where: Sequence[str]) -> FieldInfo | None:
    field: FieldInfo | None = None
    section: type[BaseModel] | None = schema
    parts = iter(where)
    for part in parts:
        if section is None:
            return None
        field = next((one for key, one in section.model_fields.items() if _written(key, one) == part), None)
        if field is None:
            return None
        section, repeated = _section(field)
        if repeated:
            next(parts, None)  # the rule's id; its table has no field of its own
    return field


def _section(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """Return the section class that ``field`` holds, if any, and whether it holds one per rule."""
    kind = field.annotation
    repeated = typing.get_origin(kind) is dict
    if repeated:
        kind = typing.get_args(kind)[1]
    return (kind, repeated) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, False)


def _written(key: str, field: FieldInfo) -> str:
    return field.alias or key


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else _toml(value)


def _toml(value: Any) -> str:
    """Write a value as TOML would (numbers, strings, booleans and lists look the same in JSON), at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def page(schema: type[BaseModel]) -> str:
    """Write the reference of every key in Markdown, a section of the file after the other."""
    lines = [
        "# Keys of a probe file",
        "",
        "A probe is a TOML file. Every key is optional; `--set KEY=VALUE` on the command line overrides one.",
    ]
    for table in tables(schema):
        if table.name:
            lines += ["", f"## [{table.name}]"]
        if table.description:
            lines += ["", table.description]
        lines += [""] if table.keys else []
        for key in table.keys:
            default = f"; default `{key.default}`" if key.default else ""
            lines.append(f"- `{key.name}` ({key.accepts}{default}): {key.description}")
    return "\n".join(lines) + "\n"
