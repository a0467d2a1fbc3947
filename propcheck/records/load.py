"""Read a run from wherever a user names one: its directory, one of the directory's Parquet files, or a baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from propcheck.errors import PropcheckError
from propcheck.records import SCHEMA_VERSION, EngineInfo, InputInfo, LossInfo, ModelInfo, Run, store
from propcheck.records.baseline import read_baseline

if TYPE_CHECKING:
    from propcheck.records import SiteRecord

_UNKNOWN = "unknown"
_LACKING = "loss, findings, parameters, inputs, settings, and the model's class and size"


def is_run(text: str) -> bool:
    """Say whether an argument names a run that is stored, rather than a target to scan.

    Parameters
    ----------
    text
        As it was typed. A name that ends with ``.parquet`` is a run also where there is no such file; a directory is one that
        holds ``run.json``, or its other files and no ``config.json``: it was not finished, and should be told so.
    """
    path = Path(text)
    if path.suffix.lower() == ".parquet" or (path / "run.json").is_file():
        return True
    return any((path / name).is_file() for name in store.FILES) and not (path / "config.json").exists()


def load(place: Path, *, force: bool = False) -> Run:
    """Read a stored run.

    Parameters
    ----------
    place
        A run directory, a baseline, or a ``sublayers.parquet``, ``parameters.parquet`` or ``norms.parquet``. Beside a
        ``run.json`` such a file stands for the whole directory. Alone, ``sublayers.parquet`` gives what it says: rows, target,
        precision, seeds, versions. The run then has no findings, no parameters and no loss; what else it cannot say is
        "unknown" or 0, and a note tells so.
    force
        Read an older schema as far as it goes.

    Raises
    ------
    PropcheckError
        There is no such run, or it cannot be read.
    """
    if place.is_dir():
        return store.read_run(place, force=force)
    if place.suffix.lower() != ".parquet":
        raise PropcheckError(f"{place}: no run; it takes a run directory, or a Parquet file that propcheck wrote")
    known = place.name in store.FILES
    if known and (place.parent / "run.json").exists():
        return store.read_run(place.parent, force=force)
    return _lone(place, force=force) if known or _holds_rows(place) else read_baseline(place, force=force)


def _holds_rows(place: Path) -> bool:
    """Say whether a file is one of a run directory's by its content: two that are compared may have other names."""
    try:
        return store.file_kind(store.parquet_table(place.read_bytes(), place).schema) is not None
    except (OSError, PropcheckError):  # which read_baseline puts into words
        return False


def _lone(place: Path, *, force: bool) -> Run:
    table = store.parquet_table(store.read_file(place), place)
    version = store.schema_version(table.schema, place)
    store.check_version(version, place, "scan again", force=force)
    if (kind := store.file_kind(table.schema)) != "sublayers.parquet":
        raise PropcheckError(f"{place}: {kind or 'this'} alone is no run; name the run directory, which has a run.json")
    sites = store.site_records(store.rows(table, store.SUBLAYERS_SCHEMA, place, older=version < SCHEMA_VERSION))
    try:
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        seeds = tuple(int(seed) for seed in json.loads(metadata["propcheck.seeds"]))
        versions = {str(name): str(version) for name, version in json.loads(metadata["propcheck.versions"]).items()}
        target, precision, config_hash = (metadata[f"propcheck.{name}"] for name in ("target", "precision", "config_hash"))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PropcheckError(f"{place}: its metadata are broken ({type(error).__name__}: {error}); scan again") from error
    return Run(
        path=str(place),
        target=target,
        model=_model(sites),
        precision=precision,
        inputs=InputInfo(batch=0, tokens=0, source=_UNKNOWN),
        seeds=seeds,
        engine=EngineInfo(mode=_UNKNOWN, wall_seconds=0.0, peak_rss_bytes=0, threads=0, device=_UNKNOWN, memory_budget_bytes=0),
        versions=versions,
        loss=LossInfo(value=None, uniform=None),
        config_hash=config_hash,
        command=None,
        sites=sites,
        parameters=(),
        notes=(f"{place} was read without a run.json: {_LACKING} are not known.",),
    )


def _model(sites: tuple[SiteRecord, ...]) -> ModelInfo:
    placements = list(dict.fromkeys(site.placement for site in sites if site.placement is not None))
    return ModelInfo(
        class_name=_UNKNOWN,
        parameters=0,
        blocks=len({site.block for site in sites} - {None}),
        sites=len({site.site for site in sites}),
        width=next((width for site in sites if (width := _width(site)) is not None), 0),
        placement=placements[0] if len(placements) == 1 else "mixed" if placements else "none",
    )


def _width(site: SiteRecord) -> int | None:
    """Return the width of the stream: a norm is the rms times its root."""
    try:
        return round((site.stream_norm / site.stream_rms) ** 2)  # type: ignore[operator]
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):  # one of them not observed, not finite, or 0
        return None
