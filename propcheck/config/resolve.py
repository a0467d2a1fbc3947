"""Gather the keys of a probe: from what TARGET names, the probe's base, and the overrides of the command line.

The keys are plain dictionaries here; ``propcheck.config.probe`` validates them. This module does not import torch.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.errors import PropcheckError
from propcheck.records import PATH_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Sequence

# The sections that only the reference decoder has.
DECODER_SECTIONS = ("model", "residual", "init")

_CALLABLE = "package.module:callable or path/to/file.py:callable"


@dataclass(frozen=True, slots=True)
class Override:
    """A value for one key; ``origin`` is the option that set it, for messages."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """The keys that a target sets; ``origin`` is its file, or the target itself, for messages."""

    origin: str
    keys: dict[str, Any]


def read_target(target: str) -> Source:
    """Read the keys that a target sets.

    Parameters
    ----------
    target
        The name of a bundled probe; a probe file; a Hugging Face ``config.json`` or a folder that holds one;
        ``package.module:callable`` or ``path/to/file.py:callable``.

    Raises
    ------
    PropcheckError
        If it is none of these, or a file cannot be read.
    """
    bundled = bundled_probes()
    path = Path(target)
    if target in bundled:
        return _read_probe(bundled[target])
    if path.is_dir() or path.suffix == ".json":
        return _huggingface_source(target, path)
    if path.suffix == ".py":
        raise PropcheckError(f"{target}: name the callable that returns the model, as in {target}:build")
    if ":" in target and not path.exists():
        return _python_source(target)
    if path.suffix == ".toml" or path.exists():
        return _read_probe(path)
    near = difflib.get_close_matches(target, bundled, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise PropcheckError(
        f"{target}: no such file or bundled probe{hint} (bundled: {', '.join(bundled)}; a config.json or module:callable also "
        "works)"
    )


def _huggingface_source(target: str, path: Path) -> Source:
    if path.is_dir() and not (path / "config.json").exists():
        raise PropcheckError(f"{target}: this folder has no config.json")
    folder = path if path.is_dir() else path.parent
    name = folder.resolve().name if path.is_dir() or path.name == "config.json" else path.stem
    return Source(target, {"name": _directory_name(name), "huggingface": {"config": str(path.absolute())}})


def _python_source(target: str) -> Source:
    module, _, name = target.rpartition(":")
    if not module or not name.isidentifier():
        raise PropcheckError(f"{target}: must be {_CALLABLE}")
    return Source(target, {"name": python_name(target), "python": {"target": _anchored(Path.cwd(), "target", target)}})


def python_name(target: str) -> str:
    """Return ``module-callable`` for ``package.module:callable``, ``file-callable`` for ``path/to/file.py:callable``."""
    module, _, name = target.rpartition(":")
    last = Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
    return _directory_name(f"{last}-{name}")


def bundled_probes() -> dict[str, Path]:
    """Return the files of the bundled probes, by name."""
    package = Path(__file__).parent.parent
    # A wheel holds the probes inside the package; a source checkout has them in a folder at the top, where people see them.
    folder = package / "_probes" if (package / "_probes").is_dir() else package.parent / "probes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def parse_override(text: str, option: str = "--set", section: str = "") -> Override:
    """Parse a ``key=value`` override.

    Parameters
    ----------
    text
        A dotted key and a TOML value; a plain word needs no quotes.
    option
        The option that the text was given to.
    section
        The section of the key, for an option that sets keys of one section only.

    Raises
    ------
    PropcheckError
        If the text does not have this form.
    """
    origin = f"{option} {text}"
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")) or (section and not key.isidentifier()):
        example = "width=64" if section else "residual.placement=post"
        raise PropcheckError(f"{origin}: must be key=value, as in {example}")
    if not value:
        raise PropcheckError(f"{origin}: the value after = is missing")
    if section:
        key = f"{section}.{key}"
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        # A plain word needs no quotes; a list, table or quoted string must be valid TOML.
        if value[0] in "[{\"'" or "\n" in value:
            raise PropcheckError(f'{origin}: {value} is not a TOML value; strings in a list need quotes: ["a"]') from None
        return Override(key, value, origin)
    if set(parsed) != {"value"}:
        raise PropcheckError(f"{origin}: must set one key only")
    return Override(key, parsed["value"], origin)


def apply_override(data: dict[str, Any], override: Override) -> None:
    """Set the override's value in ``data``, in place."""
    *sections, key = override.key.split(".")
    table = data
    for depth, name in enumerate(sections, start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise PropcheckError(f"{override.origin}: {'.'.join(sections[:depth])} is a value, not a table")
    is_path = len(sections) == 1 and key in PATH_SETTINGS.get(sections[0], ()) and isinstance(override.value, str)
    table[key] = _anchored(Path.cwd(), key, override.value) if is_path else override.value


def check_target_kind(data: dict[str, Any], overrides: Sequence[Override], origin: str) -> None:
    """Check that all keys belong to one kind of target.

    Parameters
    ----------
    data
        The keys, overrides included.
    overrides, origin
        The options and the file or target that set them, for the message.

    Raises
    ------
    PropcheckError
        If keys of two kinds of target are mixed, or the section of the target does not name it.
    """
    targets = [name for name in ("huggingface", "python") if name in data]
    decoder_sections = [name for name in DECODER_SECTIONS if name in data]

    def origin_of(section: str) -> str:
        return next((override.origin for override in overrides if override.key.split(".")[0] == section), origin)

    if "python" in data and _lacks(data["python"], "target", "args"):
        instead = "; set a key of the config with --set huggingface.overrides.KEY=VALUE" if "huggingface" in data else ""
        raise PropcheckError(f"{origin_of('python')}: arguments apply to {_CALLABLE} only{instead}")
    if "huggingface" in data and _lacks(data["huggingface"], "config", "overrides"):
        raise PropcheckError(f"{origin_of('huggingface')}: [huggingface] needs config, the path of a config.json")
    if len(targets) > 1:
        raise PropcheckError(f"{origin_of(targets[1])}: [huggingface] and [python] are two targets; remove one")
    if targets and decoder_sections:
        section, target = decoder_sections[0], targets[0]
        instead = {"huggingface": "--set huggingface.overrides.KEY=VALUE", "python": "--arg KEY=VALUE"}[target]
        raise PropcheckError(
            f"{origin_of(section)}: [{section}] describes the reference decoder and cannot be combined with [{target}]; use "
            f"{instead} to change that target"
        )


def _lacks(section: Any, key: str, optional: str) -> bool:
    """Return whether a section holds nothing but its optional key; other faults are left to the schema's better messages."""
    return isinstance(section, dict) and not section.get(key) and not section.keys() - {key, optional}


def _directory_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "probe"


def _read_probe(path: Path) -> Source:
    keys = _with_base(path, _read_keys(path), (path.resolve(),))
    keys.setdefault("name", _directory_name(path.stem))
    return Source(str(path), keys)


def _with_base(path: Path, data: dict[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return ``data`` with defaults from the probe that its ``base`` names; ``seen`` are the files on the way here."""
    base = data.get("base", "")
    if not base or not isinstance(base, str):
        return data
    bundled = bundled_probes()
    base_path = bundled[base] if base in bundled else path.parent / base
    if base_path.suffix != ".toml" and not base_path.exists():
        near = difflib.get_close_matches(base, bundled, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PropcheckError(f"{path}: base = {base!r}: {base_path}: no such file or bundled probe{hint}")
    if base_path.resolve() in seen:
        raise PropcheckError(f"{path}: base = {base!r}: a probe cannot be its own base")
    try:
        base_data = _read_keys(base_path)
    except PropcheckError as error:
        raise PropcheckError(f"{path}: base = {base!r}: {error}") from error
    merged = _merged(_with_base(base_path, base_data, (*seen, base_path.resolve())), data)
    return {**merged, "base": str(base_path) if base not in bundled else base}


def _merged(base: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` over ``base``, section by section; the name and description of ``base`` are not inherited."""
    result = {key: value for key, value in base.items() if key not in ("name", "description")}
    for key, value in data.items():
        tables = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if tables else value
    return result


def _read_keys(path: Path) -> dict[str, Any]:
    """Read a TOML file; its paths become relative to the working directory."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise PropcheckError(f"{path}: not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise PropcheckError(f"{path}: not TOML: not UTF-8 text") from error
    except OSError as error:
        raise PropcheckError(f"{path}: {error.strerror}") from error
    for section, keys in PATH_SETTINGS.items():
        if isinstance(table := data.get(section), dict):
            table.update({key: _anchored(path.parent, key, table[key]) for key in keys if isinstance(table.get(key), str)})
    return data


def _anchored(folder: Path, key: str, place: str) -> str:
    """Return a path relative to ``folder`` as a path from here; in ``file.py:callable`` the file; a module name unchanged."""
    if key != "target":
        return str(_normalized(folder / place))
    file, _, name = place.rpartition(":")
    return f"{_normalized(folder / file)}:{name}" if file.endswith(".py") else place


def _normalized(path: Path) -> Path:
    """Return the path without ``..``, so that a file has one name; unchanged if a link makes that another file."""
    normalized = Path(os.path.normpath(path))
    return normalized if normalized.resolve() == path.resolve() else path
