"""Experts that the router sent no token to: they are idle in this batch, not dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern
from propcheck.formatting import count, places

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.records import ParameterRecord, Run

# Numbered modules side by side, as blocks.3.moe.experts.0, .1 ...: the parameters of each, by its number.
Modules = dict[str, list["ParameterRecord"]]


def idle_parameters(run: Run) -> frozenset[str]:
    """Give the names of the parameters of experts without a token.

    Experts are modules whose paths differ in one number, with the same parameters, in one block, all of whose observed
    sublayers are a mixture of experts. One is idle if none of its parameters was used or got a gradient above zero, while
    those of another did.
    """
    return frozenset(
        record.name for modules in _mixtures(run).values() for expert in _idle(modules) for record in modules[expert]
    )


def idle_experts(run: Run) -> list[str]:
    """Write a sentence for each kind of experts of which some got no token: how many of how many, and in which blocks."""
    kinds: dict[tuple[str, int], list[tuple[int, int | None]]] = {}
    for prefix, modules in _mixtures(run).items():
        if idle := _idle(modules):
            block = next(iter(modules.values()))[0].block
            kinds.setdefault((pattern(prefix), len(modules)), []).append((len(idle), block))
    return [_sentence(total, found) for (_, total), found in kinds.items()]


def _sentence(total: int, found: Sequence[tuple[int, int | None]]) -> str:
    low, high = min(idle for idle, _ in found), max(idle for idle, _ in found)
    blocks = [block for _, block in found if block is not None]
    where = f" of {places('block', blocks)}" if blocks else ""
    return f"{low if low == high else f'{low} to {high}'} of {count(total, 'expert')}{where} got no token in this batch."


def _mixtures(run: Run) -> dict[str, Modules]:
    """Find the mixtures of experts of which at least one expert got a gradient, by the path that their numbers follow."""
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
        tuple(sorted((path(r).removeprefix(f"{prefix}.{name}"), r.shape) for r in members)) for name, members in modules.items()
    }
    return len(modules) > 1 and len(layouts) == 1 and any(record.grad_state == "norm" for record in records)


def _idle(modules: Mapping[str, Sequence[ParameterRecord]]) -> list[str]:
    return [
        name for name, members in modules.items() if all(r.used is False or r.grad_state in ("zero", "none") for r in members)
    ]
