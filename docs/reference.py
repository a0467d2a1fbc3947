"""Write the pages of the command line and of the probe keys: ``make docs``."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

import typer.main

from propcheck.cli.app import app, run

HERE = Path(__file__).parent


def output(*arguments: str) -> str:
    """Return what ``propcheck ARGUMENTS`` prints, in 80 columns."""
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        status = run(arguments)
    if status:
        raise SystemExit(f"propcheck {' '.join(arguments)}: status {status}")
    return stream.getvalue()


def pages() -> dict[str, str]:
    """Return the text of each page by its file's name."""
    parts = ["# Command line\n"]
    for command in (None, *typer.main.get_command(app).commands):  # type: ignore[attr-defined]
        title = f"propcheck {command}" if command else "propcheck"
        help_text = output(*([command] if command else []), "--help").rstrip()
        parts.append(f"## {title}\n\n```text\n{help_text}\n```\n")
    return {"cli.md": "\n".join(parts), "probe-keys.md": output("keys")}


if __name__ == "__main__":
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")
