"""The command line's scan as a function: ``propcheck.scan(target, ...)`` returns a ``Run``."""

from __future__ import annotations

import dataclasses
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    from rich.console import Console
    from torch import nn

    from propcheck import records
    from propcheck.config.probe import Probe
    from propcheck.config.resolve import Override, Source
    from propcheck.targets.target import Target, Task


class Run:
    """What one scan found. Printed, it is the table that the command line shows.

    Attributes
    ----------
    record : propcheck.records.Run
        Everything, as plain records.
    """

    def __init__(self, record: records.Run) -> None:
        self.record = record

    @property
    def sublayers(self) -> pd.DataFrame:
        """A row a seed and site, with the columns of ``sublayers.parquet``."""
        from propcheck.records.store import SUBLAYERS_SCHEMA

        return _frame(self.record.sites, SUBLAYERS_SCHEMA)

    @property
    def parameters(self) -> pd.DataFrame:
        """A row a parameter or buffer, with the columns of ``parameters.parquet``."""
        from propcheck.records.store import PARAMETERS_SCHEMA

        return _frame(self.record.parameters, PARAMETERS_SCHEMA)

    @property
    def norms(self) -> pd.DataFrame:
        """A row a seed and normalisation, with the columns of ``norms.parquet``."""
        from propcheck.records.store import NORMS_SCHEMA

        return _frame(self.record.norms, NORMS_SCHEMA)

    @property
    def findings(self) -> tuple[records.Finding, ...]:
        """What the rules found, each with ``rule``, ``name``, ``severity``, ``site``, ``message`` and ``remedy``."""
        return self.record.findings

    @property
    def loss(self) -> records.LossInfo:
        """The first loss, ``loss.value``, and that of a uniform guess, ``loss.uniform``, or None."""
        return self.record.loss

    @property
    def model(self) -> records.ModelInfo:
        """Class, parameters, blocks, sites, width and placement."""
        return self.record.model

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about how the scan was done."""
        return self.record.notes

    def save(self, directory: str | Path, *, plots: bool = True) -> Path:
        """Write the run directory, as the command line does; ``PropcheckError`` where that cannot be."""
        from propcheck.records.store import write_run
        from propcheck.render.plots.run_plots import write_plots

        place = Path(directory)
        self.record = dataclasses.replace(self.record, path=str(directory))
        write_run(self.record, place)
        if plots:
            write_plots(self.record, place)
        return place

    def save_baseline(self, path: str | Path) -> Path:
        """Write a baseline file and its summary; ``PropcheckError`` where that cannot be, or the run has a NaN."""
        from propcheck.comparison import gate as gating
        from propcheck.config.tolerances import Tolerances
        from propcheck.records.baseline import write_baseline
        from propcheck.render.baseline_summary import baseline_summary

        place = Path(path)
        gating.check_fit(gating.gate(self.record, dataclasses.replace(self.record, path=str(path)), Tolerances()))
        write_baseline(self.record, place, baseline_summary(self.record))
        return place

    def __str__(self) -> str:
        from propcheck.render.terminal.run_table import print_run

        return printed(lambda console: print_run(self.record, console))

    def __repr__(self) -> str:
        model, findings = self.record.model, len(self.record.findings)
        return f"<propcheck.Run of {self.record.target}: {model.class_name}, {model.sites} sites, {findings} findings>"


def printed(show: Callable[[Console], None]) -> str:
    """Return what a view shows on a console of 80 columns."""
    from rich.console import Console

    stream = io.StringIO()
    show(Console(file=stream, width=80))
    return stream.getvalue().rstrip("\n")


def scan(
    target: str | nn.Module | Target | Callable[..., nn.Module | Target],
    *,
    args: Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the option
    precision: Literal["bf16", "fp16", "fp32", "bf16-mixed"] | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    seeds: int | Sequence[int] | None = None,
    memory: str | None = None,
    device: str | None = None,
    eval: bool = False,  # noqa: A002 - the name of the option
    shadow: Literal["fp32"] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    threads: int | None = None,
) -> Run:
    """Run one forward and one backward pass of a model and return what the command line would store and show.

    Parameters
    ----------
    target
        A string as on the command line; a callable that builds a module or a ``propcheck.Target``; or one of these already
        built, whose values are taken as they are and which is not changed.
    args
        Keyword arguments of the callable.
    set
        Keys of a probe (``propcheck keys``) with their values: ``{"inputs.source": "uniform"}``.
    precision, tokens, batch, seeds, memory, device, eval, shadow, select, ignore, threads
        As the options of ``propcheck scan``.

    Returns
    -------
    Run
        Nothing is written; ``run.save(directory)`` does that.

    Raises
    ------
    PropcheckError
        Where the command line would end with status 2.
    """
    from propcheck import rules
    from propcheck.api import scanning
    from propcheck.config.probe import load_probe

    options = [
        ("precision", "precision.preset", precision),
        ("tokens", "inputs.tokens", tokens),
        ("batch", "inputs.batch", batch),
        ("seeds", "scan.seeds", None if seeds is None else [seeds] if isinstance(seeds, int) else list(seeds)),
        ("memory", "scan.memory", memory),
        ("device", "scan.device", device),
        ("eval", "scan.mode", "eval" if eval else None),
        ("shadow", "scan.shadow", shadow),
    ]
    overrides = [*_overrides(args or {}, set or {}), *_options(options)]
    probe = load_probe(target if isinstance(target, str) else _source(target), overrides)
    check_rules(probe, (*select, *ignore))
    task = None if isinstance(target, str) and probe.kind != "python" else _task(target, args)
    record = scanning.scan(probe, target=target if isinstance(target, str) else probe.python.target, task=task, threads=threads)
    findings = rules.judge(record, settings=probe.rules, select=tuple(select), ignore=tuple(ignore))
    return Run(dataclasses.replace(record, findings=findings))


def check_rules(probe: Probe, named: Sequence[str]) -> None:
    """Refuse rules that there are not, and thresholds that cannot be judged by, before the scan and not after it."""
    from propcheck import rules

    for name in (*probe.rules, *named):
        rule = rules.find(name)
        threshold = probe.rules[name].threshold if name in probe.rules else None
        if threshold is None:
            continue
        if not rule.threshold:
            raise PropcheckError(f"rules.{name}.threshold: {rule.id} always judges at 0; drop the key")
        if not threshold > rule.least:
            unit = rule.unit.partition(";")[0]
            raise PropcheckError(f"rules.{name}.threshold = {threshold:g} must be above {rule.least:g} ({unit})")


def _overrides(args: Mapping[str, Any], settings: Mapping[str, Any]) -> list[Override]:
    from propcheck.config.resolve import Override

    return [
        *(Override(f"python.args.{key}", _plain(value), f"args[{key!r}]") for key, value in args.items()),
        *(Override(key, value, f"set[{key!r}]") for key, value in settings.items()),
    ]


def _options(options: Sequence[tuple[str, str, Any]]) -> list[Override]:
    from propcheck.config.resolve import Override

    return [Override(key, value, option) for option, key, value in options if value is not None]


def _source(target: object) -> Source:
    """Return the keys of a target that is an object of this process: they only say what it was."""
    from propcheck.config.resolve import Source

    name = getattr(target, "__qualname__", None) or type(getattr(target, "model", target)).__qualname__
    module = getattr(target, "__module__", "__main__")
    return Source(name, {"name": "run", "python": {"target": f"{module}:{name}"}})


def _task(target: object, args: Mapping[str, Any] | None) -> Callable[[Probe], Task]:
    def task(probe: Probe) -> Task:
        from propcheck.targets.python import python_task

        return python_task(probe, None if isinstance(target, str) else target, args)

    return task


def _plain(value: Any) -> Any:
    """Return a value that a probe can hold: the arguments of a call in this process may be any objects."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return {str(key): _plain(one) for key, one in value.items()} if isinstance(value, dict) else repr(value)


def _frame(rows: Sequence[Any], schema: Any) -> pd.DataFrame:
    import pyarrow as pa

    columns = [pa.array([getattr(row, field.name) for row in rows], type=field.type, from_pandas=False) for field in schema]
    frame: pd.DataFrame = pa.Table.from_arrays(columns, schema=schema).to_pandas()
    return frame
