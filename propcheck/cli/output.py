"""Where the result of a command goes and in which formats: one on standard output, any number in files."""

from __future__ import annotations

import io
import os
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from propcheck.cli.running import check_writable, write_stdout
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rich.console import Console

    from propcheck.render.results import Results

Format = Literal["table", "json", "markdown", "github", "junit", "sarif"]
FORMATS: tuple[Format, ...] = typing.get_args(Format)

_SUFFIXES: dict[str, Format] = {".txt": "table", ".json": "json", ".md": "markdown", ".xml": "junit", ".sarif": "sarif"}
# Characters of a line of a table in a file: no terminal says how many it has, and 100 hold every column with several seeds.
_FILE_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is printed and written; every command with a result takes all of them."""

    output_format: Annotated[Format, typer.Option(help="What is printed on standard output.")] = "table"
    outputs: Annotated[
        list[str] | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the result to a file as well, in the format of its suffix (.txt table, .json, .md, .xml junit, .sarif) "
            "or of FORMAT=FILE; repeatable.",
        ),
    ] = None
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = (
        False  # read by propcheck.cli.app.run
    )


@dataclass(frozen=True, slots=True)
class _File:
    """One file to write; ``path`` is the file itself where a link was named."""

    given: str
    format: Format
    path: Path


def check(options: OutputOptions, taken: Collection[Path] = ()) -> None:
    """Refuse, before anything is computed, files that cannot be written.

    Parameters
    ----------
    options
        The options.
    taken
        Files that the command itself writes.

    Raises
    ------
    PropcheckError
        A format is not known, a directory is none or cannot be written to, or two outputs are one file.
    """
    seen = {Path(os.path.realpath(path)): "the command itself" for path in taken}
    for file in _files(options):
        if file.path in seen:
            raise PropcheckError(f"--output {file.given}: {seen[file.path]} uses that file too; name another")
        seen[file.path] = f"--output {file.given}"
        if file.path.is_dir():
            raise PropcheckError(f"--output {file.given}: is a directory; name a file in it")
        if file.path.exists() and not file.path.is_file():
            raise PropcheckError(f"--output {file.given}: is no regular file; --output-format sets what is printed")
        check_writable(file.path.parent)


def emit(options: OutputOptions, table: Callable[[Console], None], views: Mapping[Format, Callable[[], str]]) -> None:
    """Write the files, each under a temporary name first, and print what is asked for.

    Parameters
    ----------
    options
        Checked options.
    table
        Prints the table to a console, which decides about width and colours.
    views
        Renders each format but ``table``; only those that are asked for are called, once each.

    Raises
    ------
    PropcheckError
        A file or standard output takes nothing.
    """
    from rich.console import Console

    rendered: dict[Format, str] = {}

    def text(kind: Format) -> str:
        if kind not in rendered:
            rendered[kind] = views[kind]()
        # Nothing found is nothing printed, not an empty line.
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
    """Leave out the spaces that fill lines, which a comparison of two files would show."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def machine_views(results: Callable[[], Results]) -> dict[Format, Callable[[], str]]:
    """Return the views that are made of :class:`propcheck.render.results.Results` alone."""
    from propcheck.render.github import to_github
    from propcheck.render.junit import to_junit
    from propcheck.render.sarif import to_sarif

    return {
        "github": lambda: to_github(results()),
        "junit": lambda: to_junit(results()),
        "sarif": lambda: to_sarif(results()),
    }


def _files(options: OutputOptions) -> list[_File]:
    return [_file(one) for one in options.outputs or ()]


def _file(given: str) -> _File:
    before, equals, after = given.partition("=")
    named = bool(equals) and before.isidentifier()
    if named and before not in FORMATS:
        raise PropcheckError(
            f"--output {given}: no format {before}; there are {', '.join(FORMATS)}; a file of that name is ./{given}"
        )
    name = after if named else given
    if name in ("", "-"):
        raise PropcheckError(f"--output {given}: names no file; --output-format sets what is printed")
    path = Path(os.path.realpath(name))
    if named:
        return _File(given, FORMATS[FORMATS.index(before)], path)
    suffix = Path(name).suffix.lower()
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise PropcheckError(f"--output {given}: {suffix or 'no suffix'} is no format; end in {known}, or write github={given}")
    return _File(given, _SUFFIXES[suffix], path)


def _write(file: _File, text: str) -> None:
    temporary = file.path.with_name(f".{file.path.name}.{os.getpid()}.tmp")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        # A name of bytes that are no text is in no encoding; a question mark in its place loses less than the whole report.
        temporary.write_bytes(text.encode("utf-8", "replace"))
        temporary.replace(file.path)
    except OSError as error:
        raise PropcheckError(f"--output {file.given}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
