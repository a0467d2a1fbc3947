"""Write a run directory: the run's files, and its plots or none."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.errors import PropcheckError
from propcheck.records.store import FILES, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from propcheck.records import Run

PLOTS = ("forward.png", "backward.png")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run is written, with or without plots."""

    path: Path
    plots: bool = True

    def write(self, run: Run) -> Run:
        """Write ``run`` and return it with its path. Without plots, those of an earlier run are removed.

        Raises
        ------
        PropcheckError
            The directory cannot be written.
        """
        run = dataclasses.replace(run, path=str(self.path))
        write_run(run, self.path)
        try:
            if self.plots:
                from propcheck.render.plots.run_plots import write_plots

                write_plots(run, self.path)
            else:
                for name in PLOTS:
                    (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise PropcheckError(f"{self.path}: {error.strerror or error}") from error
        return run

    @property
    def files(self) -> list[Path]:
        """The files of the directory."""
        return [self.path / name for name in ("run.json", *FILES, *PLOTS)]

    @property
    def lacks_plots(self) -> bool:
        """Whether plots are wanted and missing."""
        return self.plots and not all((self.path / name).exists() for name in PLOTS)


def check_writable(directory: Path) -> None:
    """Check that a directory can be made and written, before a scan rather than after it.

    Raises
    ------
    PropcheckError
        It cannot.
    """
    existing = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise PropcheckError(f"{directory}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PropcheckError(f"{directory}: no permission to write in {existing}")
