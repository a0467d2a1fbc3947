"""What compare and gate are given: runs that are stored, and targets that are scanned on the spot."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from propcheck.cli import options as shared
from propcheck.cli.running import run_scan
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.config.pyproject import ToolSettings
    from propcheck.records import Run

Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--tolerance",
        metavar="[WHAT=]SHARE",
        help="Share that passes either way, as in 5%; of one quantity, as in loss=1%; or of modules and parameters by a glob, "
        "as in 'layers.0.*=20%'. Repeatable; default: [gate] of the probe, else 5%.",
    ),
]


@dataclass(frozen=True, slots=True)
class Side:
    """A run that is stored, or a target that is yet to be scanned: one of the two is None."""

    run: Run | None
    request: shared.Request | None

    def scanned(self, *, command: str | None, quiet: bool) -> Run:
        """Return the run; a target is scanned now."""
        if self.run is not None:
            return self.run
        assert self.request is not None
        return run_scan(self.request, command=command, quiet=quiet)

    @property
    def gate(self) -> Mapping[str, object]:
        """The keys of ``[gate]`` that came with it; none of runs from before there were any."""
        if self.request is not None:
            return self.request.probe.gate.model_dump(exclude_unset=True)
        assert self.run is not None
        given: Mapping[str, object] = self.run.settings.get("gate", {})
        return given


def side(text: str, options: shared.ScanOptions, settings: ToolSettings, *, force: bool = False) -> Side:
    """Read the run that an argument names, or the probe of the target, before anything is scanned.

    Raises
    ------
    PropcheckError
        It is neither, or cannot be read.
    """
    from propcheck.records.load import is_run, load

    if is_run(text):
        run = load(Path(text), force=force)
        return Side(run if run.path else dataclasses.replace(run, path=text), None)
    return Side(None, shared.request(text, options, settings))


def refuse_unused(options: shared.ScanOptions) -> None:
    """Refuse options of a scan where nothing is scanned; they would change nothing, and look as if they did."""
    given = options.given()
    if given:
        raise PropcheckError(f"{', '.join(given)}: nothing is scanned here, since every side is a run that is stored")
