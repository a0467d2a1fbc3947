"""What is said of the operation that first made a number that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from propcheck.formatting import count
from propcheck.records import Place
from propcheck.rules.sites import place_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Origin, Run, SiteRecord


def first_origin(run: Run, sites: Sequence[SiteRecord], direction: Literal["forward", "backward"]) -> Origin | None:
    """Return what made the first NaN or infinity of the pass of ``sites``; None where that is not known."""
    seed = sites[0].seed if sites else run.seeds[0]
    return next((one for one in run.origins if (one.seed, one.direction) == (seed, direction)), None)


def made_by(origin: Origin | None) -> str:
    """Say it in a sentence; empty where it is not known."""
    if origin is None:
        return ""
    module = "" if origin.module is None else f" in {origin.module}"
    return (
        f" The first {origin.value} of the pass is made by {origin.function}{module}, out of {origin.inputs}{_tokens(origin)}."
    )


def made_in(origin: Origin, sites: Sequence[SiteRecord], first: SiteRecord) -> Place:
    """Place what an origin led to: where it lies itself if that is another block than ``first``, the first site to show it."""
    if origin.block is None or first.block is None or origin.block == first.block:
        return place_of(first)
    module = origin.module or ""
    branch = next((one for one in sites if one.block == origin.block and one.module and _is_within(module, one.module)), None)
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
