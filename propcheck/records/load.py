"""Load a stored run from its directory, from one of its Parquet files, or from a baseline."""

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
_MISSING = "loss, findings, parameters, inputs, settings, and the class and size of the model"


def is_run(text: str) -> bool:
    """Return whether an argument names a stored run rather than a target to scan.

    Parameters
    ----------
    text
        The argument. A name that ends with ``.parquet`` is a run even if there is no such file. So is a directory with
        ``run.json``, or with other files of a run and no ``config.json``: loading it reports that the scan did not finish.
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
        A run directory, a baseline, or one of the Parquet files of a run directory. Next to a ``run.json`` such a file stands
        for the whole directory. Without one, ``sublayers.parquet`` gives rows, target, precision, seeds and versions. The run
        then has no findings, parameters and loss; other missing values are "unknown" or 0, and a note says so.
    force
        Also read an older schema.

    Raises
    ------
    PropcheckError
        If there is no such run, or it cannot be read.
    """
    if place.is_dir():
        return store.read_run(place, force=force)
    if place.suffix.lower() != ".parquet":
        raise PropcheckError(f"{place}: not a run; give a run directory or a Parquet file written by propcheck")
    known = place.name in store.FILES
    if known and (place.parent / "run.json").exists():
        return store.read_run(place.parent, force=force)
    return _load_sites(place, force=force) if known or _is_run_file(place) else read_baseline(place, force=force)


def _is_run_file(place: Path) -> bool:
    """Return whether a file has the content of a file of a run directory; it may have been renamed to compare two."""
    try:
        return store.file_kind(store.parquet_table(place.read_bytes(), place).schema) is not None
    except (OSError, PropcheckError):  # read_baseline reports it
        return False


def _load_sites(place: Path, *, force: bool) -> Run:
    table = store.parquet_table(store.read_file(place), place)
    version = store.schema_version(table.schema, place)
    store.check_version(version, place, "scan again", force=force)
    if (kind := store.file_kind(table.schema)) != "sublayers.parquet":
        raise PropcheckError(f"{place}: {kind or 'this file'} alone is not a run; give the run directory, which has a run.json")
    sites = store.site_records(store.rows(table, store.SUBLAYERS_SCHEMA, place, older=version < SCHEMA_VERSION))
    try:
        metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
        seeds = tuple(int(seed) for seed in json.loads(metadata["propcheck.seeds"]))
        versions = {str(name): str(version) for name, version in json.loads(metadata["propcheck.versions"]).items()}
        target, precision, config_hash = (metadata[f"propcheck.{name}"] for name in ("target", "precision", "config_hash"))
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PropcheckError(f"{place}: broken metadata ({type(error).__name__}: {error}); scan again") from error
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
        notes=(f"{place} was read without a run.json: {_MISSING} are unknown.",),
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
    """Return the width of the stream, from norm = rms * sqrt(width); None if either is unobserved, non-finite or 0."""
    try:
        return round((site.stream_norm / site.stream_rms) ** 2)  # type: ignore[operator]
    except (TypeError, ValueError, OverflowError, ZeroDivisionError):
        return None
