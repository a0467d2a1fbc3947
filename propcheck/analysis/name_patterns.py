"""Group parameters whose names differ only in numbers, ``blocks.*.mixer.A_log``, and name them in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count, places
from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from propcheck.records import ParameterRecord

# Number of patterns that are reported one by one; more of them become a single finding.
_MAX_PATTERNS = 5


def path(record: ParameterRecord) -> str:
    """Return the name of a parameter; for tied parameters, the first name."""
    return record.name.partition(" = ")[0]


def pattern(name: str) -> str:
    """Replace each part of a dotted name that is a number by ``*``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def numbers(name: str) -> tuple[int, ...]:
    """Return the parts of a dotted name that are numbers."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def families(records: Iterable[ParameterRecord]) -> list[list[ParameterRecord]]:
    """Group parameters of one pattern, role and shape, each group in the order of the numbers in its names."""
    groups: dict[object, list[ParameterRecord]] = {}
    for record in records:
        groups.setdefault((pattern(path(record)), record.role, record.shape), []).append(record)
    return [sorted(members, key=lambda record: numbers(path(record))) for members in groups.values()]


def folded(records: Iterable[ParameterRecord]) -> list[list[ParameterRecord]]:
    """Group parameters with one fault into findings: one per pattern, or a single one if there are many patterns."""
    groups: dict[str, list[ParameterRecord]] = {}
    for record in records:
        groups.setdefault(pattern(path(record)), []).append(record)
    if len(groups) > _MAX_PATTERNS:
        return [[record for members in groups.values() for record in members]]
    return list(groups.values())


def subject(records: Sequence[ParameterRecord]) -> str:
    """Return ``The parameter a.b``, ``The 48 parameters blocks.*.a.b (blocks 0 to 62)``, or the first names of many."""
    kinds = {record.kind for record in records}
    noun = kinds.pop() if len(kinds) == 1 else "tensor"
    if len(records) == 1:
        return f"The {noun} {records[0].name}"
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(pattern(path(record)), []).append(path(record))
    more = f" and {count(len(names) - _MAX_PATTERNS, 'more name')}" if len(names) > _MAX_PATTERNS else ""
    listed = f"{', '.join(_common(alike) for alike in list(names.values())[:_MAX_PATTERNS])}{more}"
    return f"The {count(len(records), noun)} {listed}{_blocks(records)}"


def _common(names: Sequence[str]) -> str:
    """Replace each part in which names of one pattern differ by ``*``."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _blocks(records: Sequence[ParameterRecord]) -> str:
    blocks = [record.block for record in records if record.block is not None]
    return f" ({places('block', blocks)})" if blocks else ""


def verb(records: Sequence[ParameterRecord], singular: str, plural: str) -> str:
    """Return the singular or plural form of a verb, to match :func:`subject`."""
    return singular if len(records) == 1 else plural


def place(record: ParameterRecord) -> Place:
    """Return the place of a parameter."""
    return Place(block=record.block, sublayer=record.sublayer, parameter=record.name)
