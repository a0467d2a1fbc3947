"""Notes on how a run differs from that of the probe that it is based on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.analysis.profile import profile
from propcheck.formatting import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Run


def settings_note(base: str, differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Name the keys that differ from those of ``base``: (dotted key, value here, value in base)."""
    if not differing:
        return f"Same settings as {base}."
    listed = "; ".join(f"{key} = {_shown(value)} instead of {_shown(expected)}" for key, value, expected in differing)
    return f"Same settings as {base}, except {listed}."


def comparable(run: Run, base: Run) -> bool:
    """Return whether two runs have the same inputs, seeds, precision and number of sites."""
    return (run.inputs, run.seeds, run.precision, run.model.sites) == (
        base.inputs,
        base.seeds,
        base.precision,
        base.model.sites,
    )


def measured_note(run: Run, base: Run, base_name: str) -> str:
    """Compare a run with that of its base: stream and gradient at both ends, the first loss, and the rules that report."""
    curve, base_curve = profile(run), profile(base)
    parts: list[str] = []

    def add(name: str, value: float | None, expected: float | None) -> None:
        if value is not None and expected is not None:
            parts.append(f"{name} is {number(value)} instead of {number(expected)}")

    if curve.units and base_curve.units:
        last = len(curve.units) - 1
        add(f"sum RMS after {curve.noun} {curve.label(-1)}", curve.units[-1][-1].sum_rms, base_curve.units[-1][-1].sum_rms)
        for unit in dict.fromkeys((0, min(1, last), last)):
            site, base_site = curve.units[unit][0], base_curve.units[unit][0]
            name = f"gradient before {curve.noun} {curve.label(unit)}"
            add(name, site.grad_stream_norm, base_site.grad_stream_norm)
    add("first loss", run.loss.value, base.loss.value)
    rules, base_rules = ({finding.rule for finding in each.findings} for each in (run, base))
    if rules - base_rules:
        parts.append(f"new: {', '.join(sorted(rules - base_rules))}")
    if base_rules - rules:
        parts.append(f"gone: {', '.join(sorted(base_rules - rules))}")
    return f"Compared with the run of {base_name}: {'; '.join(parts)}."


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return f'"{value}"' if isinstance(value, str) else "true" if value is True else "false" if value is False else str(value)
