"""The baseline of a gate: one small Parquet file that is meant to be committed, and a summary beside it for its diffs.

It holds what a gate compares and nothing that changes from call to call, so that the same run gives the same bytes whenever
and wherever it is made. Rows of both kinds lie in one table, whose shared columns they share; a row with a ``name`` is a
parameter, one without a site.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from propcheck.analysis import profile as depth
from propcheck.config.resolve import PATHS
from propcheck.errors import PropcheckError
from propcheck.formatting import count, number
from propcheck.records import SCHEMA_VERSION, store
from propcheck.records.document import dumps, run_from_document, stored_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from propcheck.records import Finding, Place, Run, SiteRecord

_KIND = "baseline"
_TITLE = "# Baseline: "
# Nullable throughout: a row has the columns of its kind alone. What may not be null there is checked when it is read.
_SCHEMA: pa.Schema = pa.schema(
    {field.name: field.type for field in (*store.PARAMETERS_SCHEMA, *store.SUBLAYERS_SCHEMA)}  # name first: it tells the kinds
)


def kept(run: Run) -> Run:
    """Return what a baseline keeps of a run: what :func:`read_baseline` gives back.

    Without path, command, notes, norms, doublings, angles and origins. Of the engine mode, device and threads are kept; its
    time, peak and budget, which no baseline has, are 0.
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


def write_baseline(run: Run, path: Path) -> None:
    """Write a run as a baseline, and ``path`` with the suffix ``.md`` beside it: a summary that a diff can show.

    Both are written under temporary names and renamed, the Parquet file last: where that fails, the old baseline stays.

    Parameters
    ----------
    run
        The run, with its findings.
    path
        A file that ends with ``.parquet``; its directory is made if need be.

    Raises
    ------
    PropcheckError
        The name is another, a file that is no summary has the summary's, or the files cannot be written.
    """
    if path.suffix != ".parquet":
        raise PropcheckError(f"{path}: a baseline is a Parquet file; name one that ends with .parquet")
    if path.name in store.FILES:
        raise PropcheckError(f"{path}: the name of a file of a run directory; name the baseline otherwise")
    path = path.resolve()  # of a link, the file that it leads to
    run = kept(run)
    directory = Path(os.path.abspath(path.parent))  # noqa: PTH100 - resolve() would follow links, which the settings do not
    settings, moved = _moved(run.settings, lambda place: _seen_from(directory, place))
    document = {**stored_document(dataclasses.replace(run, settings=settings)), "beside": moved}
    summary = path.with_suffix(".md")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (path, summary):  # what would refuse the one file after the other is renamed
            if file.is_dir():
                raise PropcheckError(f"{file}: a directory; a baseline is a file")
        if summary.exists() and not summary.read_bytes().startswith(_TITLE.encode()):
            raise PropcheckError(
                f"{summary}: is no summary of a baseline, which would go there; remove it, or name another baseline file"
            )
        if path.exists() and _is_another_parquet(path):
            raise PropcheckError(f"{path}: a Parquet file that is no baseline; remove it, or name another baseline file")
        store.replace_all(path.parent, {summary.name: summarised(run).encode(), path.name: _parquet(run, document)})
    except OSError as error:
        raise PropcheckError(f"cannot write the baseline {path}: {error.strerror or error}") from error


def _is_another_parquet(path: Path) -> bool:
    """Whether a file is whole Parquet and of something else. What cannot be read may be a baseline that was cut short."""
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
    # The Arrow schema would hold all metadata a second time, and says nothing of these types that Parquet does not.
    with pq.ParquetWriter(buffer, _SCHEMA, compression="zstd", store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return buffer.getvalue()


def _digest(document: bytes, table: pa.Table) -> str:
    """Return a digest of all that is read: a damaged file may still be whole Parquet."""
    return hashlib.sha256(document + repr(table.to_pydict()).encode()).hexdigest()


def read_baseline(path: Path, *, force: bool = False) -> Run:
    """Read a baseline back.

    Parameters
    ----------
    path
        The file.
    force
        Read an older schema as far as it goes: a nullable column that it lacks is null, one that there is no more is left out.

    Returns
    -------
    Run
        Equal to :func:`kept` of the run that was written.

    Raises
    ------
    PropcheckError
        The file is missing, empty, cut short, damaged, no baseline, of a newer schema, or, without ``force``, of an older one.
    """
    again = f"make it again with `{_update(path)}`"
    if path.is_dir():
        raise PropcheckError(f"{path}: a directory, not a baseline; write one with `{_update('FILE.parquet')}`")
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise PropcheckError(f"{path}: no such baseline; make it with `{_update(path)}`") from error
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
            f"{path}: a file of a run directory, not a baseline; name the directory, "
            f"or write a baseline with `{_update('FILE.parquet')}`"
        )
    store.check_version(version, path, again, force=force)
    text = metadata.get(b"propcheck.run", b"")
    if metadata.get(b"propcheck.sha256") != _digest(text, table).encode():
        raise PropcheckError(f"{path}: damaged, or changed since propcheck wrote it")
    try:
        document = json.loads(text)
        run = run_from_document(document)
        settings, _ = _moved(run.settings, lambda place: os.path.normpath(path.parent.absolute() / place), document["beside"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise PropcheckError(f"{path}: its metadata are broken ({type(error).__name__}: {error})") from error
    older = version < SCHEMA_VERSION
    sites = _rows(table, store.SUBLAYERS_SCHEMA, path, parameters=False, older=older)
    parameters = _rows(table, store.PARAMETERS_SCHEMA, path, parameters=True, older=older)
    return dataclasses.replace(
        run, settings=settings, sites=store.site_records(sites), parameters=store.parameter_records(parameters)
    )


def _rows(table: pa.Table, schema: pa.Schema, path: Path, *, parameters: bool, older: bool) -> list[dict[str, Any]]:
    unknown = sorted(set(table.schema.names) - set(_SCHEMA.names))
    if "name" not in table.schema.names or (unknown and not older):
        raise PropcheckError(f"{path}: columns are not those of schema {SCHEMA_VERSION} ({', '.join(unknown) or 'name'})")
    is_parameter = pc.is_valid(table["name"])
    own = table.filter(is_parameter if parameters else pc.invert(is_parameter))
    return store.rows(own.select([name for name in schema.names if name in table.schema.names]), schema, path, older=older)


def _moved(
    settings: dict[str, Any], move: Callable[[str], str | None], only: Iterable[str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return settings with their paths moved, and the keys where ``move`` gave one; ``only`` those keys are tried."""
    settings, moved = {**settings}, []
    for section, keys in {"": ("base",), **PATHS}.items():
        table = settings if not section else dict(settings.get(section) or {})
        for key in keys:
            name = f"{section}.{key}".lstrip(".")
            place = table.get(key)
            if isinstance(place, str) and (only is None or name in only) and (there := move(place)) is not None:
                table[key] = there
                moved.append(name)
        if section in settings:
            settings[section] = table
    return settings, moved


def _seen_from(directory: Path, place: str) -> str | None:
    """Return an absolute path as seen from a directory: two checkouts of one repository then have the same baseline.

    None where it is not absolute, or the two have nothing in common but the root.
    """
    if not Path(place).is_absolute() or place != os.path.normpath(place):
        return None
    try:
        common = Path(os.path.commonpath([directory, place]))
    except ValueError:  # another drive
        return None
    return None if common == Path(common.anchor) else Path(os.path.relpath(place, directory)).as_posix()


def summarised(run: Run) -> str:
    """Write a run in lines of Markdown that change only where the run does: no time, no machine, three significant digits."""
    model, inputs, curve = run.model, run.inputs, depth.profile(run)
    versions = [f"{name} {run.versions[name]}" for name in ("propcheck", "torch") if name in run.versions]
    lines = [
        f"{_TITLE}{run.target}",
        "",
        "Written by `propcheck gate --update-baseline` with the Parquet file beside it; what is gated is in that one.",
        "",
        f"- model: {model.class_name}, {count(model.parameters, 'parameter')}, width {model.width}",
        f"- depth: {count(model.blocks, 'block')}, {count(model.sites, 'site')}, placement {model.placement}",
        f"- precision: {run.precision}",
        f"- inputs: batch {inputs.batch}, {count(inputs.tokens, 'token')}, {inputs.source}",
        f"- seeds: {', '.join(map(str, run.seeds))}",
        f"- configuration: {run.config_hash[:12]}",
        f"- versions: {', '.join(versions)}",
        f"- first loss: {number(run.loss.value)}; of a uniform guess {number(run.loss.uniform)}",
        "",
        "## Depth",
        "",
        "RMS of the stream and of the updates, norms of the gradients of the stream and of the parameters.",
        "",
        f"| {curve.noun} | sublayers | stream in | updates | gradient in | parameters' gradient |",
        "|---|---|---|---|---|---|",
        *(_row(run, curve.noun, unit) for unit in curve.units),
    ]
    if curve.sites:
        last = curve.sites[-1]
        lines.append(f"| after | | {number(last.sum_rms)} | | {number(last.grad_sum_norm)} | |")
    if curve.noun == "block":
        lines.append(f"| elsewhere | | | | | {number(_parameters_gradient(run, None))} |")
    findings = [_finding_line(finding) for finding in run.findings] or ["None."]
    return "\n".join([*lines, "", "## Findings", "", *findings]) + "\n"


def _row(run: Run, noun: str, unit: Sequence[SiteRecord]) -> str:
    first = unit[0]
    outside = first.block is None
    cells = (
        f"site {first.site}" if outside and noun == "block" else str(first.site if outside else first.block),
        ", ".join(record.sublayer for record in unit),
        number(first.stream_rms),
        ", ".join(number(record.update_rms) for record in unit),
        number(first.grad_stream_norm),
        number(first.param_grad_norm if outside else _parameters_gradient(run, first.block)),
    )
    return f"| {' | '.join(cells)} |"


def _parameters_gradient(run: Run, block: int | None) -> float | None:
    """Return the norm of the gradients of all parameters of a block, or of those outside the blocks."""
    norms = [one.grad_norm for one in run.parameters if one.block == block and one.grad_norm is not None]
    return math.hypot(*norms) if norms else None


def _finding_line(finding: Finding) -> str:
    place = "" if finding.site is None else _place(finding.site)
    return f"- {finding.severity} {finding.rule} {finding.name}{place}: {' '.join(finding.message.split())}"


def _place(place: Place) -> str:
    parts = [
        "" if place.site is None else f"site {place.site}",
        "" if place.block is None else f"block {place.block}",
        place.parameter or place.module or "",
    ]
    return f" ({', '.join(part for part in parts if part)})" if any(parts) else ""
