"""Print the result of a command in one format, and write it to files in any others."""

from __future__ import annotations

import io
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck.cli.console import write_stdout
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rich.console import Console

    from propcheck.render.results import Results

Format = Literal["table", "json", "markdown", "github", "junit", "sarif"]
FORMATS: tuple[Format, ...] = typing.get_args(Format)

Tolerances = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="[WHAT=]SHARE",
        help="Allowed change in either direction, e.g. 5%; of one quantity, e.g. loss=1%; or of modules and parameters by glob,"
        " e.g. 'layers.0.*=20%'. Repeatable; default: [gate] of the probe, else 5%.",
    ),
]

_SUFFIXES: dict[str, Format] = {".txt": "table", ".json": "json", ".md": "markdown", ".xml": "junit", ".sarif": "sarif"}
# Width of a table in a file, in characters: 100 hold every column, with several seeds too.
_FILE_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How the result is printed and written."""

    output_format: Annotated[Format, typer.Option(help="Format of standard output.")] = "table"
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Also write the result to a file. Its suffix sets the format (.txt table, .json, .md, .xml junit, .sarif), or "
            "write FORMAT=FILE; repeatable.",
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = (
        False  # read by propcheck.cli.app.run
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A file to write; ``path`` is the file itself if a link was named."""

    given: str
    format: Format
    path: Path


def check_outputs(options: OutputOptions, taken: Collection[Path] = ()) -> None:
    """Check before the work that all files can be written.

    Parameters
    ----------
    options
        The options.
    taken
        Files that the command itself reads or writes.

    Raises
    ------
    PropcheckError
        A format is unknown, a file cannot be written, or two outputs are the same file.
    """
    from propcheck.api.run_directory import check_writable

    seen = {Path(os.path.realpath(path)): "the command itself" for path in taken}
    for file in _files(options):
        if file.path in seen:
            raise PropcheckError(f"--output {file.given}: {seen[file.path]} uses that file as well; name another")
        seen[file.path] = f"--output {file.given}"
        if file.path.is_dir():
            raise PropcheckError(f"--output {file.given}: this is a directory; name a file in it")
        if file.path.exists() and not file.path.is_file():
            raise PropcheckError(f"--output {file.given}: not a regular file; use --output-format for standard output")
        check_writable(file.path.parent)


def emit(options: OutputOptions, table: Callable[[Console], None], views: Mapping[Format, Callable[[], str]]) -> None:
    """Write the files, each under a temporary name first, and print the result.

    Parameters
    ----------
    options
        Checked options.
    table
        Prints the table to a console, which sets its width and colours.
    views
        Renders each of the other formats; only those requested are called, once each.

    Raises
    ------
    PropcheckError
        A file or standard output cannot be written.
    """
    from rich.console import Console

    rendered: dict[Format, str] = {}

    def text(kind: Format) -> str:
        if kind not in rendered:
            rendered[kind] = views[kind]()
        # Without findings some formats are empty; an empty line would not be.
        return rendered[kind].rstrip("\n") + "\n" if rendered[kind] else ""

    for file in _files(options):
        if file.format == "table":
            stream = io.StringIO()
            table(Console(file=stream, width=_FILE_WIDTH, color_system=None))
            _write(file, _unpadded(stream.getvalue()))
        else:
            _write(file, text(file.format))
    if options.output_format == "table":
        console = Console()
        try:
            with console.capture() as capture:
                table(console)
        except OSError as error:  # a full device, which the console notices when it ends
            raise PropcheckError(f"standard output: {error.strerror or error}") from error
        shown = capture.get()
        write_stdout(shown if console.is_terminal else _unpadded(shown))
    else:
        write_stdout(text(options.output_format))


def _unpadded(text: str) -> str:
    """Remove trailing spaces, which would show in a diff."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def machine_views(results: Callable[[], Results]) -> dict[Format, Callable[[], str]]:
    """Return the views that are rendered from :class:`propcheck.render.results.Results`."""
    from propcheck.render.github import to_github
    from propcheck.render.junit import to_junit
    from propcheck.render.sarif import to_sarif

    return {
        "github": lambda: to_github(results()),
        "junit": lambda: to_junit(results()),
        "sarif": lambda: to_sarif(results()),
    }


def _files(options: OutputOptions) -> list[_File]:
    return [_file(text) for text in options.outputs or ()]


def _file(given: str) -> _File:
    before, equals, after = given.partition("=")
    named = bool(equals) and before.isidentifier()
    if named and before not in FORMATS:
        raise PropcheckError(
            f"--output {given}: unknown format {before}; formats: {', '.join(FORMATS)}; for a file of this name write ./{given}"
        )
    name = after if named else given
    if name in ("", "-"):
        raise PropcheckError(f"--output {given}: no file name; use --output-format for standard output")
    path = Path(os.path.realpath(name))
    if named:
        return _File(given, FORMATS[FORMATS.index(before)], path)
    suffix = Path(name).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        said = f"unknown suffix {suffix}" if suffix else "no suffix"
        raise PropcheckError(f"--output {given}: {said}; use {known}, or FORMAT=FILE, e.g. github={given}")
    return _File(given, _SUFFIXES[suffix], path)


def _write(file: _File, text: str) -> None:
    temporary = file.path.with_name(f".{file.path.name}.{os.getpid()}.tmp")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        # A file name may hold bytes that are not text; a question mark in their place loses less than the whole report.
        temporary.write_bytes(text.encode("utf-8", "replace"))
        temporary.replace(file.path)
    except OSError as error:
        raise PropcheckError(f"--output {file.given}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
