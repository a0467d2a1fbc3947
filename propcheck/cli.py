"""The command line: thin commands over importable functions.

Standard output carries the result and nothing else; notes, progress and errors go to standard error. Heavy imports
(torch, pydantic, rich) are made inside the commands, so that ``--help`` is instant.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
import typer.main

from propcheck import __version__
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.probe import Probe
    from propcheck.records import Run
    from propcheck.sources import Override

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_SEVERITIES = ("note", "warning", "error")
_MOST_SEEDS = 10_000


@app.callback(invoke_without_command=True)
def _propcheck(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Tell, before training, whether a deep network's signals survive its depth."""
    if version:
        _write(f"propcheck {__version__}\n")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        # Not the help with status 0: a script whose command is lost must not pass.
        raise PropcheckError("no command; propcheck --help lists them")


@app.command()
def scan(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="A probe file or the name of a bundled probe (`propcheck probes`); a Hugging Face config.json or its folder; "
            "package.module:callable or path/to/file.py:callable, which returns the model or a propcheck.Target."
        ),
    ],
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="A keyword argument of the callable; repeatable."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the probe (`propcheck keys`); repeatable."),
    ] = None,
    precision: Annotated[
        Literal["bf16", "fp16", "fp32", "bf16-mixed"] | None,
        typer.Option(help="Override precision.preset; default: the probe's, the config's, or what the code builds."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Override inputs.tokens: the tokens of each sequence.")] = None,
    batch: Annotated[int | None, typer.Option(help="Override inputs.batch: the sequences or images.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Override scan.seeds: 0,1 or 0..4, both ends included.")] = None,
    memory: Annotated[str | None, typer.Option(help="Override scan.memory: the budget, as in 5GiB, or auto.")] = None,
    device: Annotated[str | None, typer.Option(help="Override scan.device: cpu or cuda[:N].")] = None,
    shadow: Annotated[
        Literal["none", "fp32"] | None, typer.Option(help="Override scan.shadow: fp32 compares with the same weights in fp32.")
    ] = None,
    evaluate: Annotated[bool, typer.Option("--eval", help="Run in evaluation mode, without dropout.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the run is written; default: reports/NAME, overwritten.")
    ] = None,
    output_format: Annotated[Literal["table", "json"], typer.Option(help="What is printed on standard output.")] = "table",
    detail: Annotated[
        Literal["block", "site"] | None, typer.Option(help="A row of the table is a block (default) or a site.")
    ] = None,
    fail_level: Annotated[
        Literal["error", "warning", "note", "never"] | None,
        typer.Option(help="Least severity of a finding that gives status 1; default: error."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="IDS", help="Judge by these rules only: ids or names, separated by commas; repeatable."),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="IDS", help="Leave these rules out, written in the same way; repeatable.")
    ] = None,
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw the two plots.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes on standard error.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads; default: as many as torch takes.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Run one forward and one backward pass of the full model and say where the signal is lost.

    Status 0: no finding at or above the fail level; 1: there is one; 2: a bad target, option or file; 130: interrupted.
    """
    del debug  # read by `run`, which catches the errors
    from propcheck.probe import load_probe
    from propcheck.settings import read_settings
    from propcheck.sources import Override, parse_override

    settings = read_settings(Path.cwd())
    options: list[tuple[str, str, object]] = [
        ("--precision", "precision.preset", precision),
        ("--tokens", "inputs.tokens", tokens),
        ("--batch", "inputs.batch", batch),
        ("--seeds", "scan.seeds", None if seeds is None else _seeds(seeds)),
        ("--memory", "scan.memory", memory),
        ("--device", "scan.device", device),
        ("--shadow", "scan.shadow", shadow),
        ("--eval", "scan.mode", "eval" if evaluate else None),
    ]
    overrides: list[str | Override] = [*(assignments or ())]
    overrides += [parse_override(one, "--arg", "python.args") for one in arguments or ()]
    overrides += [Override(key, value, option) for option, key, value in options if value is not None]
    probe = load_probe(target, overrides, {"scan": settings.scan, "rules": settings.judging})
    directory = out or Path(settings.out or Path("reports") / probe.name)
    _check_writable(directory)

    import rich.console

    import propcheck.rules
    from propcheck.api import check_rules

    selected = _rule_ids("--select", select) or settings.select
    ignored = _rule_ids("--ignore", ignore) or settings.ignore
    check_rules(probe, (*selected, *ignored))

    import propcheck.scanning
    import propcheck.store
    from propcheck.progress import Bar

    progress = None if quiet else Bar(rich.console.Console(stderr=True))
    command = shlex.join(["propcheck", *ctx.obj])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the target's code prints is not the result
            run = propcheck.scanning.scan(
                probe, target=target, progress=progress, command=command, threads=threads or settings.threads
            )
    finally:
        if progress is not None:
            progress.stop()
    findings = propcheck.rules.judge(run, settings=probe.rules, select=selected, ignore=ignored)
    run = dataclasses.replace(run, findings=findings, path=str(directory))
    run = dataclasses.replace(run, notes=(*run.notes, *_beside(probe, run, directory)))
    try:
        propcheck.store.write_run(run, directory)
        if plots:
            from propcheck.report.plots import write_plots

            write_plots(run, directory)
        else:  # those of an earlier run would show another one's numbers
            for name in ("forward.png", "backward.png"):
                (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise PropcheckError(f"{directory}: {error.strerror or error}") from error
    if not quiet and not (output_format == "table" and sys.stdout.isatty()):  # where the table itself does not show it
        for note in run.notes:
            print(f"propcheck: {note}", file=sys.stderr)
    if not quiet and output_format == "json":
        print(f"propcheck: wrote {directory}", file=sys.stderr)
    _write(_rendered(run, output_format, detail or settings.detail))
    raise typer.Exit(_status(run, fail_level or settings.fail_level))


def _beside(probe: Probe, run: Run, directory: Path) -> list[str]:
    """Say what differs from the probe that this one varies, and from its run where that lies beside this one."""
    from propcheck.beside import comparable, measured_note, settings_note
    from propcheck.probe import differences, load_probe
    from propcheck.store import read_run

    if not probe.base:
        return []
    base = load_probe(probe.base)
    notes = [settings_note(base.name, differences(probe, base))]
    try:
        other = read_run(directory.parent / base.name)
    except PropcheckError:
        return notes  # not scanned yet, or by another version
    return [*notes, measured_note(run, other, base.name)] if comparable(run, other) else notes


@app.command()
def probes() -> None:
    """List the bundled probes."""
    from propcheck.probe import load_probe
    from propcheck.sources import bundled_probes

    loaded = {name: load_probe(name) for name in bundled_probes()}
    width = max(map(len, loaded))
    _write("".join(f"{name:<{width}}  {probe.description}\n" for name, probe in loaded.items()))


@app.command()
def rules(
    rule: Annotated[str | None, typer.Argument(metavar="[ID]", help="Explain this rule: its id or its name.")] = None,
) -> None:
    """List the rules, or explain one: what it sees, why it matters, its threshold and source, what to do (Markdown)."""
    from propcheck.rules import ALL, explain

    if rule is not None:
        _write(explain(rule) + "\n")
    else:
        width = max(len(one.name) for one in ALL)
        _write("".join(f"{one.id}  {one.name:<{width}}  {one.severity}\n" for one in ALL))


@app.command()
def keys() -> None:
    """Print every key of a probe file: what it takes, its default and what it does (Markdown)."""
    from propcheck.keys import page
    from propcheck.probe import Probe

    _write(page(Probe))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; every error is one line on standard error."""
    try:
        status = typer.main.get_command(app).main(
            list(arguments), prog_name="propcheck", standalone_mode=False, obj=list(arguments)
        )
        _write("")  # flush what help printed
    except PropcheckError as error:
        return _fail(str(error), arguments)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # noqa: BLE001 - the last line of defence: no traceback unless asked for
        usage = getattr(error, "format_message", None)  # the parser's own errors have it
        if usage is not None:
            return _fail(usage(), arguments)
        hint = "" if "--debug" in arguments else " (a fault of propcheck's; --debug shows where)"
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


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        try:
            ends = (int(first), int(last if dots else first))
        except ValueError:
            raise PropcheckError(f"--seeds {text}: must be whole numbers, as in 0,1 or 0..4") from None
        if ends[1] - ends[0] >= _MOST_SEEDS:  # each is a whole scan, so this is a slip of the hand
            raise PropcheckError(f"--seeds {text}: {part} is more than {_MOST_SEEDS} seeds")
        seeds += range(ends[0], ends[1] + 1)
    return seeds


def _rule_ids(option: str, values: Sequence[str] | None) -> tuple[str, ...]:
    """Split ``--select PC201,PC202 --select PC301``; empty where the option was not given."""
    for value in values or ():
        if not value.replace(",", "").strip():  # no rule is not all rules
            raise PropcheckError(f"{option} {value!r}: names no rule; it takes ids or names, as in PC201,PC202")
    return tuple(part for value in values or () for one in value.split(",") if (part := one.strip()))


def _check_writable(directory: Path) -> None:
    """Refuse a directory that cannot be written to before the scan, not after it."""
    existing = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    if not existing.is_dir():
        raise PropcheckError(f"{directory}: {existing} is not a directory")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PropcheckError(f"{directory}: no permission to write in {existing}")


def _rendered(run: Run, output_format: str, detail: Literal["block", "site"]) -> str:
    if output_format == "json":
        from propcheck.report.formats import to_json

        return to_json(run).rstrip("\n") + "\n"
    import rich.console

    from propcheck.report.table import print_run

    console = rich.console.Console()
    with console.capture() as capture:
        print_run(run, console, detail=detail)
    return capture.get()


def _status(run: Run, fail_level: str) -> int:
    if fail_level == "never":
        return 0
    failing = _SEVERITIES[_SEVERITIES.index(fail_level) :]
    return int(any(finding.severity in failing for finding in run.findings))


def _write(text: str) -> None:
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
