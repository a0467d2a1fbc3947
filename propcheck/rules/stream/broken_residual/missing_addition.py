"""Blocks that lack an addition which the blocks around them have."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern
from propcheck.analysis.profile import log_ratio, safe_exp
from propcheck.formatting import number
from propcheck.records import Place
from propcheck.rules.rule import Hit
from propcheck.rules.sites import site_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run, SiteRecord

# Blocks on each side that a block is compared with.
_NEIGHBOURS = 3
# If more than this share of the blocks (and more than one) lack an addition, the model is built that way.
_MOST_MISSING = 1 / 8
# Sublayers that replace one another in hybrid models. Blocks that differ in this alone are alike.
_KINDS = {"attention": "mixer", "linear_attention": "mixer", "ssm": "mixer", "mlp": "mlp", "moe": "mlp"}

_SitesByBlock = dict[int, list["SiteRecord"]]


@dataclass(frozen=True, slots=True)
class _Gap:
    """A block that lacks additions: the usual kinds of its neighbours, the positions that it lacks, and the usual blocks."""

    block: int
    usual: tuple[str, ...]
    lacking: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    def lacked(self, by_block: _SitesByBlock) -> list[list[SiteRecord]]:
        """List the sites of the usual blocks at each position that this block lacks."""
        return [[by_block[block][position] for block in (*self.before, *self.after)] for position in self.lacking]


def missing_additions(profile: Profile, run: Run) -> list[Hit]:
    """Find blocks that lack an addition which the blocks around them have, and whose stream does not go on."""
    numbers = {site.block for site in profile.sites if site.block is not None}
    continuity_known = any(site.continues is not None for site in profile.sites)
    if not numbers or not continuity_known or run.unobserved:
        return []  # an addition in an unobserved place may have been missed
    # A block without any addition is known by its number only.
    by_block: _SitesByBlock = {block: [] for block in range(max(run.model.blocks, max(numbers) + 1))}
    for site in profile.sites:
        if site.block is not None:
            by_block[site.block].append(site)
    gaps = [gap for block in by_block if (gap := _gap(block, by_block)) is not None]
    hits = [hit for gap in gaps if (hit := _hit(gap, by_block, profile, run)) is not None]
    return hits if len(hits) <= max(1, len(by_block) * _MOST_MISSING) else []


def _gap(block: int, by_block: _SitesByBlock) -> _Gap | None:
    """Compare the kinds of a block's additions with those of at least two thirds of its neighbours."""
    kinds = {other: _kinds(by_block[other]) for other in by_block if 0 < abs(other - block) <= _NEIGHBOURS}
    if not kinds:
        return None
    usual, votes = Counter(kinds.values()).most_common(1)[0]
    lacking = _positions_left_out(usual, _kinds(by_block[block]))
    if votes < 2 or votes < len(kinds) * 2 / 3 or not lacking:
        return None
    if any(usual[position] not in _KINDS.values() for position in lacking):
        return None
    alike = [other for other in kinds if kinds[other] == usual]
    before, after = (tuple(other for other in alike if (other < block) == earlier) for earlier in (True, False))
    return _Gap(block, usual, tuple(lacking), before, after)


def _kinds(sites: Sequence[SiteRecord]) -> tuple[str, ...]:
    return tuple(_KINDS.get(site.sublayer, site.sublayer) for site in sites)


def _positions_left_out(usual: Sequence[str], kinds: Sequence[str]) -> list[int]:
    """List the positions in ``usual`` that ``kinds`` leaves out; empty unless ``kinds`` is a subsequence of ``usual``."""
    left_out, rest = [], list(kinds)
    for position, kind in enumerate(usual):
        if rest and rest[0] == kind:
            rest.pop(0)
        else:
            left_out.append(position)
    return [] if rest else left_out


def _hit(gap: _Gap, by_block: _SitesByBlock, profile: Profile, run: Run) -> Hit | None:
    """Report a gap if the stream is replaced there, or if its sublayer is computed but added nowhere."""
    lacked = gap.lacked(by_block)
    bypassed = _is_bypassed(gap.block, [site for sites in lacked for site in sites], run.parameters)
    if any(p.site is not None for p in run.parameters) and not bypassed:
        return None  # the sublayer does not exist, or is in a branch
    consequence = _consequence(gap, by_block, profile, bypassed=bypassed)
    if consequence is None:
        return None
    site, sentence = consequence
    present = by_block[gap.block]
    names = " and ".join(" or ".join(dict.fromkeys(site.sublayer for site in sites)) for sites in lacked)
    has = f"only {' and '.join(site.sublayer for site in present)}" if present else "nothing"
    beside = [*gap.before[-1:], *gap.after[:1]]
    noun, verb = ("blocks", "add") if len(beside) > 1 else ("block", "adds")
    return Hit(
        sites=(site,),
        place=Place(block=gap.block, sublayer=lacked[0][0].sublayer),
        metric="additions",
        value=float(len(present)),
        expected=float(len(gap.usual)),
        message=f"The residual of the {names} of block {gap.block} is missing: {noun} {' and '.join(map(str, beside))} {verb} "
        f"{' and '.join(site.sublayer for site in by_block[beside[0]])}, block {gap.block} {has}. {sentence}",
        remedy="Write x = x + F(x) there, as in the adjacent blocks.",
    )


def _consequence(gap: _Gap, by_block: _SitesByBlock, profile: Profile, *, bypassed: bool) -> tuple[int, str] | None:
    """Return the site where a gap shows, and what becomes of the stream, as a sentence; ``None`` if nothing shows it."""
    if gap.before and gap.after:
        begun = _restart(gap.block, by_block, profile)
        if begun is None:
            return None
        ended = profile.sites[profile.sites.index(begun) - 1]
        return begun.site, (
            f"The stream before it ends at RMS {number(ended.sum_rms)}, and a new one begins before {site_label(begun)} at RMS "
            f"{number(begun.stream_rms)}: the sublayer replaces the stream instead of adding to it."
        )
    if not bypassed:
        return None  # at an end of the stack no restart can show it
    site = (*by_block[gap.block], profile.sites[0 if gap.after else -1])[0]
    return site.site, (
        "Its parameters are used and get a gradient, but are in no branch: what it computes is not added to the stream."
    )


def _restart(block: int, by_block: _SitesByBlock, profile: Profile) -> SiteRecord | None:
    """Find the site, in a block or the first after it, where a new stream of the same width begins."""
    later: Sequence[SiteRecord] = next(
        (by_block[other] for other in range(block + 1, max(by_block) + 1) if by_block[other]), ()
    )
    begun = next((site for site in (*by_block[block], *later[:1]) if site.continues is None), None)
    index = None if begun is None else profile.sites.index(begun)
    if begun is None or not index or profile.sites[index - 1].block not in (block - 1, block):
        return None
    width, width_before = _width(begun), _width(profile.sites[index - 1])
    if width is None or width_before is None or abs(width - width_before) > 0.01 * width:
        return None  # a stage of another width begins, where no addition is possible
    return begun


def _width(site: SiteRecord) -> float | None:
    """Infer the width from norm = rms * sqrt(width)."""
    log_root = log_ratio(site.stream_norm, site.stream_rms)
    return None if log_root is None else safe_exp(2 * log_root)


def _is_bypassed(block: int, lacked: Sequence[SiteRecord], parameters: Sequence[ParameterRecord]) -> bool:
    """Whether the matrices that are in the lacked branches elsewhere are used in this block, but are in no branch."""
    branches = {site.site for site in lacked}
    names = {pattern(path(p)) for p in parameters if p.site in branches and p.role in ("linear", "convolution")}
    matrices = [p for p in parameters if p.block == block and pattern(path(p)) in names]
    return bool(matrices) and all(
        p.site is None and p.used and (p.grad_state == "norm" or not p.requires_grad) for p in matrices
    )
