"""The run directory: ``sublayers.parquet``, ``parameters.parquet``, ``norms.parquet`` and ``run.json``.

Schemas are explicit, so a column's type never depends on the values of one scan. Every file is written under a temporary name
and renamed. ``run.json`` comes last and holds the digests of the others, so a scan that is killed leaves the old run or a
directory that is refused, never a readable mixture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from propcheck.errors import PropcheckError
from propcheck.records import SCHEMA_VERSION, NormRecord, ParameterRecord, Run, SiteRecord
from propcheck.records.columns import columns_of
from propcheck.records.document import dumps, run_from_document, stored_document

if TYPE_CHECKING:
    from pathlib import Path


def _schema(record_type: type) -> pa.Schema:
    return pa.schema(
        [
            pa.field(column.name, column.arrow_type, nullable=column.nullable, metadata={"description": column.description})
            for column in columns_of(record_type).values()
        ]
    )


SUBLAYERS_SCHEMA: pa.Schema = _schema(SiteRecord)
PARAMETERS_SCHEMA: pa.Schema = _schema(ParameterRecord)
NORMS_SCHEMA: pa.Schema = _schema(NormRecord)
# The Parquet files of a run directory.
FILES = {"sublayers.parquet": SUBLAYERS_SCHEMA, "parameters.parquet": PARAMETERS_SCHEMA, "norms.parquet": NORMS_SCHEMA}


def write_run(run: Run, directory: Path) -> None:
    """Write the files of a run into a directory; plots and other files there are left alone.

    Parameters
    ----------
    run
        The run; ``run.path`` is stored unchanged.
    directory
        The run directory; created if necessary.

    Raises
    ------
    PropcheckError
        If the directory cannot be created or written.
    """
    metadata = provenance(run)
    contents = {
        "sublayers.parquet": _parquet(run.sites, SUBLAYERS_SCHEMA, metadata),
        "parameters.parquet": _parquet(run.parameters, PARAMETERS_SCHEMA, metadata),
        "norms.parquet": _parquet(run.norms, NORMS_SCHEMA, metadata),
    }
    document = {
        **stored_document(run),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    contents["run.json"] = (dumps(document) + "\n").encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_all(directory, contents)
    except OSError as error:
        raise PropcheckError(f"cannot write the run to {directory}: {error.strerror or error}") from error


def replace_all(directory: Path, contents: dict[str, bytes]) -> None:
    """Write files under temporary names, then rename them in order.

    Parameters
    ----------
    directory
        An existing directory.
    contents
        Content by file name.

    Raises
    ------
    OSError
        If a file cannot be written.
    """
    temporary = {name: directory / f".{name}.{os.getpid()}.tmp" for name in contents}
    try:
        for name, content in contents.items():
            temporary[name].write_bytes(content)
        for name, path in temporary.items():
            path.replace(directory / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def provenance(run: Run) -> dict[str, str]:
    """Return the metadata of each Parquet file of a run: versions, seeds, precision, settings hash and target."""
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
    arrays = [
        pa.array([getattr(record, field.name) for record in records], type=field.type, from_pandas=False) for field in schema
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema.with_metadata(metadata)), buffer, compression="zstd")
    return buffer.getvalue()


def read_run(directory: Path, *, force: bool = False) -> Run:
    """Read a run; it equals the run that was written.

    Parameters
    ----------
    directory
        A run directory.
    force
        Also read an older schema: missing nullable columns are null, and columns that no longer exist are ignored.

    Returns
    -------
    Run
        With ``path`` as it was stored.

    Raises
    ------
    PropcheckError
        If a file is missing, truncated, not written by propcheck, from another scan than ``run.json``, of a newer schema or,
        without ``force``, of an older one.
    """
    if not directory.is_dir():
        raise PropcheckError(f"{directory}: no such run directory")
    json_path = directory / "run.json"
    content = read_file(json_path)
    try:
        document = json.loads(content, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise PropcheckError(f"{json_path}: not a propcheck run ({error})") from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise PropcheckError(f"{json_path}: not a propcheck run (no schema_version)")
    check_version(version, json_path, "scan again", force=force)
    try:
        run, digests = run_from_document(document), dict(document["files"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PropcheckError(f"{json_path}: not a propcheck run (missing or wrong key: {error})") from error

    def stored(name: str, schema: pa.Schema) -> list[dict[str, Any]]:
        path = directory / name
        content = read_file(path)
        table = parquet_table(content, path)
        check_version(schema_version(table.schema, path), path, "scan again", force=force)
        records = rows(table, schema, path, older=version < SCHEMA_VERSION)
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise PropcheckError(f"{path}: does not belong to run.json (its digest differs); scan again")
        return records

    return dataclasses.replace(
        run,
        sites=site_records(stored("sublayers.parquet", SUBLAYERS_SCHEMA)),
        parameters=parameter_records(stored("parameters.parquet", PARAMETERS_SCHEMA)),
        # Version 0.1 wrote no norms.parquet.
        norms=tuple(NormRecord(**row) for row in (stored("norms.parquet", NORMS_SCHEMA) if "norms.parquet" in digests else ())),
    )


def site_records(table_rows: list[dict[str, Any]]) -> tuple[SiteRecord, ...]:
    """Turn the result of :func:`rows` into records."""
    return tuple(SiteRecord(**row) for row in table_rows)


def parameter_records(table_rows: list[dict[str, Any]]) -> tuple[ParameterRecord, ...]:
    """Turn the result of :func:`rows` into records."""
    return tuple(ParameterRecord(**{**row, "shape": tuple(row["shape"])}) for row in table_rows)


def read_file(path: Path) -> bytes:
    """Read a file of a run directory.

    Raises
    ------
    PropcheckError
        If it cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise PropcheckError(f"{path}: missing; {path.parent} is not a complete propcheck run") from error
    except OSError as error:
        raise PropcheckError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reject_constant(token: str) -> None:
    raise ValueError(f"bare {token} is not strict JSON")


def check_version(version: int, path: Path, again: str, *, force: bool) -> None:
    """Check that a file has the current schema version.

    Parameters
    ----------
    version
        Schema version of the file.
    path
        The file, for the message.
    again
        Advice for the message: "scan again".
    force
        Accept an older version.

    Raises
    ------
    PropcheckError
        If the version is newer or, without ``force``, older.
    """
    if version > SCHEMA_VERSION:
        raise PropcheckError(
            f"{path}: written by a newer propcheck (schema {version}; this one reads up to {SCHEMA_VERSION}); "
            f"update propcheck, or {again}"
        )
    if version < SCHEMA_VERSION and not force:
        raise PropcheckError(
            f"{path}: written by an older propcheck (schema {version}; this one reads {SCHEMA_VERSION}); {again}"
        )


def parquet_table(content: bytes, path: Path) -> pa.Table:
    """Read the table in the bytes of a Parquet file.

    Raises
    ------
    PropcheckError
        If they are not a complete Parquet file; the message names ``path``.
    """
    if not content:
        raise PropcheckError(f"{path}: empty")
    if content[:4] != b"PAR1":
        raise PropcheckError(f"{path}: not a Parquet file")
    try:
        table = pq.read_table(io.BytesIO(content))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise PropcheckError(f"{path}: truncated or damaged Parquet file") from error
    return table


def schema_version(schema: pa.Schema, path: Path) -> int:
    """Return the schema version of a Parquet file.

    Raises
    ------
    PropcheckError
        If propcheck did not write it.
    """
    text = (schema.metadata or {}).get(b"propcheck.schema_version", b"")
    if not re.fullmatch(rb"[0-9]{1,9}", text):
        raise PropcheckError(f"{path}: Parquet, but not written by propcheck (no propcheck.schema_version)")
    return int(text)


def file_kind(schema: pa.Schema) -> str | None:
    """Return which of ``FILES`` a Parquet file is, whatever its name; None if none of them."""
    metadata, names = schema.metadata or {}, set(schema.names)
    if b"propcheck.schema_version" not in metadata or b"propcheck.kind" in metadata:
        return None
    required = {kind: {field.name for field in expected if not field.nullable} for kind, expected in FILES.items()}
    return next((kind for kind, columns in required.items() if columns <= names), None)


def rows(table: pa.Table, schema: pa.Schema, path: Path, *, older: bool) -> list[dict[str, Any]]:
    """Return the rows of a table with every column of a schema.

    Nullable columns that were added after the file was written are null.

    Parameters
    ----------
    table
        The table of a Parquet file.
    schema
        Expected columns, in order.
    path
        The file, for messages.
    older
        Whether the file has an older schema: columns that no longer exist are ignored.

    Raises
    ------
    PropcheckError
        If the columns differ from the schema, or a column that is not nullable has null values.
    """
    names = [name for name in table.schema.names if not older or name in schema.names]
    added = {field.name for field in schema if field.nullable} - set(names)
    if names != [name for name in schema.names if name not in added]:
        wrong = sorted((set(schema.names) - added) ^ set(names)) or ["order"]
        raise PropcheckError(f"{path}: columns differ from schema {SCHEMA_VERSION} ({', '.join(wrong)})")
    for name in names:
        expected, actual = schema.field(name), table.schema.field(name)
        if actual.type != expected.type:
            raise PropcheckError(f"{path}: column {name} has type {actual.type}, expected {expected.type}")
        if not expected.nullable and table[name].null_count:
            raise PropcheckError(f"{path}: column {name} has null values, which it must not")
    missing = dict.fromkeys(added)
    return [{**row, **missing} for row in table.select(names).to_pylist()]
