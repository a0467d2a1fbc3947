"""Write the pages of the columns and of the rules: ``python docs/generate.py``."""

from __future__ import annotations

from pathlib import Path

from propcheck import rules
from propcheck.records import NormRecord, ParameterRecord, SiteRecord
from propcheck.records.columns import columns_of

HERE = Path(__file__).parent

_HEAD = """\
# Columns

Generated from the record types in `propcheck/records/` by `python docs/generate.py`; do not edit.

A value that does not apply or was not observed is null, never 0. A computed NaN or infinity is stored as such.
The norm of an activation is exactly its RMS times the root of the width."""

_JSON = """\
## JSON

`--output-format json` prints one strict JSON document. A non-finite number is the string "NaN", "Infinity" or "-Infinity".

| key | content |
|---|---|
| `schema_version` | Version of this format. |
| `run` | Path, target, model, precision, inputs, seeds, engine and versions. |
| `loss` | First loss, `uniform` (ln of the vocabulary), its range over the seeds, and the spread of the logits. |
| `findings` | One entry per finding: rule, name, severity, site, metric, value, expected, message, remedy, source, also. |
| `growth` | One entry per stream, named by its first site: growth law of its RMS and of its gradient over the blocks, \
the factor per block, and the factor over the whole depth. |
| `sublayers` | The rows of `sublayers.parquet`. |

`run.json` in the run directory holds the same keys except `sublayers`, and also:

| key | content |
|---|---|
| `settings` | Every key of the probe. |
| `config_hash`, `command`, `notes` | Hash of the settings, the command line, and the notes of the scan. |
| `unobserved` | One sentence per place that could not be followed. |
| `doublings` | Additions that count the stream twice. |
| `angles` | Sines and cosines of angles in half precision. |
| `origins` | The operation that produced the first NaN or infinity. |
| `files` | SHA-256 digest of each Parquet file. |"""


def columns_page() -> str:
    """Return the text of ``columns.md``."""
    parts = [_HEAD]
    for title, rows, record_type in (
        ("sublayers.parquet", "One row per seed and residual addition (site).", SiteRecord),
        ("parameters.parquet", "One row per parameter or buffer.", ParameterRecord),
        ("norms.parquet", "One row per seed and normalisation.", NormRecord),
    ):
        lines = [
            f"| `{column.name}` | {column.unit or ''} | {column.description.replace('|', chr(92) + '|')} |"
            for column in columns_of(record_type).values()
        ]
        parts.append("\n".join([f"## {title}", "", rows, "", "| column | unit | meaning |", "|---|---|---|", *lines]))
    return "\n\n".join([*parts, _JSON]) + "\n"


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file."""
    return {"columns.md": columns_page(), "rules.md": rules.markdown()}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
