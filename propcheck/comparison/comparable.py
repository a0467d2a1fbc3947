"""Whether two runs were made under the same conditions: target, arguments, seeds, mode, precision and inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from propcheck.config.probe import TOKEN_SOURCES
from propcheck.config.resolve import python_name
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.config.probe import Probe
    from propcheck.records import Run


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A condition in which two runs differ."""

    condition: str
    baseline: str
    run: str

    def describe(self, name: str = "this run") -> str:
        """Return ``precision bf16 (this run: fp32)``."""
        return f"{self.condition} {self.baseline} ({name}: {self.run})"


def check_comparable(run: Run, baseline: Run, *, named: bool = False) -> None:
    """Check that two runs were made under the same conditions.

    Parameters
    ----------
    run, baseline
        The two runs.
    named
        The user named the baseline's target together with the run, so it may be another one.

    Raises
    ------
    PropcheckError
        There is a mismatch.
    """
    refuse(mismatches(run, baseline, named=named), baseline)


def refuse(differing: Sequence[Mismatch], baseline: Run) -> None:
    """Refuse a baseline that was made under other conditions.

    Raises
    ------
    PropcheckError
        There is a mismatch.
    """
    if differing:
        raise PropcheckError(
            f"{baseline.path or baseline.target}: cannot be compared with this run: it was made with "
            f"{'; '.join(mismatch.describe() for mismatch in differing)}. If the change is intended, update the baseline with "
            "--update-baseline; --force compares anyway"
        )


def mismatches(run: Run, baseline: Run, *, named: bool = False) -> list[Mismatch]:
    """Return the conditions in which two runs differ, so that their numbers cannot be compared.

    Parameters
    ----------
    run, baseline, named
        As :func:`check_comparable` takes them.
    """
    conditions, expected = (
        {**_requested(each.settings, each.target, each.seeds), **_observed(each)} for each in (run, baseline)
    )
    return [each for each in _differing(conditions, expected) if not (named and each.condition == "target")]


def early_refusals(probe: Probe, target: str, baseline: Run) -> list[Mismatch]:
    """Return the mismatches that are known before the target is scanned, since a scan may take minutes."""
    conditions = _requested(probe.model_dump(mode="json"), target, probe.scan.seeds)
    return _differing(conditions, _requested(baseline.settings, baseline.target, baseline.seeds))


def _differing(conditions: Mapping[str, str], expected: Mapping[str, str]) -> list[Mismatch]:
    return [
        Mismatch(name, expected[name], value)
        for name, value in conditions.items()
        if name in expected and value != expected[name]
    ]


def _requested(settings: Mapping[str, Any], target: str, seeds: Sequence[int]) -> dict[str, str]:
    """Return the conditions that the probe sets."""
    python, huggingface = settings.get("python") or {}, settings.get("huggingface") or {}
    arguments = python.get("args") or huggingface.get("overrides") or {}
    name = settings.get("name") or target
    if name == "run" and python.get("target"):  # an object of a Python process: the name that the command line would give it
        name = python_name(python["target"])
    return {
        "target": str(name),
        "arguments": ", ".join(f"{key}={value}" for key, value in sorted(arguments.items())) or "none",
        "seeds": ", ".join(map(str, seeds)),
        "mode": str((settings.get("scan") or {}).get("mode", "train")),
    }


def _observed(run: Run) -> dict[str, str]:
    """Return the conditions that are known after a scan only, since user code may choose its precision and batch."""
    inputs, options = run.inputs, run.settings.get("inputs") or {}
    observed = {
        "precision": run.precision,
        "inputs": f"{inputs.batch} x {inputs.tokens} {inputs.source}" if inputs.batch else "unknown",
    }
    if inputs.source == "zipf":
        observed["inputs.exponent"] = f"{options.get('exponent', 1.0):g}"
    if inputs.source in TOKEN_SOURCES:
        observed["inputs.vocabulary"] = str(options.get("vocabulary"))
    return observed


def sites_only(*runs: Run) -> str | None:
    """Return a note if some run has only sites, as one read from a lone ``sublayers.parquet``; else None."""
    names = [run.path or run.target for run in runs if not run.model.parameters]
    return f"{', '.join(names)}: has only sites, so findings, parameters and loss are not compared." if names else None


def environment_mismatches(run: Run, baseline: Run) -> list[str]:
    """Return the versions, device and threads that differ: they can change the last digits, and no more."""
    environment, expected = (
        {**each.versions, "device": each.engine.device, "threads": str(each.engine.threads)} for each in (run, baseline)
    )
    return [mismatch.describe() for mismatch in _differing(environment, expected)]
