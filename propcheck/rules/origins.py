"""The first NaN or infinity of a pass: the sites that hold one, and the operation that made it. PC209 and PC305."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.sites import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Origin, Run, SiteRecord


def is_finite(value: float | None) -> bool:
    """Whether a value is neither NaN nor infinite; true if it was not observed."""
    return value is None or math.isfinite(value)


def holds_nonfinite(site: SiteRecord) -> bool:
    """Whether a site's sum holds a NaN or an infinity, as far as it was observed."""
    if site.nonfinite is not None:
        return site.nonfinite > 0
    return not all(is_finite(value) for value in (site.update_rms, site.sum_rms, site.sum_absmax))


def first_origin(run: Run, sites: Sequence[SiteRecord], direction: Literal["forward", "backward"]) -> Origin | None:
    """Return the origin of the first NaN or infinity in the pass of ``sites``; ``None`` if unknown."""
    seed = sites[0].seed if sites else run.seeds[0]
    return next((origin for origin in run.origins if (origin.seed, origin.direction) == (seed, direction)), None)


def made_by(origin: Origin | None) -> str:
    """Name the operation that made the first NaN or infinity, as a sentence; empty if unknown."""
    if origin is None:
        return ""
    module = "" if origin.module is None else f" in {origin.module}"
    return (
        f" The first {origin.value} of the pass is made by {origin.function}{module}, given {origin.inputs}{_tokens(origin)}."
    )


def origin_place(origin: Origin, sites: Sequence[SiteRecord], first: SiteRecord) -> Place:
    """Return ``first``, the first site that is not finite, or the place of the origin if it lies in another block."""
    if origin.block is None or first.block is None or origin.block == first.block:
        return place_of(first)
    module = origin.module or ""
    in_branch = (site for site in sites if site.block == origin.block and site.module and _is_within(module, site.module))
    branch = next(in_branch, None)
    return Place(block=origin.block, module=origin.module) if branch is None else place_of(branch)


def _is_within(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _tokens(origin: Origin) -> str:
    if origin.affected is None or origin.positions is None or not origin.tokens:
        return ""
    if origin.affected == origin.positions:
        return f": at all {count(origin.positions, 'token')}"
    first, last = origin.tokens[0], origin.tokens[-1]
    if len(origin.tokens) == origin.affected == last - first + 1:
        which = f"token {first}" if first == last else f"tokens {first} to {last}"
        return f": {which} of {origin.positions}"
    return f": at {origin.affected} of {origin.positions} tokens, token {first} the first"
