"""The JSON form of a run: the document that ``--output-format json`` prints and ``run.json`` holds in part.

Strict JSON has no NaN and no infinity: those numbers are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from propcheck.analysis.growth import Growth, gradient_growth, stream_growth
from propcheck.analysis.profile import streams
from propcheck.records import (
    SCHEMA_VERSION,
    Angle,
    Doubling,
    EngineInfo,
    Finding,
    InputInfo,
    LossInfo,
    ModelInfo,
    Origin,
    Place,
    Run,
)

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def run_document(run: Run) -> dict[str, Any]:
    """Give the contract's document without its rows, and ``growth``: of each stream, named by its first site."""
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
            {"site": curve.sites[0].site, "stream": _growth(stream_growth(curve)), "gradient": _growth(gradient_growth(curve))}
            for curve in streams(run)
            if curve.sites
        ],
    }


def stored_document(run: Run) -> dict[str, Any]:
    """Give :func:`run_document` and what the files of a run have beside it: what :func:`run_from_document` reads."""
    return {
        **run_document(run),
        "config_hash": run.config_hash,
        "command": run.command,
        "notes": list(run.notes),
        "unobserved": list(run.unobserved),
        **{name: [dataclasses.asdict(one) for one in getattr(run, name)] for name in ("doublings", "angles", "origins")},
        "settings": run.settings,
    }


def _growth(growth: Growth | None) -> dict[str, Any] | None:
    return None if growth is None else {**dataclasses.asdict(growth), "total": growth.total}


def full_document(run: Run) -> dict[str, Any]:
    """Give the contract's whole document: :func:`run_document` and the rows of ``sublayers.parquet``."""
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
    """Turn "NaN", "Infinity" and "-Infinity" back into numbers; leave everything else."""
    return _NONFINITE.get(value, value) if isinstance(value, str) else value


def run_from_document(document: dict[str, Any]) -> Run:
    """Read what :func:`stored_document` wrote, without rows.

    Raises
    ------
    KeyError, TypeError, AttributeError, ValueError
        A key is missing, or holds something else than it should.
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
        unobserved=tuple(document.get("unobserved", ())),  # runs of version 0.1 have none, nor the next three
        doublings=tuple(Doubling(**item) for item in document.get("doublings", ())),
        angles=tuple(Angle(**_numbers(item, "largest", "error")) for item in document.get("angles", ())),
        origins=tuple(Origin(**{**item, "tokens": tuple(item["tokens"])}) for item in document.get("origins", ())),
        settings=dict(document["settings"]),
    )


def _loss(item: dict[str, Any]) -> LossInfo:
    by_seed: Any = tuple(restore(one) for one in item.get("by_seed", ()))  # runs of version 0.1 have none
    return LossInfo(**{**_numbers(item, *item), "by_seed": by_seed})


def _finding(item: dict[str, Any]) -> Finding:
    place = None if item["site"] is None else Place(**item["site"])
    also = tuple(item.get("also", ()))
    return Finding(**{**_numbers(item, "value", "expected"), "site": place, "also": also})


def _numbers(item: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Give ``item`` with its numbers restored under ``keys``."""
    return {**item, **{key: restore(item[key]) for key in keys}}
