"""The result of a scan."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck.api.run_directory import RunDirectory

if TYPE_CHECKING:
    from collections.abc import Callable

    import pandas as pd
    from rich.console import Console

    from propcheck import records


class Run:
    """The result of one scan. Printing it shows the table of the command line.

    Attributes
    ----------
    record : propcheck.records.Run
        Everything, as plain records.
    """

    def __init__(self, record: records.Run) -> None:
        self.record = record

    @property
    def sublayers(self) -> pd.DataFrame:
        """One row per seed and site, with the columns of ``sublayers.parquet``."""
        from propcheck.records.store import SUBLAYERS_SCHEMA

        return _frame(self.record.sites, SUBLAYERS_SCHEMA)

    @property
    def parameters(self) -> pd.DataFrame:
        """One row per parameter or buffer, with the columns of ``parameters.parquet``."""
        from propcheck.records.store import PARAMETERS_SCHEMA

        return _frame(self.record.parameters, PARAMETERS_SCHEMA)

    @property
    def norms(self) -> pd.DataFrame:
        """One row per seed and normalisation, with the columns of ``norms.parquet``."""
        from propcheck.records.store import NORMS_SCHEMA

        return _frame(self.record.norms, NORMS_SCHEMA)

    @property
    def findings(self) -> tuple[records.Finding, ...]:
        """The findings, each with ``rule``, ``name``, ``severity``, ``site``, ``message`` and ``remedy``."""
        return self.record.findings

    @property
    def loss(self) -> records.LossInfo:
        """The initial loss, ``loss.value``, and that of a uniform guess, ``loss.uniform`` (or None)."""
        return self.record.loss

    @property
    def model(self) -> records.ModelInfo:
        """Class, parameters, blocks, sites, width and placement."""
        return self.record.model

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on how the scan was done."""
        return self.record.notes

    def save(self, directory: str | Path, *, plots: bool = True) -> Path:
        """Write the run directory, as the command line does.

        Parameters
        ----------
        directory
            Created if it does not exist. Files of an earlier run are overwritten.
        plots
            Draw the two plots. Otherwise those of an earlier run are removed.

        Raises
        ------
        PropcheckError
            The directory cannot be written.
        """
        target = RunDirectory(Path(directory), plots=plots)
        self.record = target.write(self.record)
        return target.path

    def save_baseline(self, path: str | Path) -> Path:
        """Write a baseline file and its summary.

        Raises
        ------
        PropcheckError
            The file cannot be written, or the run has a NaN or an infinity.
        """
        from propcheck.api.baseline import make_baseline

        make_baseline(self.record, Path(path))
        return Path(path)

    def __str__(self) -> str:
        from propcheck.render.terminal.run_table import print_run

        return as_text(lambda console: print_run(self.record, console))

    def __repr__(self) -> str:
        model, findings = self.record.model, len(self.record.findings)
        return f"<propcheck.Run of {self.record.target}: {model.class_name}, {model.sites} sites, {findings} findings>"


def as_text(show: Callable[[Console], None]) -> str:
    """Return what a view prints on a console of 80 columns."""
    from rich.console import Console

    stream = io.StringIO()
    show(Console(file=stream, width=80))
    return stream.getvalue().rstrip("\n")


def _frame(rows: tuple[Any, ...], schema: Any) -> pd.DataFrame:
    import pyarrow as pa

    columns = [pa.array([getattr(row, field.name) for row in rows], type=field.type, from_pandas=False) for field in schema]
    frame: pd.DataFrame = pa.Table.from_arrays(columns, schema=schema).to_pandas()
    return frame
