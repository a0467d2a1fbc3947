"""Whether two runs are of one kind, so that their numbers can be held against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.config.probe import TOKEN_SOURCES
from propcheck.config.resolve import python_name
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from propcheck.config.probe import Probe
    from propcheck.records import Run


def check_comparable(run: Run, baseline: Run, *, named: bool = False) -> None:
    """Raise ``PropcheckError`` where :func:`refusals` has something to say."""
    refuse(refusals(run, baseline, named=named), baseline)


def refuse(differing: Sequence[str], baseline: Run) -> None:
    """Raise ``PropcheckError`` if there is anything in which the baseline is of another kind."""
    if differing:
        raise PropcheckError(
            f"{baseline.path or baseline.target}: not the same kind of run: it has {'; '.join(differing)}. If that is meant, "
            "make it again with --update-baseline; --force compares all the same"
        )


def refusals(run: Run, baseline: Run, *, named: bool = False) -> list[str]:
    """Say in which ways two runs are not of one kind, so that their numbers cannot be held against each other.

    Parameters
    ----------
    run, baseline
        The two.
    named
        The baseline is a target that the user named beside the run: that it is another one is meant.
    """
    here, there = ({**_asked(one.settings, one.target, one.seeds), **_measured(one)} for one in (run, baseline))
    return _differing(here, there, {"target"} if named else set())


def early_refusals(probe: Probe, target: str, baseline: Run) -> list[str]:
    """Say the same of a target that is not scanned yet, as far as that can be told: a scan may take minutes."""
    here = _asked(probe.model_dump(mode="json"), target, probe.scan.seeds)
    there = _asked(baseline.settings, baseline.target, baseline.seeds)
    return _differing(here, there, set())


def _differing(here: Mapping[str, str], there: Mapping[str, str], left_out: Collection[str]) -> list[str]:
    return [
        f"{name} {there[name]} (here {here[name]})"
        for name in here
        if name in there and name not in left_out and here[name] != there[name]
    ]


def _asked(settings: Mapping[str, Any], target: str, seeds: Sequence[int]) -> dict[str, str]:
    """Return what a scan was asked for."""
    python, hugging = settings.get("python") or {}, settings.get("huggingface") or {}
    given = python.get("args") or hugging.get("overrides") or {}
    name = settings.get("name") or target
    if name == "run" and python.get("target"):  # an object of a Python process: as the command line would name it
        name = python_name(python["target"])
    return {
        "target": str(name),
        "arguments": ", ".join(f"{key}={value}" for key, value in sorted(given.items())) or "none",
        "seeds": ", ".join(map(str, seeds)),
        "mode": str((settings.get("scan") or {}).get("mode", "train")),
    }


def _measured(run: Run) -> dict[str, str]:
    """Return what only a finished scan tells: code may choose its own precision and batch."""
    inputs, options = run.inputs, run.settings.get("inputs") or {}
    fed = f"{inputs.batch} x {inputs.tokens} {inputs.source}" if inputs.batch else "unknown"
    measured = {"precision": run.precision, "inputs": fed}
    if inputs.source == "zipf":
        measured["inputs.exponent"] = f"{options.get('exponent', 1.0):g}"
    if inputs.source in TOKEN_SOURCES:
        measured["inputs.vocabulary"] = str(options.get("vocabulary"))
    return measured


def sites_alone(*runs: Run) -> str | None:
    """Say so where one of the runs is the rows of its sites and nothing else, as a lone ``sublayers.parquet`` gives them."""
    alone = [run.path or run.target for run in runs if not run.model.parameters]
    return f"{', '.join(alone)}: sites alone, so findings, parameters and loss are not compared." if alone else None


def other_machine(run: Run, baseline: Run) -> list[str]:
    """Say in which libraries two runs differ, and in device and threads: what may change the last digits, and no more."""
    here, there = ({**one.versions, "device": one.engine.device, "threads": str(one.engine.threads)} for one in (run, baseline))
    return [f"{name} {there[name]} (here {here[name]})" for name in here if name in there and here[name] != there[name]]
