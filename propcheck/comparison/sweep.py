"""The records of a sweep: its axes, and what became of each cell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from propcheck.config.grid import Axis, Cell
    from propcheck.records import Run


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one cell: its run, or the reason why it has none."""

    cell: Cell
    status: Literal["scanned", "skipped", "failed"]
    run: Run | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class SweepResult:
    """All cells of a sweep; ``directory`` holds their runs, if they were written."""

    target: str
    directory: Path | None
    axes: tuple[Axis, ...]
    outcomes: tuple[Outcome, ...]
