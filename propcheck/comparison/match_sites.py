"""Which sites of two runs are the same: by block and kind of sublayer, whatever the modules are called.

Names are what a refactoring changes, so they decide nothing here; the place in the model does. What is left over on one side
is new or missing.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.formatting import places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import SiteRecord

# A part that was taken out of a pattern of blocks can be placed where the pattern leaves it no more room than this.
_LEAST_ROOM = 4


@dataclass(frozen=True, slots=True)
class SitePair:
    """One residual addition in two runs; on one side None where that one lacks it."""

    base: SiteRecord | None
    other: SiteRecord | None


@dataclass(frozen=True, slots=True)
class Pairing:
    """The sites of two runs, put together.

    Attributes
    ----------
    pairs
        In forward order. With ``relative`` those of the shallower model, each beside the nearest of like kinds in the other.
    relative
        Whether blocks were matched by their relative depth, as the models have different numbers of them.
    notes
        Sentences: which blocks or sublayers one of the two lacks.
    """

    pairs: tuple[SitePair, ...]
    relative: bool
    notes: tuple[str, ...]


_Block = tuple[int | None, tuple["SiteRecord", ...]]


def pair_sites(
    base: Sequence[SiteRecord], other: Sequence[SiteRecord], *, by_number: bool = False, names: tuple[str, str] = ("A", "B")
) -> Pairing:
    """Put together the sites of two runs.

    Parameters
    ----------
    base, other
        One record a site, in forward order.
    by_number
        Match blocks by their numbers also where the models have different numbers of them: what is beyond is new or missing.
    names
        What notes call the two.
    """
    blocks, others = _blocks(base), _blocks(other)
    if _unnumbered(blocks) != _unnumbered(others):  # the blocks of one of them could not be told
        return Pairing(tuple(_within(base, other)), relative=False, notes=())
    matched, relative = _matched(blocks, others, by_number=by_number)
    pairs = [pair for one, two in matched for pair in _within(one[1] if one else (), two[1] if two else ())]
    notes = [*_lacking(matched, names), *_lacking_sublayers(matched, names)]
    if relative:
        notes.insert(
            0, f"{names[0]} has {len(blocks)} blocks and {names[1]} {len(others)}: compared at the same relative depth."
        )
    return Pairing(tuple(pairs), relative, tuple(f"{note[0].upper()}{note[1:]}" for note in notes))


def _blocks(sites: Sequence[SiteRecord]) -> list[_Block]:
    return [(block, tuple(group)) for block, group in itertools.groupby(sites, key=lambda record: record.block)]


def _unnumbered(blocks: Sequence[_Block]) -> bool:
    return all(number is None for number, _ in blocks)


def _kinds(block: _Block) -> tuple[str, ...]:
    return tuple(record.sublayer for record in block[1])


def _matched(
    blocks: Sequence[_Block], others: Sequence[_Block], *, by_number: bool
) -> tuple[list[tuple[_Block | None, _Block | None]], bool]:
    numbers, their = [number for number, _ in blocks], [number for number, _ in others]
    # A block that was left out keeps its number free: both reach from the same first to the same last.
    same_ends = bool(numbers and their) and (numbers[0], numbers[-1]) == (their[0], their[-1])
    if len(blocks) == len(others) or same_ends:
        return _joined(blocks, others), False
    if (left_out := _left_out(blocks, others)) is not None:
        return left_out, False
    if by_number:
        return _joined(blocks, others), False
    if (taken := _taken_out(blocks, others)) is not None:
        start, amount = taken
        return [(one, None) if start <= i < start + amount else (one, others[i if i < start else i - amount])
                for i, one in enumerate(blocks)], False  # fmt: skip
    if (taken := _taken_out(others, blocks)) is not None:
        start, amount = taken
        return [(None, two) if start <= i < start + amount else (blocks[i if i < start else i - amount], two)
                for i, two in enumerate(others)], False  # fmt: skip
    if len(blocks) <= len(others):
        return [(one, others[j]) for one, j in zip(blocks, _nearest(blocks, others), strict=True)], True
    return [(blocks[j], two) for two, j in zip(others, _nearest(others, blocks), strict=True)], True


def _left_out(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[tuple[_Block | None, _Block | None]] | None:
    """Match by the numbers in the modules' paths, where they say that blocks in the middle of one model were left out."""
    mine, theirs = _path_numbers(blocks), _path_numbers(others)
    if not mine or not theirs or (mine[0], mine[-1]) != (theirs[0], theirs[-1]):
        return None
    if not (set(mine) <= set(theirs) or set(theirs) <= set(mine)):
        return None
    ours, other = dict(zip(mine, blocks, strict=True)), dict(zip(theirs, others, strict=True))
    return [(ours.get(number), other.get(number)) for number in sorted({*mine, *theirs})]


def _path_numbers(blocks: Sequence[_Block]) -> list[int]:
    """Return the number in the path of each block's modules, ``layers.6.attn``; none unless all have one and they rise."""
    found = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", block[1][0].module or "") for block in blocks]
    numbers = [int(match[1]) for match in found if match is not None]
    rising = all(one < two for one, two in itertools.pairwise(numbers))
    return numbers if rising and len(numbers) == len(blocks) else []


def _joined(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[tuple[_Block | None, _Block | None]]:
    """Match by number; blocks of one number (several runs of sites outside the blocks) in their order."""
    mine, theirs = _keyed(blocks), _keyed(others)
    order = list(mine) if set(theirs) <= set(mine) else sorted({*mine, *theirs}, key=lambda key: (key[0] is None, key))
    return [(mine.get(key), theirs.get(key)) for key in order]


def _keyed(blocks: Sequence[_Block]) -> dict[tuple[int | None, int], _Block]:
    seen: Counter[int | None] = Counter()
    keyed: dict[tuple[int | None, int], _Block] = {}
    for block in blocks:
        keyed[block[0], seen[block[0]]] = block
        seen[block[0]] += 1
    return keyed


def _taken_out(longer: Sequence[_Block], shorter: Sequence[_Block]) -> tuple[int, int] | None:
    """Say from which block on how many were taken out of a pattern, where the pattern tells: (index, amount)."""
    amount = len(longer) - len(shorter)
    if not 0 < amount <= len(longer) // 4:
        return None
    a, b = [_kinds(one) for one in longer], [_kinds(one) for one in shorter]
    before = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    after = next((i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), len(b))
    # It began after block `first` - 1 at the earliest and before block `before` at the latest.
    first = len(b) - after
    return (max(first, 0), amount) if first <= before and before - first < _LEAST_ROOM and before < len(b) else None


def _nearest(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[int]:
    """Return for each block the index of the nearest of ``others`` in relative depth, of like kinds if there is one."""

    def at(index: int, amount: int) -> float:
        return index / max(amount - 1, 1)

    found = []
    for i, block in enumerate(blocks):
        alike = [j for j, two in enumerate(others) if _kinds(two) == _kinds(block)] or range(len(others))
        found.append(min(alike, key=lambda j: abs(at(j, len(others)) - at(i, len(blocks)))))
    return found


def _within(base: Sequence[SiteRecord], other: Sequence[SiteRecord]) -> list[SitePair]:
    """Match the sites of one block: by kind, or, where the two differ in kinds and not in number, in their order."""
    kinds, others = Counter(one.sublayer for one in base), Counter(one.sublayer for one in other)
    if kinds != others and len(base) == len(other):
        return [SitePair(one, two) for one, two in zip(base, other, strict=True)]
    free: dict[str, list[SiteRecord]] = defaultdict(list)
    for record in other:
        free[record.sublayer].append(record)
    pairs = [SitePair(one, free[one.sublayer].pop(0) if free[one.sublayer] else None) for one in base]
    taken = {id(pair.other) for pair in pairs}
    for index, record in enumerate(other):  # each goes after the one that comes before it
        if id(record) not in taken:
            before = {id(one) for one in other[:index]}
            place = max((i + 1 for i, pair in enumerate(pairs) if id(pair.other) in before), default=0)
            pairs.insert(place, SitePair(None, record))
            taken.add(id(record))
    return pairs


def _lacking(matched: Sequence[tuple[_Block | None, _Block | None]], names: tuple[str, str]) -> list[str]:
    notes = []
    for side, (name, present) in enumerate(zip(names, reversed(names), strict=True)):
        missing = [pair[1 - side] for pair in matched if pair[side] is None]
        numbers = [block[0] for block in missing if block is not None and block[0] is not None]
        if numbers:
            listed = places("block", numbers) if numbers[-1] - numbers[0] == len(numbers) - 1 else (
                f"blocks {', '.join(map(str, numbers))}"
            )  # fmt: skip
            notes.append(f"{name} lacks {listed} of {present}.")
    return notes


def _lacking_sublayers(matched: Sequence[tuple[_Block | None, _Block | None]], names: tuple[str, str]) -> list[str]:
    notes = []
    for one, two in matched:
        if one is None or two is None:
            continue
        pairs = _within(one[1], two[1])
        for name, present, records in (
            (names[1], names[0], [pair.base for pair in pairs if pair.other is None]),
            (names[0], names[1], [pair.other for pair in pairs if pair.base is None]),
        ):
            for record in records:
                assert record is not None
                where = "" if record.block is None else f" of block {record.block}"
                notes.append(f"{name} lacks the {record.sublayer}{where} of {present} (site {record.site}).")
    return notes
