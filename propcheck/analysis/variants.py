"""Notes that compare the run of a probe with the run of its base: different settings, values and findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.analysis.profile import profile
from propcheck.formatting import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Run


def settings_note(base: str, differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Describe how settings differ from those of ``base``.

    Parameters
    ----------
    base
        Name of the base.
    differing
        Dotted key, value, and value in the base.
    """
    if not differing:
        return f"Same settings as {base}."
    changes = "; ".join(f"{key} = {_toml(value)} instead of {_toml(base_value)}" for key, value, base_value in differing)
    return f"Settings differ from {base}: {changes}."


def comparable(run: Run, base: Run) -> bool:
    """Return whether two runs have the same inputs, seeds, precision and number of sites."""
    return (run.inputs, run.seeds, run.precision, run.model.sites) == (
        base.inputs,
        base.seeds,
        base.precision,
        base.model.sites,
    )


def measured_note(run: Run, base: Run, base_name: str) -> str:
    """Describe how a run differs from the run of its base: stream, gradient, loss, new and resolved findings."""
    curve, base_curve = profile(run), profile(base)
    pairs = [("first loss", run.loss.value, base.loss.value)]
    if curve.units and base_curve.units:
        sums = (curve.units[-1][-1].sum_rms, base_curve.units[-1][-1].sum_rms)
        gradients = [
            (
                f"gradient before {curve.noun} {curve.label(unit)}",
                curve.units[unit][0].grad_stream_norm,
                base_curve.units[unit][0].grad_stream_norm,
            )
            for unit in dict.fromkeys((0, min(1, len(curve.units) - 1), len(curve.units) - 1))
        ]
        pairs = [(f"sum RMS after {curve.noun} {curve.label(-1)}", *sums), *gradients, *pairs]
    parts = [
        f"{name}: {number(value)} instead of {number(base_value)}"
        for name, value, base_value in pairs
        if value is not None and base_value is not None
    ]
    rules, base_rules = ({finding.rule for finding in findings} for findings in (run.findings, base.findings))
    for name, only in (("new", rules - base_rules), ("resolved", base_rules - rules)):
        if only:
            parts.append(f"{name} findings: {', '.join(sorted(only))}")
    return f"Compared with the run of {base_name}: {'; '.join(parts)}."


def _toml(value: object) -> str:
    if value is None:
        return "unset"
    return f'"{value}"' if isinstance(value, str) else "true" if value is True else "false" if value is False else str(value)
