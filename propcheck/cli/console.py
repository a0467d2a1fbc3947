"""What the commands do besides calling the core: progress, notes on standard error, files that must not be overwritten."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from propcheck.api.options import ScanOptions


def with_progress(options: ScanOptions, *, quiet: bool) -> ScanOptions:
    """Return options whose scans draw a progress bar on standard error."""
    if quiet:
        return options
    import rich.console

    from propcheck.progress import Bar

    return dataclasses.replace(options, progress=Bar(rich.console.Console(stderr=True)))


@contextlib.contextmanager
def result_on_stdout() -> Iterator[None]:
    """Send what the target's code prints to standard error: standard output carries the result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def say(text: str, *, quiet: bool) -> None:
    """Print a note on standard error."""
    if not quiet:
        print(f"propcheck: {text}", file=sys.stderr)


def target_files(target: str) -> list[Path]:
    """Return the file that a target names, if any: no output may overwrite it."""
    path = Path(target.rpartition(":")[0] or target) if not Path(target).exists() else Path(target)
    return [path] if path.is_file() else []


def check_not_read(directory: Path, option: str, sides: Sequence[str]) -> None:
    """Refuse to write a run over one that is read: the next call would compare it with itself.

    Raises
    ------
    PropcheckError
        ``directory`` is one of the sides.
    """
    for text in sides:
        if Path(text).exists() and directory.resolve() in (Path(text).resolve(), Path(text).resolve().parent):
            raise PropcheckError(f"{option} {text}: the run would overwrite it; name another directory with --out")


def write_stdout(text: str) -> None:
    """Write to standard output; a reader that has gone (``| head``) is not an error.

    Raises
    ------
    PropcheckError
        Standard output is closed or full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except AttributeError:  # sys.stdout is None if the shell closed it (>&-)
        raise PropcheckError("standard output is closed") from None
    except OSError as error:
        # What is still buffered would fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise PropcheckError(f"standard output: {error.strerror or error}") from error
