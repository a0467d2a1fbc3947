"""The file that stands for a target, for annotations to point at; nothing is imported to find it."""

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
    """A file relative to the working directory, with forward slashes, and a line of it from 1."""

    file: str
    line: int = 1


def location_of(target: str) -> Location | None:
    """Find the file that ``target`` names.

    Parameters
    ----------
    target
        As the user named it (``Run.target``).

    Returns
    -------
    Location or None
        The probe file, the ``config.json``, or the definition of the callable (line 1 of its file where that does not define
        it). None where there is no such file below the working directory: a probe bundled with an installed propcheck, an
        installed package, a run that was made elsewhere.
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
    # As it was named first: a link that lies in the working directory is what the user knows.
    for file, folder in ((Path(os.path.abspath(path)), Path.cwd()), (path.resolve(), Path.cwd().resolve())):  # noqa: PTH100
        if file.is_relative_to(folder):
            return Location(file.relative_to(folder).as_posix(), 1 if name is None else _line(path, name))
    return None


def _module_file(name: str) -> Path | None:
    """Find a module as Python would, in the working directory first; not what is installed."""
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    for root in (Path.cwd(), *map(Path, sys.path)):
        stem = root.joinpath(*name.split("."))
        for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if file.is_file():
                return None if "site-packages" in file.parts else file
    return None


def _line(path: Path, name: str) -> int:
    """Give the line that defines ``name`` in a module, the last one as the module's own run has it; 1 where none does."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):  # it was not this file that ran
        return 1
    return max((line for found, line in _definitions(tree.body) if found == name), default=1)


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    """Give each name that is defined at the top level, also below an ``if`` or ``try``, with its line."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name, statement.lineno
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        yield from ((one.id, statement.lineno) for one in targets if isinstance(one, ast.Name))
        for block in ("body", "orelse", "finalbody"):
            yield from _definitions(getattr(statement, block, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _definitions(handler.body)
