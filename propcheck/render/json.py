"""A run as the JSON document of ``--output-format json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.growth import with_growth
from propcheck.records.document import dumps, full_document

if TYPE_CHECKING:
    from propcheck.records import Run


def to_json(run: Run) -> str:
    """Write a run as JSON.

    Parameters
    ----------
    run
        The run, with its findings.

    Returns
    -------
    str
        Strict JSON without a final newline; a non-finite number is the string "NaN", "Infinity" or "-Infinity".
    """
    return dumps(full_document(with_growth(run)))
