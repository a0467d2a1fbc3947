"""Parameters that are the same in many places: one name but for its numbers, ``blocks.*.mixer.A_log``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.formatting import count, places
from propcheck.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from propcheck.records import ParameterRecord

# Names of one fault that are listed by themselves; more of them are one finding together.
_MOST = 5


def path(record: ParameterRecord) -> str:
    """Give the first name of a parameter, of several that are tied."""
    return record.name.partition(" = ")[0]


def pattern(name: str) -> str:
    """Write ``*`` for each part of a dotted name that is a number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def numbers(name: str) -> tuple[int, ...]:
    """Give the parts of a dotted name that are numbers."""
    return tuple(int(part) for part in name.split(".") if part.isdecimal())


def families(records: Iterable[ParameterRecord]) -> list[list[ParameterRecord]]:
    """Put together what has one pattern, role and shape, in the order of the numbers in its names."""
    found: dict[object, list[ParameterRecord]] = {}
    for record in records:
        found.setdefault((pattern(path(record)), record.role, record.shape), []).append(record)
    return [sorted(members, key=lambda record: numbers(path(record))) for members in found.values()]


def folded(records: Iterable[ParameterRecord]) -> list[list[ParameterRecord]]:
    """Put together what has one fault and so is one finding: one pattern each, or everything where patterns are many."""
    found: dict[str, list[ParameterRecord]] = {}
    for record in records:
        found.setdefault(pattern(path(record)), []).append(record)
    if len(found) > _MOST:
        return [[record for members in found.values() for record in members]]
    return list(found.values())


def subject(records: Sequence[ParameterRecord]) -> str:
    """Write ``The parameter a.b``, or ``The 48 parameters blocks.*.a.b (blocks 0 to 62)``, or the first names of many."""
    kinds = {record.kind for record in records}
    noun = kinds.pop() if len(kinds) == 1 else "tensor"
    if len(records) == 1:
        return f"The {noun} {records[0].name}"
    alike: dict[str, list[str]] = {}
    for record in records:
        alike.setdefault(pattern(path(record)), []).append(path(record))
    more = f" and {count(len(alike) - _MOST, 'more name')}" if len(alike) > _MOST else ""
    listed = f"{', '.join(_common(names) for names in list(alike.values())[:_MOST])}{more}"
    return f"The {count(len(records), noun)} {listed}{_blocks(records)}"


def _common(names: Sequence[str]) -> str:
    """Write ``*`` for each part in which names of one pattern differ: a single name stays as it is."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _blocks(records: Sequence[ParameterRecord]) -> str:
    blocks = [record.block for record in records if record.block is not None]
    return f" ({places('block', blocks)})" if blocks else ""


def verb(records: Sequence[ParameterRecord], one: str, many: str) -> str:
    """Choose the form of a verb that goes with :func:`subject`."""
    return one if len(records) == 1 else many


def place(record: ParameterRecord) -> Place:
    """Name a parameter as a place."""
    return Place(block=record.block, sublayer=record.sublayer, parameter=record.name)
