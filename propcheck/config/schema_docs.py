"""Document the keys of a configuration schema, and explain in one line why a file violates it.

Works on any tree of pydantic sections, such as the probe schema and the ``[tool.propcheck]`` table.
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

_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


@dataclass(frozen=True, slots=True)
class Key:
    """One key: dotted name, accepted values in words, default as TOML ("" for none), description."""

    name: str
    accepts: str
    default: str
    description: str


@dataclass(frozen=True, slots=True)
class Table:
    """One section: dotted name ("" for the top level), description, keys."""

    name: str
    description: str
    keys: tuple[Key, ...]


def tables(schema: type[BaseModel], name: str = "", description: str = "") -> Iterator[Table]:
    """Yield the sections of ``schema`` in file order, each before the sections inside it."""
    keys, subsections = [], []
    for field_name, field in schema.model_fields.items():
        dotted = _join(name, _key(field_name, field))
        section, per_rule = _section(field)
        if section is not None:
            subsections.append((section, dotted + (".PCnnn" if per_rule else ""), field.description or ""))
        else:
            keys.append(Key(dotted, accepts(field.annotation, field.metadata), _default(field), field.description or ""))
    yield Table(name, description, tuple(keys))
    for section, dotted, text in subsections:
        yield from tables(section, dotted, text)


def accepts(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the values that ``annotation`` accepts, e.g. ``an integer >= 1``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(accepts(kind, metadata) for kind in arguments if kind is not type(None))
    if origin is typing.Annotated:
        return accepts(arguments[0], [*metadata, *arguments[1:]])
    if origin is typing.Literal:
        return "one of " + ", ".join(_toml(value) for value in arguments)
    if origin is tuple:
        items = "a list of at least one" if any(getattr(rule, "min_length", 0) for rule in metadata) else "a list"
        return f"{items}, each {accepts(arguments[0])}"
    kind = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}.get(annotation, "a table")
    return f"{kind} {_bounds(metadata)}".rstrip()


def _bounds(metadata: Sequence[Any]) -> str:
    rules = [rule for item in metadata for rule in (item.metadata if isinstance(item, FieldInfo) else (item,))]
    return " and ".join(
        f"{sign} {bound if isinstance(bound, int) else format(bound, 'g')}"
        for rule in rules
        for name, sign in _SIGNS.items()
        if isinstance(bound := getattr(rule, name, None), int | float)
    )


def explain(error: ValidationError, schema: type[BaseModel]) -> tuple[tuple[str, ...], str]:
    """Turn pydantic's report into the key at fault and one line that says what would be right.

    Unknown keys are reported first, since they are often the reason for a wrong value elsewhere.

    Returns
    -------
    key
        The parts of the dotted key; empty if the fault lies between sections.
    message
        One line without the file's name.
    """
    faults = error.errors(include_url=False)
    fault = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")
    key = _key_at(fault["loc"])
    # Count keys, not faults: a list with no valid item is also reported as too short.
    others = {_key_at(fault["loc"]) for fault in faults} - {key}
    return key, _message(fault, key, schema) + (f" (and {len(others)} more)" if others else "")


def _key_at(location: Sequence[str | int]) -> tuple[str, ...]:
    return tuple(part for part in location if isinstance(part, str) and part != "[key]")


def _message(fault: Mapping[str, Any], key: tuple[str, ...], schema: type[BaseModel]) -> str:
    dotted = ".".join(key)
    if fault["type"] == "extra_forbidden":
        return f"unknown key {dotted}; {_suggestion(key, schema)}"
    if fault["loc"] and fault["loc"][-1] == "[key]":
        if fault["type"] == "literal_error":
            return f"unknown key {dotted}; it must be {fault['ctx']['expected']}"
        return f"{dotted} is not a rule id; a rule id is PC and three digits, as in PC204"
    if fault["type"] != "value_error":
        return _expected(fault, key, schema)
    reason = str(fault["ctx"]["error"])  # of a validator of ours
    field = _find(schema, key)
    value = "" if field is None or _section(field)[0] else f" = {_toml(fault['input'])}"
    return f"{dotted}{value}: {reason}" if dotted else reason


def _expected(fault: Mapping[str, Any], key: tuple[str, ...], schema: type[BaseModel]) -> str:
    """Return ``key = value must be ...`` for a value of the wrong type or out of bounds."""
    dotted = ".".join(key)
    field = _find(schema, key)
    index = next((part for part in fault["loc"] if isinstance(part, int)), None)
    if field is None:
        expected = "a table"
    elif index is None:
        expected = accepts(field.annotation, field.metadata)
    else:
        dotted += f"[{index}]"
        expected = accepts(typing.get_args(field.annotation)[0])
    hint = ""
    if expected.startswith("one of ") and isinstance(fault["input"], str):
        near = difflib.get_close_matches(_toml(fault["input"]), expected.removeprefix("one of ").split(", "), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
    return f"{dotted} = {_toml(fault['input'])} must be {expected}{hint}".removeprefix(" = ")


def _suggestion(key: tuple[str, ...], schema: type[BaseModel]) -> str:
    """Suggest, in this order: this name in another section, a similar name here, a similar name elsewhere, all names here."""
    *parents, name = key
    section = ".".join(parents)
    sections_of: dict[str, list[str]] = {}  # key name -> the sections that have it
    siblings: list[str] = []
    for parent, known in _all_keys(schema):
        sections_of.setdefault(known, []).append(parent)
        if parent == _documented_section(section):
            siblings.append(known)
    if name in sections_of:
        return f"{name} belongs " + " or ".join(
            f"in [{parent}]" if parent else "at the top level" for parent in sections_of[name]
        )
    if near := difflib.get_close_matches(name, siblings, n=1):
        return f"did you mean {_join(section, near[0])}?"
    if near := difflib.get_close_matches(name, sections_of, n=1, cutoff=0.75):
        return "did you mean " + " or ".join(_join(parent, near[0]) for parent in sections_of[near[0]]) + "?"
    return f"{f'[{section}]' if section else 'the top level'} has the keys {', '.join(siblings)}"


def _all_keys(schema: type[BaseModel]) -> Iterator[tuple[str, str]]:
    """Yield the section and name of every key and section."""
    for table in tables(schema):
        parent, _, name = table.name.removesuffix(".PCnnn").rpartition(".")
        if name:
            yield parent, name
        for key in table.keys:
            yield table.name, key.name.rpartition(".")[2]


def _documented_section(section: str) -> str:
    """Return the name of a section in ``tables``, where ``rules.PCnnn`` stands for every rule."""
    return "rules.PCnnn" if section.startswith("rules.") else section


def _find(schema: type[BaseModel], key: Sequence[str]) -> FieldInfo | None:
    field: FieldInfo | None = None
    section: type[BaseModel] | None = schema
    parts = iter(key)
    for part in parts:
        if section is None:
            return None
        field = next((field for name, field in section.model_fields.items() if _key(name, field) == part), None)
        if field is None:
            return None
        section, per_rule = _section(field)
        if per_rule:
            next(parts, None)  # the rule's id has no field
    return field


def _section(field: FieldInfo) -> tuple[type[BaseModel] | None, bool]:
    """Return the section class of ``field``, if it is a section, and whether there is one section per rule."""
    kind = field.annotation
    per_rule = typing.get_origin(kind) is dict
    if per_rule:
        kind = typing.get_args(kind)[1]
    return (kind, per_rule) if isinstance(kind, type) and issubclass(kind, BaseModel) else (None, False)


def _key(name: str, field: FieldInfo) -> str:
    return field.alias or name


def _join(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value is None else _toml(value)


def _toml(value: Any) -> str:
    """Format a value as TOML, at most 60 characters; numbers, strings, booleans and lists look the same in JSON."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def page(schema: type[BaseModel]) -> str:
    """Return the Markdown reference of all keys, section by section."""
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
