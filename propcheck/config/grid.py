"""Parse ``--vary`` and list the combinations of the values for a sweep, each with a name that can be a directory's."""

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

# These keys name a scan and change nothing in it (a base is read before any override).
_NO_EFFECT = frozenset({"name", "description", "base"})
# The longest value and directory name: with a digest appended, a name stays within the 255 bytes of a file system.
_MAX_VALUE, _MAX_NAME = 40, 200
_UNSAFE_IN_VALUE, _UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._+-]+"), re.compile(r"[^A-Za-z0-9._+=,-]+")


@dataclass(frozen=True, slots=True)
class Axis:
    """One key and its values, in the order of the option.

    Attributes
    ----------
    key
        The dotted key of a probe.
    short
        The last part of the key, or as many parts as distinguish it from the other axes.
    values
        One override per value.
    texts
        The values as they are displayed.
    slugs
        The values as parts of a directory name; they differ even on a file system that ignores case.
    """

    key: str
    short: str
    values: tuple[Override, ...]
    texts: tuple[str, ...]
    slugs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination of values: the name of its directory, one label such as ``layers=32`` per axis, and its overrides."""

    name: str
    labels: tuple[str, ...]
    overrides: tuple[Override, ...]


def read_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """Read the values of ``--vary``.

    Parameters
    ----------
    texts
        ``key=value,value``: TOML values or plain words, split at the commas outside brackets and quotes.

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
    return tuple(_axis(key, short, values_of[key]) for key, short in zip(keys, _short_keys(keys), strict=True))


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
        elif character in "\"'" and (depth or not parts[-1].strip()):  # not the apostrophe inside a plain word
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        parts[-1] += character
    return parts


def _short_keys(keys: Sequence[str]) -> list[str]:
    """Return for each key the fewest last parts that distinguish it from the other keys."""

    def tail(key: str, parts: int) -> str:
        return ".".join(key.split(".")[-parts:])

    short_keys = []
    for key in keys:
        lengths = range(1, key.count(".") + 2)
        unique = (n for n in lengths if all(tail(other, n) != tail(key, n) for other in keys if other != key))
        short_keys.append(tail(key, next(unique, lengths[-1])))
    return short_keys


def _axis(key: str, short: str, values: tuple[Override, ...]) -> Axis:
    texts = tuple(_display(override.value) for override in values)
    folded = [text.casefold() for text in texts]
    slugs = []
    for text, override in zip(texts, values, strict=True):
        slug = _UNSAFE_IN_VALUE.sub("-", text)
        if slug != text or len(slug) > _MAX_VALUE or folded.count(text.casefold()) > 1:
            slug = _with_digest(slug[:_MAX_VALUE], repr(override.value))
        slugs.append(slug)
    return Axis(key, short, values, texts, tuple(slugs))


def _display(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False, separators=(",", ":"))


def _with_digest(text: str, content: str) -> str:
    """Append a digest of ``content``, so that texts that became equal stay distinct."""
    return f"{text.strip('-')}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def grid(axes: Sequence[Axis]) -> tuple[Cell, ...]:
    """Return every combination of the values, the last axis varying fastest; all names differ."""
    cells = []
    for indices in itertools.product(*(range(len(axis.values)) for axis in axes)):
        values = list(zip(axes, indices, strict=True))
        full_name = ",".join(f"{axis.short}={axis.slugs[i]}" for axis, i in values)
        name = _UNSAFE_IN_NAME.sub("-", full_name)
        if name != full_name or len(name) > _MAX_NAME:
            name = _with_digest(name[:_MAX_NAME], full_name)
        cells.append(
            Cell(
                name=name,
                labels=tuple(f"{axis.short}={axis.texts[i]}" for axis, i in values),
                overrides=tuple(axis.values[i] for axis, i in values),
            )
        )
    return tuple(cells)
