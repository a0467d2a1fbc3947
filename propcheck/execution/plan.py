"""Divide a model into the units whose parameters come and go together, and plan which of them stay.

A unit is a block, or a part of the model beside the blocks that is called as a whole (embedding, final norm, head).
Parameters that belong to no such part stay in memory throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.execution.blocks import LISTS, find_blocks, named_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from propcheck.deferred_init.record import Entry


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose parameters are materialised together."""

    path: str
    module: nn.Module
    entries: tuple[Entry, ...]
    block: int | None
    names: frozenset[str]  # of its entries

    @property
    def nbytes(self) -> int:
        """Memory of its parameters."""
        return sum(entry.nbytes for entry in self.entries)


def divide(
    model: nn.Module, entries: Sequence[Entry], names: str | Sequence[str] | None = None
) -> tuple[list[Unit], tuple[Entry, ...], dict[str, int]]:
    """Return the units of ``model`` in order, the entries that belong to none (always in memory), and the blocks' numbers.

    Buffers belong to no unit: they are small, and code may update them in the forward pass. A block that cannot be called
    (a list of its parts) is divided into its parts. ``names`` are those of the blocks, where the target says them.
    """
    blocks = find_blocks(model) if names is None else named_blocks(model, names)
    numbers = {part: number for number, (path, module) in enumerate(blocks) for part in _callable(path, module)}
    above = {""}  # the modules around the blocks
    for path in numbers:
        parts = path.split(".")
        above |= {".".join(parts[:depth]) for depth in range(len(parts))}
    units: list[Unit] = []
    owned: set[str] = set()
    for path, module in _parts(model, "", above, set()):
        own = tuple(
            entry
            for entry in entries
            if entry.kind == "parameter" and any(name == path or name.startswith(f"{path}.") for name in entry.names)
        )
        if own:
            units.append(Unit(path, module, own, numbers.get(path), frozenset(entry.name for entry in own)))
            owned |= units[-1].names
    return (
        units,
        tuple(entry for entry in entries if entry.name not in owned),
        {path: number for number, (path, _) in enumerate(blocks)},
    )


def _parts(module: nn.Module, path: str, above: set[str], seen: set[int]) -> list[tuple[str, nn.Module]]:
    """Return the largest modules, each once, that are neither around a block nor a list."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        where = f"{path}.{name}".lstrip(".")
        if where in above or isinstance(child, LISTS):
            found += _parts(child, where, above, seen)
        elif id(child) not in seen:
            seen.add(id(child))
            found.append((where, child))
    return found


def _callable(path: str, module: nn.Module) -> list[str]:
    if not isinstance(module, LISTS):
        return [path]
    return [part for name, child in module.named_children() for part in _callable(f"{path}.{name}", child)]


# Bytes of working memory for each token and each input or output feature of a block's weights, beside half precision
# parameters: saved activations, fp32 copies in norms and mixers. An upper bound met by the bundled decoders.
_ACTIVATION_FACTOR = 4
# Logits in the model's precision, their fp32 copy, its log-softmax and gradient.
_LOGIT_BYTES = 16


def working_bytes(unit: Unit, tokens: int) -> int:
    """Return an estimate of the memory that a unit's graph needs beside its parameters."""
    features = sum(sum(entry.shape) * entry.dtype.itemsize for entry in unit.entries if len(entry.shape) == 2)
    if unit.block is not None:
        return _ACTIVATION_FACTOR * tokens * features
    return _LOGIT_BYTES * tokens * max((max(entry.shape) for entry in unit.entries if len(entry.shape) == 2), default=0)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which units keep their parameters and their graph between forward and backward."""

    resident: frozenset[str]
    mode: str  # resident | partly resident | streamed


def plan(units: Sequence[Unit], available: int, tokens: int) -> Plan:
    """Choose the resident units for ``available`` bytes.

    From the end backwards, since what ran last is needed first in the backward pass. Beside the resident ones there must be
    room for the largest other unit while it is computed.
    """
    blocks = [unit for unit in units if unit.block is not None]
    last = max((index for index, unit in enumerate(units) if unit.block is not None), default=-1)
    cost = {unit.path: unit.nbytes + working_bytes(unit, tokens) for unit in units}
    if sum(cost.values()) <= available:
        return Plan(frozenset(cost), "resident")
    # What follows the blocks (final norm, head) runs just before the backward pass: dropping it would save nothing.
    resident = {unit.path for unit in units[last + 1 :]}
    order = [unit for unit in reversed(units[: last + 1]) if unit.path not in resident]
    for position, unit in enumerate(order):
        kept = sum(cost[path] for path in resident) + cost[unit.path]
        # Embedding-like units give their memory back before the resident ones exist.
        others = max((cost[other.path] for other in order[position + 1 :] if other.block is not None), default=0)
        if kept + others > available:
            break
        resident.add(unit.path)
    kept_blocks = sum(unit.path in resident for unit in blocks)
    return Plan(frozenset(resident), "partly resident" if kept_blocks else "streamed")
