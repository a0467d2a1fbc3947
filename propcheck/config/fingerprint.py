"""Which keys of a probe decide a scan's numbers: the hash of a probe, and the keys in which two probes or runs differ."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.config.resolve import DECODER_SECTIONS
from propcheck.records import PATH_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.config.probe import Probe

_DECISIVE_SECTIONS = {*DECODER_SECTIONS, "huggingface", "python", "precision", "inputs"}


def config_hash(probe: Probe) -> str:
    """Return the SHA-256, in hexadecimal, of everything that decides a scan's numbers and findings.

    Names, descriptions, file locations, the memory budget and the gate's tolerances are left out. A config.json or Python
    file enters with its content, an installed module with its name.
    """
    left_out: dict[str, Any] = {
        "name": True,
        "description": True,
        "base": True,
        "inputs": set(PATH_SETTINGS["inputs"]),
        "scan": {"memory"},
        "gate": True,
    }
    data = probe.model_dump(mode="python", exclude=left_out)
    # Keys that are newer than stored runs count only if they are set, so that old hashes stay valid.
    if data["inputs"]["vocabulary"] is None:
        del data["inputs"]["vocabulary"]
    if probe.scan.shadow == "none":
        del data["scan"]["shadow"]
    if probe.expect.init is None:
        del data["expect"]
    if probe.kind == "decoder":
        data["precision"]["preset"] = probe.precision.preset or "bf16"
        del data["huggingface"], data["python"]
    elif probe.kind == "huggingface":
        data["huggingface"]["config"] = _content_hash(Path(probe.huggingface.config))
    else:
        module, _, name = probe.python.target.rpartition(":")
        if module.endswith(".py"):
            data["python"]["target"] = f"{_content_hash(Path(module))}:{name}"
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def _content_hash(path: Path) -> str:
    path = path / "config.json" if path.is_dir() else path
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(probe: Probe, base: Probe) -> list[tuple[str, Any, Any]]:
    """Return the keys that decide a scan's numbers and differ between two probes.

    Returns
    -------
    list of tuple
        Dotted key, value in ``probe``, value in ``base``.
    """
    return setting_differences(probe.model_dump(include=_DECISIVE_SECTIONS), base.model_dump(include=_DECISIVE_SECTIONS))


def setting_differences(settings: Mapping[str, Any], reference: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the same for the settings that runs store: all keys of a probe, section by section.

    For two kinds of target, only the sections that both use are compared.
    """
    sections = _used_sections(settings) & _used_sections(reference)
    flat, flat_reference = (
        _flattened({name: section for name, section in stored.items() if name in sections}) for stored in (settings, reference)
    )
    keys = dict.fromkeys((*flat, *flat_reference))  # a target's own table, such as python.args, may lack keys of the other
    return [(key, flat.get(key), flat_reference.get(key)) for key in keys if flat.get(key) != flat_reference.get(key)]


def _flattened(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _used_sections(settings: Mapping[str, Any]) -> set[str]:
    """Return the sections that decide what the target is and how it runs."""
    target = {name for name, key in (("huggingface", "config"), ("python", "target")) if settings.get(name, {}).get(key)}
    return {*(target or DECODER_SECTIONS), "precision", "inputs"}
