"""What differs between a run and that of the probe it is a variation of: a few lines under the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.analysis import profile as depth
from propcheck.formatting import number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Run


def settings_note(base: str, differing: Sequence[tuple[str, Any, Any]]) -> str:
    """Say which keys differ from those of ``base``: (dotted key, value here, value there)."""
    if not differing:
        return f"The same settings as {base}."
    listed = "; ".join(f"{key} = {_shown(here)} (there {_shown(there)})" for key, here, there in differing)
    return f"As {base}, but for {listed}."


def comparable(run: Run, base: Run) -> bool:
    """Whether two runs saw the same inputs with the same seeds in the same precision, at sites of the same number."""
    return (run.inputs, run.seeds, run.precision, run.model.sites) == (
        base.inputs,
        base.seeds,
        base.precision,
        base.model.sites,
    )


def measured_note(run: Run, base: Run, base_name: str) -> str:
    """Say what that changed: the ends of stream and gradient, the loss, and the findings won and lost."""
    here, there = depth.profile(run), depth.profile(base)
    parts: list[str] = []

    def add(what: str, own: float | None, other: float | None) -> None:
        if own is not None and other is not None:
            parts.append(f"{what} {number(own)} (there {number(other)})")

    if here.units and there.units:
        last, before = here.label(-1), f"before {here.noun}"
        add(f"sum RMS after {here.noun} {last}", here.units[-1][-1].sum_rms, there.units[-1][-1].sum_rms)
        for unit in dict.fromkeys((0, min(1, len(here.units) - 1), len(here.units) - 1)):
            own, other = here.units[unit][0], there.units[unit][0]
            add(f"gradient {before} {here.label(unit)}", own.grad_stream_norm, other.grad_stream_norm)
    add("first loss", run.loss.value, base.loss.value)
    rules, others = ({finding.rule for finding in one.findings} for one in (run, base))
    gained, lost = sorted(rules - others), sorted(others - rules)
    if gained:
        parts.append(f"only here {', '.join(gained)}")
    if lost:
        parts.append(f"only there {', '.join(lost)}")
    return f"Beside the run of {base_name}: {'; '.join(parts)}."


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    return f'"{value}"' if isinstance(value, str) else "true" if value is True else "false" if value is False else str(value)
