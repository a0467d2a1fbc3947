"""The run directory: ``sublayers.parquet``, ``parameters.parquet``, ``norms.parquet`` and ``run.json``.

Schemas are explicit, so that a column's type never depends on what one scan happened to find. Every file is written under a
temporary name and renamed, and ``run.json`` goes last and names the digests of the others: a scan that is killed leaves
either the old run, or a directory that is refused, never a mixture that reads well.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from propcheck.columns import NORM_COLUMNS, PARAMETER_COLUMNS, SUBLAYER_COLUMNS
from propcheck.document import dumps, run_document, run_from_document
from propcheck.errors import PropcheckError
from propcheck.records import SCHEMA_VERSION, NormRecord, ParameterRecord, Run, SiteRecord

if TYPE_CHECKING:
    from pathlib import Path

_ARROW_TYPES = {
    "int": pa.int64(),
    "int | None": pa.int64(),
    "float | None": pa.float64(),
    "bool": pa.bool_(),
    "bool | None": pa.bool_(),
    "tuple[int, ...]": pa.list_(pa.int64()),
}


def _schema(record: type[SiteRecord | ParameterRecord | NormRecord], descriptions: Any) -> pa.Schema:
    # Everything that is neither a number, a flag nor a shape is text: names, kinds, dtypes.
    return pa.schema(
        [
            pa.field(
                f.name,
                _ARROW_TYPES.get(str(f.type), pa.string()),
                nullable="None" in str(f.type),
                metadata={"description": descriptions[f.name]},
            )
            for f in dataclasses.fields(record)
        ]
    )


SUBLAYERS_SCHEMA: pa.Schema = _schema(SiteRecord, SUBLAYER_COLUMNS)
PARAMETERS_SCHEMA: pa.Schema = _schema(ParameterRecord, PARAMETER_COLUMNS)
NORMS_SCHEMA: pa.Schema = _schema(NormRecord, NORM_COLUMNS)


def write_run(run: Run, directory: Path) -> None:
    """Write a run's files into a directory, which is made if need be; plots and other files there are left alone.

    Parameters
    ----------
    run
        The run; ``run.path`` is stored as it is.
    directory
        The run directory.

    Raises
    ------
    PropcheckError
        The directory cannot be made or written.
    """
    metadata = _metadata(run)
    contents = {
        "sublayers.parquet": _parquet(run.sites, SUBLAYERS_SCHEMA, metadata),
        "parameters.parquet": _parquet(run.parameters, PARAMETERS_SCHEMA, metadata),
        "norms.parquet": _parquet(run.norms, NORMS_SCHEMA, metadata),
    }
    document = {
        **run_document(run),
        "config_hash": run.config_hash,
        "command": run.command,
        "notes": list(run.notes),
        "unobserved": list(run.unobserved),
        **{name: [dataclasses.asdict(one) for one in getattr(run, name)] for name in ("doublings", "angles", "origins")},
        "settings": run.settings,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    contents["run.json"] = (dumps(document) + "\n").encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace_all(directory, contents)
    except OSError as error:
        raise PropcheckError(f"cannot write the run to {directory}: {error.strerror or error}") from error


def _replace_all(directory: Path, contents: dict[str, bytes]) -> None:
    temporary = {name: directory / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            temporary[name].write_bytes(content)
        for name, path in temporary.items():
            path.replace(directory / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _metadata(run: Run) -> dict[str, str]:
    return {
        "propcheck.schema_version": str(SCHEMA_VERSION),
        "propcheck.versions": json.dumps(run.versions, sort_keys=True),
        "propcheck.seeds": json.dumps(list(run.seeds)),
        "propcheck.precision": run.precision,
        "propcheck.config_hash": run.config_hash,
        "propcheck.target": run.target,
    }


def _parquet(
    records: tuple[SiteRecord, ...] | tuple[ParameterRecord, ...] | tuple[NormRecord, ...],
    schema: pa.Schema,
    metadata: dict[str, str],
) -> bytes:
    arrays = [pa.array([getattr(r, f.name) for r in records], type=f.type, from_pandas=False) for f in schema]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema.with_metadata(metadata)), buffer, compression="zstd")
    return buffer.getvalue()


def read_run(directory: Path) -> Run:
    """Read a run back, equal to what was written.

    Parameters
    ----------
    directory
        A run directory.

    Returns
    -------
    Run
        With ``path`` as it was stored.

    Raises
    ------
    PropcheckError
        A file is missing, cut short, not propcheck's, of another scan than ``run.json``, or of a newer schema.
    """
    if not directory.is_dir():
        raise PropcheckError(f"{directory}: no such run directory")
    json_path = directory / "run.json"
    content = _read(json_path)
    try:
        document = json.loads(content, parse_constant=_reject_constant)
    except ValueError as error:
        raise PropcheckError(f"{json_path}: not a propcheck run ({error})") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise PropcheckError(f"{json_path}: not a propcheck run (no schema_version)")
    _check_version(version, json_path)
    try:
        run, digests = run_from_document(document), dict(document["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PropcheckError(f"{json_path}: not a propcheck run (missing or wrong key: {error})") from error
    sites = _rows(directory / "sublayers.parquet", SUBLAYERS_SCHEMA, digests)
    parameters = _rows(directory / "parameters.parquet", PARAMETERS_SCHEMA, digests)
    # Runs of version 0.1 have none.
    norms = _rows(directory / "norms.parquet", NORMS_SCHEMA, digests) if "norms.parquet" in digests else []
    return dataclasses.replace(
        run,
        sites=tuple(SiteRecord(**row) for row in sites),
        parameters=tuple(ParameterRecord(**{**row, "shape": tuple(row["shape"])}) for row in parameters),
        norms=tuple(NormRecord(**row) for row in norms),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise PropcheckError(f"{path}: missing; {path.parent} is not a finished propcheck run") from error
    except OSError as error:
        raise PropcheckError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reject_constant(token: str) -> None:
    raise ValueError(f"bare {token} is not strict JSON")


def _check_version(version: int, path: Path) -> None:
    if version > SCHEMA_VERSION:
        raise PropcheckError(f"{path}: written by a newer propcheck (schema {version}; this one reads up to {SCHEMA_VERSION})")


def _rows(path: Path, schema: pa.Schema, digests: dict[str, str]) -> list[dict[str, Any]]:
    content = _read(path)
    try:
        table = pq.read_table(io.BytesIO(content))
    except (pa.ArrowException, OSError) as error:
        raise PropcheckError(f"{path}: cut short or not a Parquet file") from error
    version = (table.schema.metadata or {}).get(b"propcheck.schema_version", b"").decode()
    if not version.isdigit():
        raise PropcheckError(f"{path}: a Parquet file, but not one of propcheck's (no propcheck.schema_version)")
    _check_version(int(version), path)
    # A column that was added to the schema after the file was written is null: it was not observed.
    added = {field.name for field in schema if field.nullable} - set(table.schema.names)
    if table.schema.names != [name for name in schema.names if name not in added]:
        wrong = sorted((set(schema.names) - added) ^ set(table.schema.names)) or ["order"]
        raise PropcheckError(f"{path}: columns are not those of schema {SCHEMA_VERSION} ({', '.join(wrong)})")
    if hashlib.sha256(content).hexdigest() != digests.get(path.name):
        raise PropcheckError(f"{path}: not the file that run.json was written with; scan again")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
