"""Match the sites of two runs by block and kind of sublayer, whatever the modules are called.

Refactoring changes names, so they decide nothing here; the place in the model does. A site without a partner is missing or new.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from propcheck.formatting import places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import SiteRecord

# Blocks removed from a repeating pattern of kinds are located only if the pattern leaves fewer candidates than this.
_AMBIGUOUS = 4


@dataclass(frozen=True, slots=True)
class SitePair:
    """One residual addition in two runs; None for a run that lacks it."""

    base: SiteRecord | None
    other: SiteRecord | None


@dataclass(frozen=True, slots=True)
class SiteMatching:
    """The matched sites of two runs.

    Attributes
    ----------
    pairs
        In forward order. If ``relative``: the sites of the shallower model, each with its counterpart in the deeper one.
    relative
        Whether blocks were matched by relative depth, since the models have different numbers of blocks.
    block_notes, sublayer_notes
        Sentences that name the blocks, and the sublayers of a matched block, that one run lacks.
    """

    pairs: tuple[SitePair, ...]
    relative: bool = False
    block_notes: tuple[str, ...] = ()
    sublayer_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """All notes."""
        return (*self.block_notes, *self.sublayer_notes)

    @property
    def common(self) -> list[tuple[SiteRecord, SiteRecord]]:
        """The pairs that are in both runs."""
        return [(pair.base, pair.other) for pair in self.pairs if pair.base is not None and pair.other is not None]

    @property
    def missing(self) -> list[SiteRecord]:
        """Sites that only the base run has."""
        return [pair.base for pair in self.pairs if pair.base is not None and pair.other is None]

    @property
    def new(self) -> list[SiteRecord]:
        """Sites that only the other run has."""
        return [pair.other for pair in self.pairs if pair.base is None and pair.other is not None]


class _Block(NamedTuple):
    """The consecutive sites of one block; ``number`` is None outside the blocks."""

    number: int | None
    sites: tuple[SiteRecord, ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(site.sublayer for site in self.sites)


_BlockPair = tuple[_Block | None, _Block | None]


def match_sites(
    base: Sequence[SiteRecord], other: Sequence[SiteRecord], *, by_number: bool = False, names: tuple[str, str] = ("A", "B")
) -> SiteMatching:
    """Match the sites of two runs.

    Parameters
    ----------
    base, other
        One record per site, in forward order.
    by_number
        Match blocks by number even if the models have different numbers of blocks; the surplus is missing or new.
    names
        Names of the two runs in notes.
    """
    blocks, others = _blocks(base), _blocks(other)
    if _are_unnumbered(blocks) != _are_unnumbered(others):  # the blocks of one run could not be determined
        return SiteMatching(tuple(_match_within(base, other)))
    matched, relative = _match_by_place(blocks, others), False
    if matched is None and by_number:
        matched = _match_by_number(blocks, others)
    if matched is None:
        matched = _match_by_pattern(blocks, others)
    if matched is None:
        matched, relative = _match_by_depth(blocks, others), True
    depth_note = f"{names[0]} has {len(blocks)} blocks and {names[1]} has {len(others)}: compared at equal relative depth."
    return SiteMatching(
        pairs=tuple(pair for one, two in matched for pair in _match_within(one.sites if one else (), two.sites if two else ())),
        relative=relative,
        block_notes=(*([_sentence(depth_note)] if relative else []), *_missing_blocks(matched, names)),
        sublayer_notes=tuple(_missing_sublayers(matched, names)),
    )


def _blocks(sites: Sequence[SiteRecord]) -> list[_Block]:
    return [_Block(number, tuple(group)) for number, group in itertools.groupby(sites, key=lambda site: site.block)]


def _are_unnumbered(blocks: Sequence[_Block]) -> bool:
    return all(block.number is None for block in blocks)


# ------------------------------------------------------------------ blocks


def _match_by_place(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_BlockPair] | None:
    """Match blocks where counts, numbers or module paths leave no doubt; None if they do."""
    # A removed block leaves a gap in the numbers: both runs have the same first and the same last number.
    same_ends = bool(blocks and others) and (blocks[0].number, blocks[-1].number) == (others[0].number, others[-1].number)
    if len(blocks) == len(others) or same_ends:
        return _match_by_number(blocks, others)
    return _match_by_path(blocks, others)


def _match_by_number(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_BlockPair]:
    """Match by number; repeated numbers (several groups of sites outside the blocks) in order."""
    keyed, others_keyed = _by_occurrence(blocks), _by_occurrence(others)
    keys = list(keyed)
    if not set(others_keyed) <= set(keyed):
        keys = sorted({*keyed, *others_keyed}, key=lambda key: (key[0] is None, key))
    return [(keyed.get(key), others_keyed.get(key)) for key in keys]


def _by_occurrence(blocks: Sequence[_Block]) -> dict[tuple[int | None, int], _Block]:
    """Key blocks by number and by how often the number occurred before."""
    seen: Counter[int | None] = Counter()
    keyed: dict[tuple[int | None, int], _Block] = {}
    for block in blocks:
        keyed[block.number, seen[block.number]] = block
        seen[block.number] += 1
    return keyed


def _match_by_path(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_BlockPair] | None:
    """Match by the numbers in module paths, if they show that blocks were removed from the middle of one model."""
    numbers, other_numbers = _path_numbers(blocks), _path_numbers(others)
    if not numbers or not other_numbers or (numbers[0], numbers[-1]) != (other_numbers[0], other_numbers[-1]):
        return None
    if not (set(numbers) <= set(other_numbers) or set(other_numbers) <= set(numbers)):
        return None
    keyed, others_keyed = dict(zip(numbers, blocks, strict=True)), dict(zip(other_numbers, others, strict=True))
    return [(keyed.get(number), others_keyed.get(number)) for number in sorted({*numbers, *other_numbers})]


def _path_numbers(blocks: Sequence[_Block]) -> list[int]:
    """Return the number in each block's module path, ``layers.6.attn``; empty unless all have one and they increase."""
    matches = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", block.sites[0].module or "") for block in blocks]
    numbers = [int(match[1]) for match in matches if match is not None]
    increasing = all(number < following for number, following in itertools.pairwise(numbers))
    return numbers if increasing and len(numbers) == len(blocks) else []


def _match_by_pattern(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_BlockPair] | None:
    """Match by the pattern of kinds, if it shows which blocks were removed from one model."""
    if (removed := _removed_range(blocks, others)) is not None:
        return [(block, other) for block, other in zip(blocks, _with_gap(others, removed), strict=True)]
    if (removed := _removed_range(others, blocks)) is not None:
        return [(block, other) for block, other in zip(_with_gap(blocks, removed), others, strict=True)]
    return None


def _with_gap(blocks: Sequence[_Block], gap: range) -> list[_Block | None]:
    return [*blocks[: gap.start], *[None] * len(gap), *blocks[gap.start :]]


def _removed_range(longer: Sequence[_Block], shorter: Sequence[_Block]) -> range | None:
    """Return the indices of the blocks of ``longer`` that ``shorter`` lacks; None if the pattern does not show them."""
    amount = len(longer) - len(shorter)
    if not 0 < amount <= len(longer) // 4:
        return None
    kinds, shorter_kinds = [block.kinds for block in longer], [block.kinds for block in shorter]
    prefix = _common_prefix(kinds, shorter_kinds)
    suffix = _common_prefix(kinds[::-1], shorter_kinds[::-1])
    earliest = len(shorter) - suffix
    if earliest <= prefix < len(shorter) and prefix - earliest < _AMBIGUOUS:
        return range(max(earliest, 0), max(earliest, 0) + amount)
    return None


def _common_prefix(kinds: Sequence[tuple[str, ...]], others: Sequence[tuple[str, ...]]) -> int:
    """Return how many leading elements are equal; all of ``others`` if none differs."""
    return next((i for i, (kind, other) in enumerate(zip(kinds, others, strict=False)) if kind != other), len(others))


def _match_by_depth(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_BlockPair]:
    """Match each block of the shallower model with the nearest one in relative depth."""
    if len(blocks) <= len(others):
        return list(zip(blocks, _nearest(blocks, others), strict=True))
    return list(zip(_nearest(others, blocks), others, strict=True))


def _nearest(blocks: Sequence[_Block], others: Sequence[_Block]) -> list[_Block]:
    """Return for each block the nearest of ``others`` in relative depth, of the same kinds if there is one."""

    def distance(index: int, other_index: int) -> float:
        return abs(other_index / max(len(others) - 1, 1) - index / max(len(blocks) - 1, 1))

    nearest = []
    for i, block in enumerate(blocks):
        candidates = [j for j, other in enumerate(others) if other.kinds == block.kinds] or range(len(others))
        nearest.append(others[min(candidates, key=lambda j, i=i: distance(i, j))])
    return nearest


# ------------------------------------------------------------------ sites of one block


def _match_within(base: Sequence[SiteRecord], other: Sequence[SiteRecord]) -> list[SitePair]:
    """Match the sites of one block by kind; in order if the kinds differ and the numbers of sites do not."""
    if len(base) == len(other) and Counter(site.sublayer for site in base) != Counter(site.sublayer for site in other):
        return [SitePair(site, other_site) for site, other_site in zip(base, other, strict=True)]
    free: dict[str, list[SiteRecord]] = defaultdict(list)
    for site in other:
        free[site.sublayer].append(site)
    pairs = [SitePair(site, free[site.sublayer].pop(0) if free[site.sublayer] else None) for site in base]
    taken = {id(pair.other) for pair in pairs}
    for index, site in enumerate(other):
        if id(site) not in taken:  # insert it after the sites that precede it
            preceding = {id(earlier) for earlier in other[:index]}
            position = max((i + 1 for i, pair in enumerate(pairs) if id(pair.other) in preceding), default=0)
            pairs.insert(position, SitePair(None, site))
            taken.add(id(site))
    return pairs


# ------------------------------------------------------------------ notes


def _missing_blocks(matched: Sequence[_BlockPair], names: tuple[str, str]) -> list[str]:
    notes = []
    for side, (name, present) in enumerate(zip(names, reversed(names), strict=True)):
        missing = [pair[1 - side] for pair in matched if pair[side] is None]
        numbers = [block.number for block in missing if block is not None and block.number is not None]
        if numbers:
            contiguous = numbers[-1] - numbers[0] == len(numbers) - 1
            listed = places("block", numbers) if contiguous else f"blocks {', '.join(map(str, numbers))}"
            notes.append(_sentence(f"{name} lacks {listed} of {present}."))
    return notes


def _missing_sublayers(matched: Sequence[_BlockPair], names: tuple[str, str]) -> list[str]:
    notes = []
    for block, other in matched:
        if block is None or other is None:
            continue
        matching = SiteMatching(tuple(_match_within(block.sites, other.sites)))
        for name, present, sites in ((names[1], names[0], matching.missing), (names[0], names[1], matching.new)):
            for site in sites:
                inside = "" if site.block is None else f" of block {site.block}"
                notes.append(_sentence(f"{name} lacks the {site.sublayer}{inside} of {present} (site {site.site})."))
    return notes


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"
