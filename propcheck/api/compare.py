"""Compare runs side by side."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck import records
from propcheck.api.options import ScanOptions, keyword_options
from propcheck.api.run import as_text
from propcheck.api.sides import check_options_are_used, read_side, run_side, side_tolerances
from propcheck.comparison import compare as comparison
from propcheck.config.pyproject import read_settings
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.api.run_directory import RunDirectory
    from propcheck.api.sides import Side, Tolerance
    from propcheck.config.tolerances import Tolerances


class Comparison:
    """Runs side by side. Printing it shows the table of the command line.

    Attributes
    ----------
    record : propcheck.comparison.compare.RunComparison
        Everything, as plain records.
    """

    def __init__(self, record: comparison.RunComparison) -> None:
        self.record = record

    @property
    def contrasts(self) -> tuple[comparison.PairwiseComparison, ...]:
        """Each run after the first, compared with the first."""
        return self.record.contrasts

    def plot(self, directory: str | Path) -> list[Path]:
        """Draw one overlay plot per metric, and return the files.

        Raises
        ------
        PropcheckError
            The directory cannot be written.
        """
        from propcheck.render.plots.overlay import write_overlays

        try:
            return write_overlays(self.record.named, Path(directory))
        except OSError as error:
            raise PropcheckError(f"{directory}: {error.strerror or error}") from error

    def __str__(self) -> str:
        from propcheck.render.terminal.comparison_table import print_comparison

        return as_text(lambda console: print_comparison(self.record, console))

    def __repr__(self) -> str:
        return f"<propcheck.Comparison of {', '.join(run.target for run in self.record.runs)}>"


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """Two or more runs or targets, the first being the reference, and the tolerances above which a number counts as changed."""

    sides: tuple[Side, ...]
    tolerances: Tolerances


def compare(*runs: Any, tolerance: Tolerance | None = None, **options: Any) -> Comparison:
    """Compare runs side by side.

    Parameters
    ----------
    runs
        Two or more: results of :func:`propcheck.scan`, run directories, Parquet files, or targets, which are scanned. The
        others are compared with the first.
    tolerance
        Smaller differences do not count as changes: ``"5%"``, or ``{"loss": "1%", "layers.0.*": "20%"}``. Default: the
        ``[gate]`` section of the last run's probe, else 5 %.
    options
        Options of :func:`propcheck.scan`, for the targets.

    Raises
    ------
    PropcheckError
        A run, target, option or file is wrong (status 2 of the command line).
    """
    return run_comparison(compare_request(runs, keyword_options(options), tolerance))


def compare_request(
    runs: Sequence[Any], options: ScanOptions, tolerance: Tolerance | Sequence[str] | None = None
) -> CompareRequest:
    """Read all sides and check the options; ``tolerance`` may be the values of ``--tolerance``."""
    if len(runs) < 2:
        raise PropcheckError(f"{runs[0] if runs else 'compare'}: needs two or more runs to compare")
    settings = read_settings(Path.cwd())
    sides = tuple(read_side(value, options, settings) for value in runs)
    check_options_are_used(sides, options)
    return CompareRequest(sides, side_tolerances(sides[-1], tolerance))


def run_comparison(request: CompareRequest, directories: Sequence[RunDirectory] | None = None) -> Comparison:
    """Scan the targets and compare; with ``directories``, one per side, the runs of the targets are written."""
    runs = []
    for index, side in enumerate(request.sides):
        run = run_side(side)
        scanned = not isinstance(side, records.Run)
        runs.append(directories[index].write(run) if directories is not None and scanned else run)
    return Comparison(comparison.compare(runs, request.tolerances))
