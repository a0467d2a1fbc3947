"""What is said of the operation that first made a number that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from propcheck.wording import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import Origin, Run, SiteRecord


def first_made(run: Run, sites: Sequence[SiteRecord], direction: Literal["forward", "backward"]) -> str:
    """Say in a sentence what made the first NaN or infinity of the pass of ``sites``; empty where that is not known."""
    seed = sites[0].seed if sites else run.seeds[0]
    found = next((one for one in run.origins if (one.seed, one.direction) == (seed, direction)), None)
    if found is None:
        return ""
    module = "" if found.module is None else f" in {found.module}"
    return f" The first {found.value} of the pass is made by {found.function}{module}, out of {found.inputs}{_tokens(found)}."


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
