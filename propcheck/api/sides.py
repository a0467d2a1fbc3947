"""The sides of a comparison or gate: each is a run that exists, or a target that is scanned when it is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck import records
from propcheck.api.requests import ScanRequest, scan_request
from propcheck.api.run import Run
from propcheck.api.scan import measure_and_judge
from propcheck.config.gate_settings import read_tolerances
from propcheck.errors import PropcheckError
from propcheck.records.load import is_run, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.api.options import ScanOptions
    from propcheck.config.pyproject import ToolSettings
    from propcheck.config.tolerances import Tolerances

Side = records.Run | ScanRequest
# A share for everything, or shares by quantity and by glob over module paths.
Tolerance = str | float | Mapping[str, str | float]


def is_stored(value: object) -> bool:
    """Whether ``value`` names a run on disk."""
    return isinstance(value, Path) or (isinstance(value, str) and is_run(value))


def read_side(value: Any, options: ScanOptions, settings: ToolSettings, *, force: bool = False) -> Side:
    """Read a run (a :class:`propcheck.Run`, a run directory, a Parquet file), or prepare the scan of a target."""
    if isinstance(value, Run):
        return value.record
    if not is_stored(value):
        return scan_request(value, options, settings)
    run = load(Path(value), force=force)
    return run if run.path else dataclasses.replace(run, path=str(value))


def check_options_are_used(sides: Sequence[Side | None], options: ScanOptions) -> None:
    """Refuse options of a scan if there is no target to scan."""
    if options.given and not any(isinstance(side, ScanRequest) for side in sides):
        raise PropcheckError(f"{', '.join(options.given)}: no effect, since every side is a run and nothing is scanned")


def run_side(side: Side) -> records.Run:
    """Return the run of a side; a target is scanned now."""
    return side if isinstance(side, records.Run) else measure_and_judge(side)


def side_tolerances(side: Side, tolerance: Tolerance | Sequence[str] | None) -> Tolerances:
    """Return what may differ: a share, shares by name, or values of ``--tolerance``, over ``[gate]`` of the side's probe."""
    section = _gate_section(side)
    if isinstance(tolerance, Mapping):
        return read_tolerances(section, [f"{key}={value}" for key, value in tolerance.items()], "tolerance")
    if isinstance(tolerance, str | float | int):
        return read_tolerances(section, [str(tolerance)], "tolerance")
    return read_tolerances(section, tolerance or (), "--tolerance")


def _gate_section(side: Side) -> Mapping[str, object]:
    if isinstance(side, ScanRequest):
        return side.probe.gate.model_dump(exclude_unset=True)
    section: Mapping[str, object] = side.settings.get("gate", {})  # runs of version 0.1 have none
    return section
