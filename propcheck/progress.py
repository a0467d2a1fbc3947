"""Report the progress of a scan, and draw it as a bar."""

from __future__ import annotations

from typing import Protocol

import rich.console
import rich.progress


class Progress(Protocol):
    """Receives the progress of a scan; ``total`` and ``done`` share one unit."""

    def start(self, total: float) -> None:
        """Start; ``total`` is the work ahead."""

    def update(self, phase: str, block: int | None, blocks: int, done: float) -> None:
        """Report that ``phase`` (forward, backward ...) is at ``block`` of ``blocks``, with ``done`` work finished."""

    def stop(self) -> None:
        """Stop, also after an error; may be called twice."""


class Bar:
    """A bar with phase, block and remaining time; a new one is drawn after each start.

    Parameters
    ----------
    console
        Where the bar is drawn; nothing is drawn if it is not a terminal.
    """

    def __init__(self, console: rich.console.Console) -> None:
        self._console = console
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)

    def start(self, total: float) -> None:
        """Draw an empty bar."""
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<9}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[place]}"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("build", total=total, place="")
        self._bar.start()

    def update(self, phase: str, block: int | None, blocks: int, done: float) -> None:
        """Move the bar to ``done``, and show the phase and the block (counted from 0)."""
        if self._bar is not None:
            place = "" if block is None else f"block {block} of {blocks}"
            self._bar.update(self._task, description=phase, completed=done, place=place)

    def stop(self) -> None:
        """Erase the bar."""
        if self._bar is not None:
            self._bar.stop()
