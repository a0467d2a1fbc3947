"""The combinations of some values of some keys of a probe, each with a name that can be a directory's."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from propcheck.config.resolve import Override, parse_override
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# These name a scan and change nothing in it (a base is read before any override).
_NO_EFFECT = frozenset({"name", "description", "base"})
# Characters of a value and of a whole name: with a digest behind it a name stays within the 255 bytes of a file system.
_LONGEST_VALUE, _LONGEST_NAME = 40, 200


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and its values, in the order given.

    Attributes
    ----------
    key
        The dotted key of a probe.
    short
        The last part of it, or as many as tell it from the other axes.
    values
        An override a value.
    texts
        The values as they are shown.
    files
        The values as parts of a directory's name: all differ, also where a file system takes no notice of case.
    """

    key: str
    short: str
    values: tuple[Override, ...]
    texts: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values; ``name`` is its directory, ``labels`` say ``layers=32``, one an axis."""

    name: str
    labels: tuple[str, ...]
    overrides: tuple[Override, ...]


def read_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Read the values of ``--vary``.

    Parameters
    ----------
    texts
        ``key=value,value``: TOML values or plain words, split at commas outside brackets and quotes.

    Raises
    ------
    PropcheckError
        A text has another form, or :func:`axes` refuses it.
    """
    values_of: dict[str, tuple[Override, ...]] = {}
    for text in texts:
        written, equals, values = text.partition("=")
        if not equals:
            raise PropcheckError(f"--vary {text}: must be key=value,value, e.g. residual.placement=pre,post")
        overrides = tuple(parse_override(f"{written}={value}", "--vary") for value in _split(values))
        if overrides[0].key in values_of:
            raise PropcheckError(f"--vary {text}: {overrides[0].key} is already varied; list all its values in one --vary")
        values_of[overrides[0].key] = overrides
    return axes(values_of)


def axes(values_of: Mapping[str, tuple[Override, ...]]) -> tuple[Axis, ...]:
    """Return one axis per key.

    Parameters
    ----------
    values_of
        The values of each key, as overrides.

    Raises
    ------
    PropcheckError
        A key has no values or the same one twice, or has no effect on a scan.
    """
    if not values_of:
        raise PropcheckError("vary: name at least one key of the probe and its values")
    for key, overrides in values_of.items():
        if not overrides:
            raise PropcheckError(f"vary[{key!r}]: needs at least one value")
        if key in _NO_EFFECT or key.startswith("gate."):
            raise PropcheckError(f"{overrides[0].origin}: {key} has no effect on a scan")
        seen: set[str] = set()
        for override in overrides:
            if repr(override.value) in seen:
                raise PropcheckError(f"{override.origin}: {key} is given this value twice")
            seen.add(repr(override.value))
    keys = tuple(values_of)
    return tuple(_axis(key, short, values_of[key]) for key, short in zip(keys, _short(keys), strict=True))


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    parts = [""]
    depth, quote, escaped = 0, "", False
    for character in text:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            closes = character == quote and not escaped
            escaped = character == "\\" and quote == '"' and not escaped
            quote = "" if closes else quote
        elif character in "\"'" and (depth or not parts[-1].strip()):  # the apostrophe of a plain word is none
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        parts[-1] += character
    return parts


def _short(keys: Sequence[str]) -> list[str]:
    """Return of each key the fewest last parts that no other has as its last."""

    def tail(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    shortened = []
    for key in keys:
        amounts = range(1, key.count(".") + 2)
        alone = (n for n in amounts if all(tail(other, n) != tail(key, n) for other in keys if other != key))
        shortened.append(tail(key, next(alone, amounts[-1])))
    return shortened


def _axis(key: str, short: str, values: tuple[Override, ...]) -> Axis:
    texts = tuple(_shown(override.value) for override in values)
    folded = [text.casefold() for text in texts]
    files = tuple(
        _file_name(text, repr(override.value), _LONGEST_VALUE, alone=folded.count(text.casefold()) == 1)
        for text, override in zip(texts, values, strict=True)
    )
    return Axis(key, short, values, texts, files)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))


def _file_name(text: str, whole: str, longest: int, *, alone: bool) -> str:
    """Return ``text`` for a file's name; a digest of ``whole`` tells those apart that would be the same."""
    safe = re.sub(r"[^A-Za-z0-9._+=,-]+" if longest == _LONGEST_NAME else r"[^A-Za-z0-9._+-]+", "-", text)
    if safe == text and len(safe) <= longest and alone:
        return safe
    return f"{safe[:longest].strip('-')}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def grid(axes: Sequence[Axis]) -> tuple[Cell, ...]:
    """Return every combination of the values, the last axis fastest; no two have one name."""
    cells = []
    for choice in itertools.product(*(range(len(axis.values)) for axis in axes)):
        chosen = list(zip(axes, choice, strict=True))
        name = ",".join(f"{axis.short}={axis.files[i]}" for axis, i in chosen)
        cells.append(
            Cell(
                name=_file_name(name, name, _LONGEST_NAME, alone=True),
                labels=tuple(f"{axis.short}={axis.texts[i]}" for axis, i in chosen),
                overrides=tuple(axis.values[i] for axis, i in chosen),
            )
        )
    return tuple(cells)
