"""Where the keys of a probe come from: what TARGET names, the files behind it, and the options of the command line.

Everything here is plain dictionaries; ``propcheck.config.probe`` checks them against the schema. Nothing here imports torch.
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

# The sections of the reference decoder, which no other target has.
DECODER = ("model", "residual", "init")


@dataclass(frozen=True, slots=True)
class Override:
    """A value for one key and the option that gave it, which a message about it names."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Source:
    """The keys that a target gives, and what a message about them names: its file, or the target itself."""

    origin: str
    keys: dict[str, Any]


def read_target(target: str) -> Source:
    """Read what ``target`` names.

    Parameters
    ----------
    target
        A bundled probe's name; a probe file; a Hugging Face ``config.json`` or a folder that holds one;
        ``package.module:callable`` or ``path/to/file.py:callable``.

    Raises
    ------
    PropcheckError
        If it is none of these, or a file cannot be read.
    """
    bundled = bundled_probes()
    path = Path(target)
    if target in bundled:
        return _probe_file(bundled[target])
    if path.is_dir():
        if not (path / "config.json").exists():
            raise PropcheckError(f"{target}: the folder holds no config.json")
        return _with_name(path.resolve().name, {"huggingface": {"config": str(path.absolute())}}, target)
    if path.suffix == ".json":
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        return _with_name(name, {"huggingface": {"config": str(path.absolute())}}, target)
    if path.suffix == ".py":
        raise PropcheckError(f"{target}: name what returns the model, as in {target}:build")
    place, colon, name = target.rpartition(":")
    if colon and not path.exists():
        if not place or not name.isidentifier():
            raise PropcheckError(f"{target}: must be package.module:callable or path/to/file.py:callable")
        return _with_name(python_name(target), {"python": {"target": _seen_from(Path.cwd(), "target", target)}}, target)
    if path.suffix == ".toml" or path.exists():
        return _probe_file(path)
    near = difflib.get_close_matches(target, bundled, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PropcheckError(
        f"{target}: no such file or bundled probe; {hint}bundled: {', '.join(bundled)}; or a config.json, or module:callable"
    )


def python_name(target: str) -> str:
    """Name a run of ``package.module:callable`` or ``path/to/file.py:callable``: ``module-callable``, ``file-callable``."""
    place, _, name = target.rpartition(":")
    module = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return _directory_name(f"{module}-{name}")


def bundled_probes() -> dict[str, Path]:
    """Return the files of the probes that come with the tool, by name."""
    package = Path(__file__).parent.parent
    # In a wheel the probes lie in the package; in a source checkout they are a folder at the top, for people to see.
    folder = package / "_probes" if (package / "_probes").is_dir() else package.parent / "probes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def parse_override(text: str, option: str = "--set", section: str = "") -> Override:
    """Read a ``key=value`` override; ``PropcheckError`` when it is none.

    Parameters
    ----------
    text
        A dotted key and a TOML value; a plain word needs no quotes.
    option
        The option that it was given with.
    section
        Where the key lies, for an option that is for one section.
    """
    origin = f"{option} {text}"
    key, equals, value = text.partition("=")
    key, value = key.strip(), value.strip()
    if not equals or not all(key.split(".")) or (section and not key.isidentifier()):
        example = "width=64" if section else "residual.placement=post"
        raise PropcheckError(f"{origin}: must be key=value, as in {example}")
    if section:
        key = f"{section}.{key}"
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        # A plain word needs no quotes; anything that tries to be more than that has to be right.
        if not value or value[0] in "[{\"'" or "\n" in value:
            given = value or "nothing"
            raise PropcheckError(f'{origin}: {given} is not a TOML value; strings in a list need quotes: ["a"]') from None
        return Override(key, value, origin)
    if set(parsed) != {"value"}:
        raise PropcheckError(f"{origin}: one value only")
    return Override(key, parsed["value"], origin)


def apply(data: dict[str, Any], override: Override) -> None:
    """Put the value of ``override`` into ``data``."""
    *sections, key = override.key.split(".")
    table = data
    for depth, name in enumerate(sections):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise PropcheckError(f"{override.origin}: {'.'.join(sections[: depth + 1])} is a value, not a table")
    path_given = len(sections) == 1 and key in PATH_SETTINGS.get(sections[0], ()) and isinstance(override.value, str)
    table[key] = _seen_from(Path.cwd(), key, override.value) if path_given else override.value


def check_kind(data: dict[str, Any], overrides: Sequence[Override], origin: str) -> None:
    """Refuse the keys of one kind of target where another one is given.

    Parameters
    ----------
    data
        The keys, overrides included.
    overrides, origin
        Who is named where one is wrong: the option, or the file.
    """
    given = [name for name in ("huggingface", "python") if name in data]
    decoder = [name for name in DECODER if name in data]

    def blame(section: str) -> str:
        return next((one.origin for one in overrides if one.key.split(".")[0] == section), origin)

    if "python" in data and not _names_target(data["python"], "target", "args"):
        raise PropcheckError(
            f"{blame('python')}: arguments are for package.module:callable or path/to/file.py:callable; this target is none"
            + ("; a key of the config is --set huggingface.overrides.KEY=VALUE" if "huggingface" in data else "")
        )
    if "huggingface" in data and not _names_target(data["huggingface"], "config", "overrides"):
        raise PropcheckError(f"{blame('huggingface')}: [huggingface] needs config, the path of a config.json")
    if len(given) > 1:
        raise PropcheckError(f"{blame(given[1])}: [huggingface] and [python] are two targets; drop one")
    if given and decoder:
        instead = {"huggingface": "--set huggingface.overrides.KEY=VALUE", "python": "--arg KEY=VALUE"}[given[0]]
        raise PropcheckError(
            f"{blame(decoder[0])}: [{decoder[0]}] describes the reference decoder and does not go with [{given[0]}]; "
            f"what varies such a target is {instead}"
        )


def _names_target(section: Any, key: str, beside: str) -> bool:
    # What is no table, or has a key that there is not, is refused by the schema with a better word.
    return not isinstance(section, dict) or bool(section.get(key)) or bool(section.keys() - {key, beside})


def _with_name(name: str, keys: dict[str, Any], origin: str) -> Source:
    return Source(origin, {"name": _directory_name(name), **keys})


def _directory_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "probe"


def _probe_file(path: Path) -> Source:
    keys = _with_base(path, _read(path), (path.resolve(),))
    keys.setdefault("name", _directory_name(path.stem))
    return Source(str(path), keys)


def _with_base(path: Path, data: dict[str, Any], seen: tuple[Path, ...]) -> dict[str, Any]:
    """Return ``data`` over the keys of the probe that it names as its base."""
    base = data.get("base", "")
    if not base or not isinstance(base, str):
        return data
    bundled = bundled_probes()
    below = bundled[base] if base in bundled else path.parent / base
    if below.suffix != ".toml" and not below.exists():
        near = difflib.get_close_matches(base, bundled, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PropcheckError(f"{path}: base = {base!r}: {below}: no such file or bundled probe{hint}")
    if below.resolve() in seen:
        raise PropcheckError(f"{path}: base = {base!r}: it is its own base")
    try:
        own = _read(below)
    except PropcheckError as error:
        raise PropcheckError(f"{path}: base = {base!r}: {error}") from error
    merged = _merged(_with_base(below, own, (*seen, below.resolve())), data)
    return {**merged, "base": str(below) if base not in bundled else base}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return ``above`` over ``below``, section by section; the name and description of ``below`` are its own."""
    result = {key: value for key, value in below.items() if key not in ("name", "description")}
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def _read(path: Path) -> dict[str, Any]:
    data = _parsed(path)
    for section, keys in PATH_SETTINGS.items():
        if isinstance(table := data.get(section), dict):
            table.update({key: _seen_from(path.parent, key, table[key]) for key in keys if isinstance(table.get(key), str)})
    return data


def _seen_from(folder: Path, key: str, place: str) -> str:
    """Return a path as seen from ``folder``: of ``file.py:callable`` the file; ``package.module:callable`` has none."""
    if key != "target":
        return str(_plain(folder / place))
    file, _, name = place.rpartition(":")
    return f"{_plain(folder / file)}:{name}" if file.endswith(".py") else place


def _plain(path: Path) -> Path:
    """Return a path without ``..``, so that one file has one name; as it is where a link on the way would be another file."""
    plain = Path(os.path.normpath(path))
    return plain if plain.resolve() == path.resolve() else path


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise PropcheckError(f"{path}: not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise PropcheckError(f"{path}: not TOML: not UTF-8 text") from error
    except OSError as error:
        raise PropcheckError(f"{path}: {error.strerror}") from error
