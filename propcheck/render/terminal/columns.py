"""The columns that show a run along its depth, a row a block or a site; every cell is finished text."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.formatting import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import SiteRecord
    from propcheck.render.terminal.seed_spread import Spread

_SHORT_KINDS = {"attention": "attn", "linear_attention": "linear"}
_FFN = frozenset({"mlp", "moe"})


@dataclass(frozen=True, slots=True)
class Column:
    """A heading of one or two lines, the cells under it, and when it goes: the lowest ``keep`` first, equal ones at once."""

    heading: str
    cells: tuple[str, ...]
    keep: int
    text: bool = False

    @property
    def width(self) -> int:
        """Characters that the widest line of it takes."""
        return max(map(len, (*self.heading.split("\n"), *self.cells)))


def block_columns(curve: Profile, spread: Spread) -> list[Column]:
    """Lay out a row a block; a block with several mixers or several feed-forward networks takes more rows."""
    rows: list[tuple[str, ...]] = []
    for index, unit in enumerate(curve.units):
        mixers = [record for record in unit if record.sublayer not in _FFN]
        ffns = [record for record in unit if record.sublayer in _FFN]
        first, last = unit[0], unit[-1]
        ends = (
            str(curve.label(index)),
            spread.cell(first, "stream_rms"),
            spread.cell(last, "sum_rms"),
            spread.cell(first, "grad_stream_norm"),
        )
        for line, (mixer, ffn) in enumerate(itertools.zip_longest(mixers, ffns)):
            block, stream, total, gradient = ends if line == 0 else ("", "", "", "")
            updates = (*_updates(mixer, spread), *_updates(ffn, spread))
            rows.append((block, _pair(mixer, ffn), stream, *updates, total, gradient))
    headings = (
        (curve.noun, 10),
        ("kinds", 3),
        ("stream\nRMS in", 5),
        ("mixer\nupdate", 7),
        ("/stream", 2),
        ("ffn\nupdate", 6),
        ("/stream", 1),
        ("sum\nRMS out", 9),
        ("gradient\nnorm in", 8),
    )
    return [
        Column(heading, tuple(row[i] for row in rows), keep, text=heading == "kinds")
        for i, (heading, keep) in enumerate(headings)
    ]


def _pair(mixer: SiteRecord | None, ffn: SiteRecord | None) -> str:
    return "+".join(_kind(record) for record in (mixer, ffn) if record is not None)


def _updates(record: SiteRecord | None, spread: Spread) -> tuple[str, str]:
    return ("", "") if record is None else (spread.cell(record, "update_rms"), spread.cell(record, "update_ratio"))


def site_columns(sites: Sequence[SiteRecord], spread: Spread) -> list[Column]:
    """Lay out a row a site."""

    def plain(record: SiteRecord, name: str) -> str:
        return _share(record.swallowed) if name == "swallowed" else _cosine(record.cosine)

    numbers = (
        ("stream\nRMS", 8, "stream_rms", spread.cell),
        ("update\nRMS", 9, "update_rms", spread.cell),
        ("sum\nRMS", 10, "sum_rms", spread.cell),
        ("update\n/stream", 6, "update_ratio", spread.cell),
        ("cosine", 1, "cosine", plain),
        ("lost in\nadding", 3, "swallowed", plain),
        ("add\nerror", 2, "add_error", spread.cell),
        ("grad\nnorm in", 7, "grad_stream_norm", spread.cell),
    )
    return [
        Column("site", tuple(str(record.site) for record in sites), 11),
        Column("block", tuple("-" if record.block is None else str(record.block) for record in sites), 4),
        Column("kind", tuple(_kind(record) for record in sites), 5, text=True),
        *(Column(heading, tuple(write(r, name) for r in sites), keep) for heading, keep, name, write in numbers),
    ]


def _cosine(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else number(value)


def _share(value: float | None) -> str:
    return f"{100 * value:.1f}%" if value is not None and math.isfinite(value) else number(value)


def _kind(record: SiteRecord) -> str:
    return _SHORT_KINDS.get(record.sublayer, record.sublayer)


def one_line_names(columns: Sequence[Column]) -> list[str]:
    """Write each heading on one line; one that repeats gets the word of the column that it belongs to, the one before."""
    headings = [column.heading for column in columns]
    return [
        " ".join([*headings[i - 1].split()[: headings.count(heading) > 1], *heading.split("\n")])
        for i, heading in enumerate(headings)
    ]
