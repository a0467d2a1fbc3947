"""A run as strict JSON and back: the document of ``run.json`` and of ``--output-format json``.

Strict JSON has no NaN and no infinity, so these are written as the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from propcheck.records import (
    SCHEMA_VERSION,
    Angle,
    Doubling,
    EngineInfo,
    Finding,
    Growth,
    InputInfo,
    LossInfo,
    ModelInfo,
    Origin,
    Place,
    Run,
    StreamGrowth,
)

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def run_document(run: Run) -> dict[str, Any]:
    """Return the JSON document of a run without the rows of ``sublayers.parquet``."""
    model = dataclasses.asdict(run.model)
    return {
        "schema_version": SCHEMA_VERSION,
        "run": {
            "path": run.path,
            "target": run.target,
            "model": {"class": model.pop("class_name"), **model},
            "precision": run.precision,
            "inputs": dataclasses.asdict(run.inputs),
            "seeds": list(run.seeds),
            "engine": dataclasses.asdict(run.engine),
            "versions": dict(run.versions),
        },
        "loss": dataclasses.asdict(run.loss),
        "findings": [dataclasses.asdict(finding) for finding in run.findings],
        "growth": [
            {"site": growth.site, "stream": _growth(growth.stream), "gradient": _growth(growth.gradient)}
            for growth in run.growth
        ],
    }


def stored_document(run: Run) -> dict[str, Any]:
    """Return :func:`run_document` with everything else that :func:`run_from_document` restores."""
    return {
        **run_document(run),
        "config_hash": run.config_hash,
        "command": run.command,
        "notes": list(run.notes),
        "unobserved": list(run.unobserved),
        **{name: [dataclasses.asdict(record) for record in getattr(run, name)] for name in ("doublings", "angles", "origins")},
        "settings": run.settings,
    }


def _growth(growth: Growth | None) -> dict[str, Any] | None:
    return None if growth is None else {**dataclasses.asdict(growth), "total": growth.total}


def full_document(run: Run) -> dict[str, Any]:
    """Return the document of ``--output-format json``: :func:`run_document` and the rows of ``sublayers.parquet``."""
    return {**run_document(run), "sublayers": [dataclasses.asdict(record) for record in run.sites]}


def dumps(document: Any) -> str:
    """Write strict JSON, non-finite numbers as strings."""
    return json.dumps(_strict(document), indent=1, allow_nan=False, ensure_ascii=False)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def restore(value: float | str | None) -> float | str | None:
    """Turn "NaN", "Infinity" and "-Infinity" back into numbers; return any other value unchanged."""
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def run_from_document(document: dict[str, Any]) -> Run:
    """Restore a run from :func:`stored_document`, without the rows of its Parquet files.

    Raises
    ------
    KeyError, TypeError, AttributeError, ValueError
        If a key is missing or has a value of the wrong kind.
    """
    run, model = document["run"], dict(document["run"]["model"])
    return Run(
        path=run["path"],
        target=run["target"],
        model=ModelInfo(class_name=model.pop("class"), **model),
        precision=run["precision"],
        inputs=InputInfo(**run["inputs"]),
        seeds=tuple(run["seeds"]),
        engine=EngineInfo(**run["engine"]),
        versions=dict(run["versions"]),
        loss=_loss(document["loss"]),
        config_hash=document["config_hash"],
        command=document["command"],
        sites=(),
        parameters=(),
        findings=tuple(_finding(item) for item in document["findings"]),
        notes=tuple(document["notes"]),
        # Version 0.1 wrote none of the following.
        growth=tuple(_stream_growth(item) for item in document.get("growth", ())),
        unobserved=tuple(document.get("unobserved", ())),
        doublings=tuple(Doubling(**item) for item in document.get("doublings", ())),
        angles=tuple(Angle(**_numbers(item, "largest", "error")) for item in document.get("angles", ())),
        origins=tuple(Origin(**{**item, "tokens": tuple(item["tokens"])}) for item in document.get("origins", ())),
        settings=dict(document["settings"]),
    )


def _loss(item: dict[str, Any]) -> LossInfo:
    by_seed: Any = tuple(restore(loss) for loss in item.get("by_seed", ()))  # version 0.1 wrote none
    return LossInfo(**{**_numbers(item, *item), "by_seed": by_seed})


def _finding(item: dict[str, Any]) -> Finding:
    place = None if item["site"] is None else Place(**item["site"])
    also = tuple(item.get("also", ()))
    return Finding(**{**_numbers(item, "value", "expected"), "site": place, "also": also})


def _stream_growth(item: dict[str, Any]) -> StreamGrowth:
    return StreamGrowth(item["site"], _restored_growth(item["stream"]), _restored_growth(item["gradient"]))


def _restored_growth(item: dict[str, Any] | None) -> Growth | None:
    if item is None:
        return None
    numbers: dict[str, Any] = {name: restore(value) for name, value in item.items() if name not in ("total", "fitted")}
    return Growth(**numbers, fitted=None if item["fitted"] is None else tuple(item["fitted"]))


def _numbers(item: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return ``item`` with the numbers under ``keys`` restored."""
    return {**item, **{key: restore(item[key]) for key in keys}}
