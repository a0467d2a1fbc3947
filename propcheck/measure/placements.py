"""Infer the placement of the norms at each site."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.tracing.graph import Norm
    from propcheck.tracing.sites import Site


def read_norm(site: Site) -> Norm | None:
    """Return the norm that a branch reads the stream through, unless it is on the stream itself."""
    norm = site.branch.read_norm
    return None if norm is site.stream.norm else norm


def placements(sites: Sequence[Site]) -> list[str]:
    """Return the placement of each site.

    pre: the branch read a normed copy of the stream. reordered: its last step was a norm. sandwich: both. post: the sum passed
    a norm before it was read again; deepnorm: and the stream was scaled for the addition alone. none: no norm.

    Parameters
    ----------
    sites
        In order.
    """
    kinds: list[str] = []
    for site in sites:
        reads, writes = read_norm(site) is not None, site.branch.written_norm is not None
        post = site.normed
        if not site.followed:  # the norm of the last sum is its own if the sum before has one, else it is the final norm
            before = None if site.continues is None else kinds[site.continues]
            post = post and (before.endswith(("post", "deepnorm")) if before is not None else not (reads or writes))
        inner = "sandwich" if reads and writes else "pre" if reads else "reordered" if writes else None
        if inner is not None:
            kinds.append(f"{inner}+post" if post else inner)
        elif post:
            kinds.append("deepnorm" if site.stream.scalings > site.branch.read_scalings else "post")
        else:
            kinds.append("none")
    return kinds
