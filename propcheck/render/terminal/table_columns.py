"""Table columns of a run along its depth, one row per block or per site; every cell is formatted text."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.formatting import number
from propcheck.records import SiteRecord
from propcheck.records.columns import columns_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.render.terminal.seed_spread import Spread

_SHORT_KINDS = {"attention": "attn", "linear_attention": "linear"}
_FFN = frozenset({"mlp", "moe"})


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a printed table.

    Attributes
    ----------
    heading
        One or two lines.
    cells
        Formatted text, one per row.
    priority
        If the terminal is too narrow, the columns of the lowest priority are left out first, all at once.
    text
        Whether the cells are words rather than numbers.
    """

    heading: str
    cells: tuple[str, ...]
    priority: int
    text: bool = False

    @property
    def width(self) -> int:
        """Width of the widest line, in characters."""
        return max(map(len, (*self.heading.split("\n"), *self.cells)))


def heading_of(name: str) -> str:
    """Return the heading of a column of ``sublayers.parquet``, on one or two lines: its label, shortened."""
    label = columns_of(SiteRecord)[name].label.replace("gradient", "grad")
    return label.replace(" / ", "\n/") if " / " in label else label.replace(" ", "\n", 1)


def block_columns(curve: Profile, spread: Spread) -> list[TableColumn]:
    """Lay out one row per block; a block with several mixers or feed-forward networks takes several rows."""
    rows: list[tuple[str, ...]] = []
    for index, unit in enumerate(curve.units):
        mixers = [record for record in unit if record.sublayer not in _FFN]
        ffns = [record for record in unit if record.sublayer in _FFN]
        of_block = (
            str(curve.label(index)),
            spread.cell(unit[0], "stream_rms"),
            spread.cell(unit[-1], "sum_rms"),
            spread.cell(unit[0], "grad_stream_norm"),
        )
        for line, (mixer, ffn) in enumerate(itertools.zip_longest(mixers, ffns)):
            block, stream, total, gradient = of_block if line == 0 else ("", "", "", "")
            updates = (*_update_cells(mixer, spread), *_update_cells(ffn, spread))
            kinds = "+".join(_kind(record) for record in (mixer, ffn) if record is not None)
            rows.append((block, kinds, stream, *updates, total, gradient))
    headings = (
        (curve.noun, 10),
        ("kinds", 3),
        (heading_of("stream_rms"), 5),
        ("mixer\nupdate", 7),
        ("/stream", 2),
        ("ffn\nupdate", 6),
        ("/stream", 1),
        (heading_of("sum_rms"), 9),
        (heading_of("grad_stream_norm"), 8),
    )
    return columns_from_rows(headings, rows, text=("kinds",))


def columns_from_rows(
    headings: Sequence[tuple[str, int]], rows: Sequence[Sequence[str]], *, text: Sequence[str] = ()
) -> list[TableColumn]:
    """Turn rows of cells into columns.

    Parameters
    ----------
    headings
        Heading and priority of each column.
    rows
        Formatted cells.
    text
        Headings of the columns that hold words.
    """
    return [
        TableColumn(heading, tuple(row[index] for row in rows), priority, text=heading in text)
        for index, (heading, priority) in enumerate(headings)
    ]


def _update_cells(record: SiteRecord | None, spread: Spread) -> tuple[str, str]:
    return ("", "") if record is None else (spread.cell(record, "update_rms"), spread.cell(record, "update_ratio"))


def site_columns(sites: Sequence[SiteRecord], spread: Spread) -> list[TableColumn]:
    """Lay out one row per site."""
    priorities = {
        "stream_rms": 8,
        "update_rms": 9,
        "sum_rms": 10,
        "update_ratio": 6,
        "cosine": 1,
        "swallowed": 3,
        "add_error": 2,
        "grad_stream_norm": 7,
    }

    def cell(record: SiteRecord, name: str) -> str:
        if name == "cosine":
            return _cosine(record.cosine)
        return _share(record.swallowed) if name == "swallowed" else spread.cell(record, name)

    return [
        TableColumn("site", tuple(str(record.site) for record in sites), 11),
        TableColumn("block", tuple("-" if record.block is None else str(record.block) for record in sites), 4),
        TableColumn("kind", tuple(_kind(record) for record in sites), 5, text=True),
        *(
            TableColumn(heading_of(name), tuple(cell(record, name) for record in sites), priority)
            for name, priority in priorities.items()
        ),
    ]


def _cosine(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else number(value)


def _share(value: float | None) -> str:
    return f"{100 * value:.1f}%" if value is not None and math.isfinite(value) else number(value)


def _kind(record: SiteRecord) -> str:
    return _SHORT_KINDS.get(record.sublayer, record.sublayer)


def one_line_names(columns: Sequence[TableColumn]) -> list[str]:
    """Return each heading on one line; a repeated heading is prefixed with the first word of the column before it."""
    headings = [column.heading for column in columns]
    return [
        " ".join([*headings[i - 1].split()[: headings.count(heading) > 1], *heading.split("\n")])
        for i, heading in enumerate(headings)
    ]
