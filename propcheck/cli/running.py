"""Scan for a command: with a bar on a terminal, the target's own prints out of the way, and the run written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.cli.options import Request
    from propcheck.records import Run


def run_scan(request: Request, *, command: str | None, quiet: bool) -> Run:
    """Scan what was asked for and judge it; the run has findings and no path.

    Parameters
    ----------
    request
        What to scan.
    command
        The command line, kept in the run.
    quiet
        Draw no bar.
    """
    import rich.console

    import propcheck.api.scanning
    import propcheck.rules
    from propcheck.progress import Bar

    progress = None if quiet else Bar(rich.console.Console(stderr=True))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the target's code prints is not the result
            run = propcheck.api.scanning.scan(
                request.probe, target=request.target, progress=progress, command=command, threads=request.threads
            )
    finally:
        if progress is not None:
            progress.stop()
    findings = propcheck.rules.judge(run, settings=request.probe.rules, select=request.select, ignore=request.ignore)
    return dataclasses.replace(run, findings=findings)


def save(run: Run, directory: Path, *, plots: bool) -> None:
    """Write a run directory, and the plots or none; ``PropcheckError`` where that cannot be."""
    import propcheck.records.store

    try:
        propcheck.records.store.write_run(run, directory)
        if plots:
            from propcheck.render.plots.run_plots import write_plots

            write_plots(run, directory)
        else:  # those of an earlier run would show another one's numbers
            for name in ("forward.png", "backward.png"):
                (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise PropcheckError(f"{directory}: {error.strerror or error}") from error


def run_files(directory: Path) -> list[Path]:
    """Return the files that a run directory holds."""
    from propcheck.records.store import FILES

    return [directory / name for name in ("run.json", *FILES, "forward.png", "backward.png")]


def target_files(target: str) -> list[Path]:
    """Return the file that a target names, if it names one: no output is to be written over it."""
    path = Path(target.rpartition(":")[0] or target) if not Path(target).exists() else Path(target)
    return [path] if path.is_file() else []


def check_not_read(directory: Path, option: str, sides: Sequence[str]) -> None:
    """Refuse to write a run over one that is read: the next call would compare it with itself."""
    for text in sides:
        if Path(text).exists() and directory.resolve() in (Path(text).resolve(), Path(text).resolve().parent):
            raise PropcheckError(f"{option} {text}: the run would be written over it; name another directory with --out")


def check_writable(directory: Path) -> None:
    """Refuse a directory that cannot be written to before the scan, not after it."""
    existing = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise PropcheckError(f"{directory}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PropcheckError(f"{directory}: no permission to write in {existing}")


def write_stdout(text: str) -> None:
    """Write to standard output; a reader that has gone (``| head``) is no error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except AttributeError:  # sys.stdout is None where the shell closed it (>&-)
        raise PropcheckError("standard output is closed") from None
    except OSError as error:
        # What is still buffered would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise PropcheckError(f"standard output: {error.strerror or error}") from error
