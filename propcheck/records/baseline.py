"""The baseline of a gate: one small Parquet file to commit, with a Markdown summary for its diffs.

A baseline holds what a gate compares and nothing that varies between calls, so the same run gives the same bytes whenever and
wherever it is made. Sites and parameters are rows of one table and share the columns of the same name; a row with a ``name``
is a parameter.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from propcheck.errors import PropcheckError
from propcheck.records import PATH_SETTINGS, SCHEMA_VERSION, store
from propcheck.records.document import dumps, run_from_document, stored_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from propcheck.records import Run

SUMMARY_TITLE = "# Baseline: "  # how every summary begins

_KIND = "baseline"
# All columns are nullable, since a row has only the columns of its kind; reading checks which may be null. ``name``, which
# tells the kinds apart, comes first.
_SCHEMA: pa.Schema = pa.schema({field.name: field.type for field in (*store.PARAMETERS_SCHEMA, *store.SUBLAYERS_SCHEMA)})


def kept(run: Run) -> Run:
    """Return the part of a run that a baseline keeps, which :func:`read_baseline` restores.

    It has no path, command, notes, norms, doublings, angles and origins. Of the engine it keeps mode, device and threads; time,
    peak and budget are 0.
    """
    return dataclasses.replace(
        run,
        path=None,
        command=None,
        notes=(),
        norms=(),
        doublings=(),
        angles=(),
        origins=(),
        engine=dataclasses.replace(run.engine, wall_seconds=0.0, peak_rss_bytes=0, memory_budget_bytes=0),
    )


def write_baseline(run: Run, path: Path, summary: str) -> None:
    """Write a run as a baseline, and its summary to ``path`` with the suffix ``.md``.

    Both are written under temporary names and renamed, the Parquet file last: if that fails, the old baseline stays.

    Parameters
    ----------
    run
        The run, with its findings.
    path
        Name of the Parquet file; its directory is created if necessary.
    summary
        Markdown of :func:`propcheck.render.baseline_summary.baseline_summary`.

    Raises
    ------
    PropcheckError
        If ``path`` does not end with ``.parquet``, if another kind of file has one of the two names, or if the files cannot
        be written.
    """
    if path.suffix != ".parquet":
        raise PropcheckError(f"{path}: a baseline is a Parquet file; use a name that ends with .parquet")
    if path.name in store.FILES:
        raise PropcheckError(f"{path}: reserved for a file of a run directory; use another name for the baseline")
    path = path.resolve()  # replace the file that a link points to, not the link
    run = kept(run)
    directory = Path(os.path.abspath(path.parent))  # noqa: PTH100 - resolve() would follow links, which the settings do not
    settings, moved = _moved(run.settings, lambda setting: _relative_to(directory, setting))
    document = {**stored_document(dataclasses.replace(run, settings=settings)), "beside": moved}
    summary_path = path.with_suffix(".md")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(path, summary_path)
        store.replace_all(path.parent, {summary_path.name: summary.encode(), path.name: _parquet(run, document)})
    except OSError as error:
        raise PropcheckError(f"cannot write the baseline {path}: {error.strerror or error}") from error


def _check_replaceable(path: Path, summary_path: Path) -> None:
    """Refuse to replace anything but a baseline and its summary, before either of them is replaced."""
    for file in (path, summary_path):
        if file.is_dir():
            raise PropcheckError(f"{file}: is a directory; a baseline is a file")
    if summary_path.exists() and not summary_path.read_bytes().startswith(SUMMARY_TITLE.encode()):
        raise PropcheckError(
            f"{summary_path}: the summary of the baseline would replace this file, which is not one; remove it or use another "
            "name for the baseline"
        )
    if path.exists() and _is_other_parquet(path):
        raise PropcheckError(f"{path}: is a Parquet file but not a baseline; remove it or use another name for the baseline")


def _is_other_parquet(path: Path) -> bool:
    """Return whether a file is complete Parquet of another kind; an unreadable one may be a truncated baseline."""
    try:
        metadata = pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError):
        return False
    return b"propcheck.kind" not in metadata


def _parquet(run: Run, document: dict[str, Any]) -> bytes:
    rows = [*map(dataclasses.asdict, run.sites), *map(dataclasses.asdict, run.parameters)]
    text = dumps(document)
    table = pa.Table.from_pylist(rows, schema=_SCHEMA)
    metadata = {
        "propcheck.kind": _KIND,
        **store.provenance(run),
        "propcheck.run": text,
        "propcheck.sha256": _digest(text.encode(), table),
    }
    buffer = io.BytesIO()
    # The Arrow schema would store all metadata a second time and adds nothing for these types.
    with pq.ParquetWriter(buffer, _SCHEMA, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def _digest(document: bytes, table: pa.Table) -> str:
    """Return a digest of everything that is read, since a damaged file may still be valid Parquet."""
    return hashlib.sha256(document + repr(table.to_pydict()).encode()).hexdigest()


def read_baseline(path: Path, *, force: bool = False) -> Run:
    """Read a baseline.

    Parameters
    ----------
    path
        The file.
    force
        Also read an older schema: missing nullable columns are null, and columns that no longer exist are ignored.

    Returns
    -------
    Run
        Equal to :func:`kept` of the run that was written.

    Raises
    ------
    PropcheckError
        If the file is missing, empty, truncated, damaged, not a baseline, of a newer schema or, without ``force``, of an older
        one.
    """
    again = f"create it again with `{_update(path)}`"
    if path.is_dir():
        raise PropcheckError(f"{path}: is a directory, not a baseline; write one with `{_update('FILE.parquet')}`")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise PropcheckError(f"{path}: no such baseline; create it with `{_update(path)}`") from error
    except OSError as error:
        raise PropcheckError(f"{path}: cannot be read: {error.strerror or error}; {again}") from error
    try:
        return _read(content, path, again, force=force)
    except PropcheckError as error:
        text = str(error)
        raise PropcheckError(text if "`propcheck gate" in text else f"{text}; {again}") from error


def _update(path: Path | str) -> str:
    return f"propcheck gate TARGET --baseline {path} --update-baseline"


def _read(content: bytes, path: Path, again: str, *, force: bool) -> Run:
    table = store.parquet_table(content, path)
    metadata = table.schema.metadata or {}
    version = store.schema_version(table.schema, path)
    if metadata.get(b"propcheck.kind") != _KIND.encode():
        raise PropcheckError(
            f"{path}: is a file of a run directory, not a baseline; give the directory, "
            f"or write a baseline with `{_update('FILE.parquet')}`"
        )
    store.check_version(version, path, again, force=force)
    text = metadata.get(b"propcheck.run", b"")
    if metadata.get(b"propcheck.sha256") != _digest(text, table).encode():
        raise PropcheckError(f"{path}: damaged or modified since propcheck wrote it")
    try:
        document = json.loads(text)
        run = run_from_document(document)
        settings, _ = _moved(
            run.settings, lambda setting: os.path.normpath(path.parent.absolute() / setting), document["beside"]
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PropcheckError(f"{path}: broken metadata ({type(error).__name__}: {error})") from error
    older = version < SCHEMA_VERSION
    sites = _rows(table, store.SUBLAYERS_SCHEMA, path, parameters=False, older=older)
    parameters = _rows(table, store.PARAMETERS_SCHEMA, path, parameters=True, older=older)
    return dataclasses.replace(
        run, settings=settings, sites=store.site_records(sites), parameters=store.parameter_records(parameters)
    )


def _rows(table: pa.Table, schema: pa.Schema, path: Path, *, parameters: bool, older: bool) -> list[dict[str, Any]]:
    unknown = sorted(set(table.schema.names) - set(_SCHEMA.names))
    if "name" not in table.schema.names or (unknown and not older):
        raise PropcheckError(f"{path}: columns differ from schema {SCHEMA_VERSION} ({', '.join(unknown) or 'name'})")
    is_parameter = pc.is_valid(table["name"])
    selected = table.filter(is_parameter if parameters else pc.invert(is_parameter))
    columns = [name for name in schema.names if name in table.schema.names]
    return store.rows(selected.select(columns), schema, path, older=older)


def _moved(
    settings: dict[str, Any], move: Callable[[str], str | None], only: Iterable[str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return settings with their paths moved, and the keys that were moved.

    Parameters
    ----------
    settings
        The settings of a run.
    move
        Returns the new path, or None to leave a path alone.
    only
        Keys to move; by default all that hold paths.
    """
    settings, moved = {**settings}, []
    for section, keys in {"": ("base",), **PATH_SETTINGS}.items():
        table = settings if not section else dict(settings.get(section) or {})
        for key in keys:
            name = f"{section}.{key}".lstrip(".")
            place = table.get(key)
            if isinstance(place, str) and (only is None or name in only) and (new := move(place)) is not None:
                table[key] = new
                moved.append(name)
        if section in settings:
            settings[section] = table
    return settings, moved


def _relative_to(directory: Path, place: str) -> str | None:
    """Return an absolute path relative to a directory, so that two checkouts of one repository give the same baseline.

    None if it is not absolute, or shares only the root with the directory.
    """
    if not Path(place).is_absolute() or place != os.path.normpath(place):
        return None
    try:
        common = Path(os.path.commonpath([directory, place]))
    except ValueError:  # another drive
        return None
    return None if common == Path(common.anchor) else Path(os.path.relpath(place, directory)).as_posix()
