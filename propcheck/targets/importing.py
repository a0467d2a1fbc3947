"""Import the callable or model that ``package.module:name`` or ``path/to/file.py:name`` names, and check its arguments."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError
from propcheck.targets.target import parameter_list
from propcheck.targets.user_errors import display_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


def import_target(target: str) -> object:
    """Import the object that ``target`` names.

    Raises
    ------
    PropcheckError
        If there is no such module, file or attribute.
    """
    place, _, name = target.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import_module(place)
    try:
        return getattr(module, name)
    except AttributeError:
        callables = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
        near = difflib.get_close_matches(name, callables, n=1)
        defined = [name for name, value in callables.items() if getattr(value, "__module__", None) == module.__name__]
        hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(defined) or 'no callable'}"
        raise PropcheckError(f"{display_path(place)} has no {name}; {hint}") from None


def _import_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A missing module that the user's module imports is an error of that module.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise PropcheckError(
            f"{name}: no module named {error.name}, neither installed nor in the working directory {Path.cwd()}"
        ) from None
    except TypeError as error:  # a relative name such as ".name"
        raise PropcheckError(f"{name}: {error}") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PropcheckError(f"{display_path(str(path))}: no such file")
    _add_to_path(Path.cwd())
    _add_to_path(path.parent)
    path = path.resolve()
    # Use the file's own name, so that modules it imports can import it; another name if that one is taken.
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(path):
            return loaded
        name = f"propcheck_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _add_to_path(folder: Path) -> None:
    """Put ``folder`` first on ``sys.path``, as ``python -m`` does with the working directory."""
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)


def check_arguments(function: Callable[..., Any], args: Mapping[str, Any], name: str) -> None:
    """Check that ``function`` takes the keyword arguments.

    Raises
    ------
    PropcheckError
        If it does not; the message calls the function ``name``.
    """
    try:
        function_signature = signature(function)
    except ValueError:  # a function written in C may have no signature; its call reports the error
        return
    try:
        function_signature.bind(**args)
    except TypeError as error:
        variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        names = [key for key, parameter in function_signature.parameters.items() if parameter.kind not in variadic]
        unknown = next((key for key in args if key not in names), None)
        near = difflib.get_close_matches(unknown, names, n=1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PropcheckError(
            f"{name} takes ({parameter_list(function)}): {error}{hint}; set arguments with --arg KEY=VALUE"
        ) from None
