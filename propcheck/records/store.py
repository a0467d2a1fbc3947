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
    """Write files under temporary names and, when all of them are there, rename them in order; ``OSError`` where that fails."""
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
    """Return what the metadata of each Parquet file says of the run it is from."""
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


def read_run(directory: Path, *, force: bool = False) -> Run:
    """Read a run back, equal to what was written.

    Parameters
    ----------
    directory
        A run directory.
    force
        Read an older schema as far as it goes: a nullable column that it lacks is null, one that there is no more is left out.

    Returns
    -------
    Run
        With ``path`` as it was stored.

    Raises
    ------
    PropcheckError
        A file is missing, cut short, not propcheck's, of another scan than ``run.json``, of a newer schema, or, without
        ``force``, of an older one.
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
        found = rows(table, schema, path, older=version < SCHEMA_VERSION)
        if hashlib.sha256(content).hexdigest() != digests.get(name):
            raise PropcheckError(f"{path}: not the file that run.json was written with; scan again")
        return found

    return dataclasses.replace(
        run,
        sites=site_records(stored("sublayers.parquet", SUBLAYERS_SCHEMA)),
        parameters=parameter_records(stored("parameters.parquet", PARAMETERS_SCHEMA)),
        # Runs of version 0.1 have none.
        norms=tuple(NormRecord(**row) for row in (stored("norms.parquet", NORMS_SCHEMA) if "norms.parquet" in digests else ())),
    )


def site_records(found: list[dict[str, Any]]) -> tuple[SiteRecord, ...]:
    """Turn what :func:`rows` gave into records."""
    return tuple(SiteRecord(**row) for row in found)


def parameter_records(found: list[dict[str, Any]]) -> tuple[ParameterRecord, ...]:
    """Turn what :func:`rows` gave into records."""
    return tuple(ParameterRecord(**{**row, "shape": tuple(row["shape"])}) for row in found)


def read_file(path: Path) -> bytes:
    """Read a file of a run directory; ``PropcheckError`` where it cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise PropcheckError(f"{path}: missing; {path.parent} is not a finished propcheck run") from error
    except OSError as error:
        raise PropcheckError(f"{path}: cannot be read: {error.strerror or error}") from error


def _reject_constant(token: str) -> None:
    raise ValueError(f"bare {token} is not strict JSON")


def check_version(version: int, path: Path, again: str, *, force: bool) -> None:
    """Refuse a schema that is not this one's; an older one is let through by ``force``, a newer one is not.

    Parameters
    ----------
    version
        That of the file.
    path
        The file, for the message.
    again
        What to do instead, for the message: "scan again".
    force
        Let an older one through.
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
    """Read a Parquet file's bytes; ``PropcheckError`` naming ``path`` where they are none."""
    if not content:
        raise PropcheckError(f"{path}: empty")
    if content[:4] != b"PAR1":
        raise PropcheckError(f"{path}: not a Parquet file")
    try:
        table = pq.read_table(io.BytesIO(content))
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise PropcheckError(f"{path}: cut short or damaged: not a whole Parquet file") from error
    return table


def schema_version(schema: pa.Schema, path: Path) -> int:
    """Return the version that a Parquet file of propcheck's was written with; ``PropcheckError`` where it is not one."""
    text = (schema.metadata or {}).get(b"propcheck.schema_version", b"")
    if not re.fullmatch(rb"[0-9]{1,9}", text):
        raise PropcheckError(f"{path}: a Parquet file, but not one of propcheck's (no propcheck.schema_version)")
    return int(text)


def file_kind(schema: pa.Schema) -> str | None:
    """Say which of ``FILES`` a Parquet file is, whatever its name; None where it is none of them."""
    metadata, names = schema.metadata or {}, set(schema.names)
    if b"propcheck.schema_version" not in metadata or b"propcheck.kind" in metadata:
        return None
    return next((name for name, own in FILES.items() if {f.name for f in own if not f.nullable} <= names), None)


def rows(table: pa.Table, schema: pa.Schema, path: Path, *, older: bool) -> list[dict[str, Any]]:
    """Return a table's rows with every column of a schema.

    A column that was added to the schema after the file was written is null: it was not observed.

    Parameters
    ----------
    table
        What was read.
    schema
        The columns that it should have, in order, their types, and whether null may stand in them.
    path
        The file, for messages.
    older
        It is of an older schema: columns that this one has no more are left out.

    Raises
    ------
    PropcheckError
        Its columns are others, or hold null where that may not be.
    """
    names = [name for name in table.schema.names if not older or name in schema.names]
    added = {field.name for field in schema if field.nullable} - set(names)
    if names != [name for name in schema.names if name not in added]:
        wrong = sorted((set(schema.names) - added) ^ set(names)) or ["order"]
        raise PropcheckError(f"{path}: columns are not those of schema {SCHEMA_VERSION} ({', '.join(wrong)})")
    for name in names:
        expected, found = schema.field(name), table.schema.field(name)
        if found.type != expected.type:
            raise PropcheckError(f"{path}: column {name} holds {found.type}, not {expected.type}")
        if not expected.nullable and table[name].null_count:
            raise PropcheckError(f"{path}: column {name} has rows without a value")
    missing = dict.fromkeys(added)
    return [{**row, **missing} for row in table.select(names).to_pylist()]
