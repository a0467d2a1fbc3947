"""The command line: each command parses its options, calls the core (:mod:`propcheck.api`) and renders the result.

Standard output carries the result and nothing else; notes, progress and errors go to standard error. Commands import torch,
pydantic and rich when they run, so that ``--help`` is instant.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
import typer.main

from propcheck import __version__
from propcheck.cli.compare import compare
from propcheck.cli.console import write_stdout
from propcheck.cli.gate import gate
from propcheck.cli.listings import keys, probes, rules
from propcheck.cli.scan import scan
from propcheck.cli.sweep import sweep
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _propcheck(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Tell, before training, whether a deep network's signals survive its depth."""
    if version:
        write_stdout(f"propcheck {__version__}\n")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        # Not the help with status 0: a script that lost its command must not pass.
        raise PropcheckError("missing command; propcheck --help lists them")


for command in (scan, compare, gate, sweep, probes, rules, keys):
    app.command()(command)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; every error is one line on standard error."""
    try:
        status = typer.main.get_command(app).main(
            list(arguments), prog_name="propcheck", standalone_mode=False, obj=list(arguments)
        )
        write_stdout("")  # flush what help printed
    except PropcheckError as error:
        return _fail(str(error), arguments)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # noqa: BLE001 - no traceback unless --debug asks for one
        usage = getattr(error, "format_message", None)  # the parser's own errors have it
        if usage is not None:
            return _fail(usage(), arguments)
        hint = "" if "--debug" in arguments else " (a bug in propcheck; --debug shows the traceback)"
        return _fail(f"{type(error).__name__}: {error}{hint}", arguments)
    return status if isinstance(status, int) else 0


def main() -> NoReturn:
    """Entry point of the ``propcheck`` command."""
    sys.exit(run(sys.argv[1:]))


def _fail(message: str, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print("propcheck:", " ".join(message.split()), file=sys.stderr)
    return 2
