"""Find experts that received no token from the router: they are idle in this batch, not dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern
from propcheck.formatting import count, places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.records import ParameterRecord, Run

# Parameters of numbered sibling modules (blocks.3.moe.experts.0, .1, ...) by number.
Modules = dict[str, list["ParameterRecord"]]


def idle_parameters(run: Run) -> frozenset[str]:
    """Return the names of the parameters of experts that received no token.

    Experts are modules of one block whose paths differ in one number, with the same parameters, in a mixture of experts. An
    expert is idle if none of its parameters was used or has a non-zero gradient, while those of another expert do.
    """
    return frozenset(
        record.name for modules in _mixtures(run).values() for expert in _idle(modules) for record in modules[expert]
    )


def idle_experts(run: Run) -> list[str]:
    """Describe the idle experts in one sentence per kind: how many of how many, and in which blocks."""
    kinds: dict[tuple[str, int], list[tuple[int, int | None]]] = {}
    for prefix, modules in _mixtures(run).items():
        if idle := _idle(modules):
            block = next(iter(modules.values()))[0].block
            kinds.setdefault((pattern(prefix), len(modules)), []).append((len(idle), block))
    return [_sentence(total, idle) for (_, total), idle in kinds.items()]


def _sentence(total: int, idle: Sequence[tuple[int, int | None]]) -> str:
    counts = [amount for amount, _ in idle]
    low, high = min(counts), max(counts)
    blocks = [block for _, block in idle if block is not None]
    where = f" of {places('block', blocks)}" if blocks else ""
    return f"{low if low == high else f'{low} to {high}'} of {count(total, 'expert')}{where} received no token in this batch."


def _mixtures(run: Run) -> dict[str, Modules]:
    """Return the mixtures of experts with at least one gradient, by the path in front of their numbers."""
    numbered: dict[str, Modules] = {}
    for record in run.parameters:
        if record.kind != "parameter":
            continue
        parts = path(record).split(".")
        for index, part in enumerate(parts[:-1]):
            if part.isdecimal():
                numbered.setdefault(".".join(parts[:index]), {}).setdefault(part, []).append(record)
    return {prefix: modules for prefix, modules in numbered.items() if _is_mixture(prefix, modules)}


def _is_mixture(prefix: str, modules: Mapping[str, Sequence[ParameterRecord]]) -> bool:
    records = [record for members in modules.values() for record in members]
    if {record.sublayer for record in records} - {None} != {"moe"} or len({record.block for record in records}) > 1:
        return False
    layouts = {
        tuple(sorted((path(record).removeprefix(f"{prefix}.{name}"), record.shape) for record in members))
        for name, members in modules.items()
    }
    return len(modules) > 1 and len(layouts) == 1 and any(record.grad_state == "norm" for record in records)


def _idle(modules: Mapping[str, Sequence[ParameterRecord]]) -> list[str]:
    return [
        name
        for name, members in modules.items()
        if all(record.used is False or record.grad_state in ("zero", "none") for record in members)
    ]
