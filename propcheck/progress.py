"""How a scan tells its caller how far it is, and the bar that the command line draws from it."""

from __future__ import annotations

from typing import Protocol

import rich.console
import rich.progress


class Progress(Protocol):
    """What a scan reports to; ``total`` and ``done`` are in one unit of the engine's choice (operations, say)."""

    def start(self, total: float) -> None:
        """Begin; ``total`` is the work ahead."""

    def update(self, phase: str, block: int | None, blocks: int, done: float) -> None:
        """Report that ``phase`` (forward, backward ...) is at ``block`` of ``blocks`` with ``done`` work behind it."""

    def stop(self) -> None:
        """End, also after an error; may be called twice."""


class Bar:
    """A bar with phase, block and remaining time.

    Parameters
    ----------
    console
        Where the bar is drawn; nothing is drawn when it is no terminal.
    """

    def __init__(self, console: rich.console.Console) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description:<9}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TaskProgressColumn(),
            rich.progress.TextColumn("{task.fields[place]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: rich.progress.TaskID | None = None

    def start(self, total: float) -> None:
        """Draw the empty bar."""
        self._task = self._bar.add_task("build", total=total, place="")
        self._bar.start()

    def update(self, phase: str, block: int | None, blocks: int, done: float) -> None:
        """Move the bar to ``done`` and name the phase and the block (counted from 0, as everywhere)."""
        if self._task is not None:
            place = "" if block is None else f"block {block} of {blocks}"
            self._bar.update(self._task, description=phase, completed=done, place=place)

    def stop(self) -> None:
        """Erase the bar."""
        self._bar.stop()
