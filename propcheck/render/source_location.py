"""Find the source file and line of a target, for annotations; never imports the target."""

from __future__ import annotations

import ast
import os
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from propcheck.config.resolve import bundled_probes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclass(frozen=True, slots=True)
class Location:
    """A file relative to the working directory, with forward slashes, and a line number from 1."""

    file: str
    line: int = 1


def location_of(target: str) -> Location | None:
    """Return the source location of a target.

    Parameters
    ----------
    target
        The target, as the user named it (``Run.target``).

    Returns
    -------
    Location or None
        The probe file, the ``config.json``, or the definition of the callable (line 1 of its file if it is defined elsewhere).
        None if the file is not below the working directory: a probe bundled with an installed propcheck, an installed package,
        or a run from another machine.
    """
    bundled = bundled_probes()
    if target in bundled:
        return _located(bundled[target])
    path = Path(target)
    if path.is_dir():
        return _located(path / "config.json")
    place, colon, name = target.rpartition(":")
    if not colon or path.exists():
        return _located(path)
    file = Path(place) if place.endswith(".py") else _module_file(place)
    return None if file is None else _located(file, name)


def _located(path: Path, name: str | None = None) -> Location | None:
    if not path.is_file():
        return None
    # The path as given comes first: the user knows a link in the working directory, not its destination.
    for file, folder in ((Path(os.path.abspath(path)), Path.cwd()), (path.resolve(), Path.cwd().resolve())):  # noqa: PTH100
        if file.is_relative_to(folder):
            return Location(file.relative_to(folder).as_posix(), 1 if name is None else _line(path, name))
    return None


def _module_file(name: str) -> Path | None:
    """Find a module as Python would, in the working directory first; None for an installed package."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    for root in (Path.cwd(), *map(Path, sys.path)):
        stem = root.joinpath(*name.split("."))
        for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if file.is_file():
                return None if "site-packages" in file.parts else file
    return None


def _line(path: Path, name: str) -> int:
    """Return the line of the last definition of ``name`` in a module, the one that is in effect; 1 if there is none."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # another file was run
        return 1
    return max((line for defined, line in _definitions(tree.body) if defined == name), default=1)


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Yield each name defined at the top level, also below an ``if`` or ``try``, with its line."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement.lineno
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from ((target.id, statement.lineno) for target in targets if isinstance(target, ast.Name))
        for block in ("body", "orelse", "finalbody"):
            yield from _definitions(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _definitions(handler.body)
