"""Scan a target: measure it, judge it by the rules, and note what differs from its base probe."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from propcheck import rules
from propcheck.analysis.variants import comparable, measured_note, settings_note
from propcheck.api.options import keyword_options
from propcheck.api.requests import scan_request
from propcheck.api.run import Run
from propcheck.config.fingerprint import differences
from propcheck.config.probe import load_probe
from propcheck.errors import PropcheckError
from propcheck.records.store import read_run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from propcheck import records
    from propcheck.api.options import Precision
    from propcheck.api.requests import ScanRequest
    from propcheck.targets.target import Target


def scan(  # noqa: PLR0913 - one keyword per option of the command line
    target: str | nn.Module | Target | Callable[..., nn.Module | Target],
    *,
    args: Mapping[str, Any] | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002 - the name of the option
    precision: Precision | None = None,
    tokens: int | None = None,
    batch: int | None = None,
    seeds: int | Sequence[int] | None = None,
    memory: str | None = None,
    device: str | None = None,
    eval: bool = False,  # noqa: A002 - the name of the option
    shadow: Literal["none", "fp32"] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    threads: int | None = None,
) -> Run:
    """Run one forward and one backward pass of a model, and return what ``propcheck scan`` would store and show.

    ``[tool.propcheck]`` in the pyproject.toml of the working directory supplies defaults, as on the command line.

    Parameters
    ----------
    target
        A string as on the command line; a callable that builds a module or a ``propcheck.Target``; or a module or
        ``propcheck.Target`` itself, whose values are used and which is not modified.
    args
        Keyword arguments of the callable.
    set
        Values for keys of the probe (``propcheck keys``): ``{"inputs.source": "uniform"}``.
    precision, tokens, batch, seeds, memory, device, eval, shadow, select, ignore, threads
        As the options of ``propcheck scan``.

    Returns
    -------
    Run
        Nothing is written; ``run.save(directory)`` does that.

    Raises
    ------
    PropcheckError
        The target, an option or a file is wrong (status 2 of the command line).
    """
    options = {
        "args": args,
        "set": set,
        "precision": precision,
        "tokens": tokens,
        "batch": batch,
        "seeds": seeds,
        "memory": memory,
        "device": device,
        "eval": eval,
        "shadow": shadow,
        "select": select,
        "ignore": ignore,
        "threads": threads,
    }
    request = scan_request(target, keyword_options(options))
    return Run(run_scan(request, request.directory))


def run_scan(request: ScanRequest, directory: Path) -> records.Run:
    """Scan, judge and note what differs from the base probe.

    Parameters
    ----------
    request
        The scan.
    directory
        Its run directory: a run of the base probe is looked for beside it. Nothing is written.
    """
    run = measure_and_judge(request)
    return dataclasses.replace(run, notes=(*run.notes, *_base_notes(request, run, directory)))


def measure_and_judge(request: ScanRequest) -> records.Run:
    """Scan and judge; the run has findings and no path."""
    from propcheck.api.measurement import measure

    return judge(measure(request), request)


def judge(run: records.Run, request: ScanRequest) -> records.Run:
    """Return the run with the findings of the rules that the request selects."""
    findings = rules.judge(run, settings=request.probe.rules, select=request.select, ignore=request.ignore)
    return dataclasses.replace(run, findings=findings)


def _base_notes(request: ScanRequest, run: records.Run, directory: Path) -> list[str]:
    """Note what differs from the base probe, and from its run if there is one beside this one."""
    if not request.probe.base:
        return []
    base = load_probe(request.probe.base)
    notes = [settings_note(base.name, differences(request.probe, base))]
    try:
        base_run = read_run(directory.parent / base.name)
    except PropcheckError:
        return notes  # not scanned yet, or by another version
    return [*notes, measured_note(run, base_run, base.name)] if comparable(run, base_run) else notes
