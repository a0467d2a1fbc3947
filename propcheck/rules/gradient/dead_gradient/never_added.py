"""Sublayers that are computed but added to no stream, so that no gradient reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern, subject, verb
from propcheck.formatting import places
from propcheck.records import Place
from propcheck.rules.gradient.dead_gradient.untrained_branches import MATRICES, reached_sites, trainable_parameters
from propcheck.rules.gradient.dead_gradient.zero_pairs import shared_prefix
from propcheck.rules.rule import Hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord, Run


def never_added(run: Run) -> list[list[ParameterRecord]]:
    """Find the parameters of sublayers that are computed and added nowhere, those of one name in several blocks together.

    They are in a block with a gradient, are used, are in no branch and have no path to the loss, although they were meant to
    be in a branch. Two facts show that they were meant to: the same parameters of a later block are in a branch and get a
    gradient; or the block adds the stream to itself, and the part has no other use in it. A part that only chooses (an index,
    a router) shows neither. Nor does the end of a second stream that the loss does not read, since no later block adds to it.
    """
    blocks: dict[int, list[ParameterRecord]] = {}
    last_trained: dict[str, int] = {}  # by name pattern: the last block in which it is in a branch and has a gradient
    for p in trainable_parameters(run):
        if p.block is not None:
            blocks.setdefault(p.block, []).append(p)
            if p.site is not None and p.grad_state == "norm":
                name = pattern(path(p))
                last_trained[name] = max(p.block, last_trained.get(name, 0))
    reached_blocks = {site.block for site in reached_sites(run).values()}
    doubled_blocks = {doubling.block for doubling in run.doublings}
    groups: dict[frozenset[str], list[ParameterRecord]] = {}
    for block, parameters in blocks.items():
        if block not in reached_blocks:
            continue
        outside = [p for p in parameters if p.site is None and p.used and p.grad_state == "none"]
        parts = _whole_parts(parameters, {p.name for p in outside}) if block in doubled_blocks else set()
        lost = [p for p in outside if p.name in parts or block < last_trained.get(pattern(path(p)), -1)]
        if any(p.role in MATRICES for p in lost):
            groups.setdefault(frozenset(pattern(path(p)) for p in lost), []).extend(lost)
    return list(groups.values())


def _whole_parts(parameters: Sequence[ParameterRecord], outside: set[str]) -> set[str]:
    """Name the parameters of those direct children of a block all of whose parameters are outside."""
    depth = shared_prefix(*(path(p).split(".") for p in parameters))
    children: dict[str, list[ParameterRecord]] = {}
    for p in parameters:
        children.setdefault(".".join(path(p).split(".")[: depth + 1]), []).append(p)
    return {p.name for members in children.values() if all(p.name in outside for p in members) for p in members}


def never_added_hit(parameters: Sequence[ParameterRecord]) -> Hit:
    """Report one group of :func:`never_added`."""
    first = next(p for p in parameters if p.role in MATRICES)
    blocks = [p.block for p in parameters if p.block is not None]
    matrices = [path(p).split(".") for p in parameters if p.role in MATRICES and p.block == first.block]
    module = ".".join(matrices[0][: min(shared_prefix(*matrices), len(matrices[0]) - 1)])
    return Hit(
        sites=(),
        place=Place(block=first.block, sublayer=first.sublayer, module=module or None),
        metric="grad_state",
        value="none",
        expected="norm",
        message=f"The output of {pattern(module) if len(set(blocks)) > 1 else module} in {places('block', blocks)} is added to "
        "nothing. The forward pass uses it, but it is in no branch, and no gradient arrives at its trainable parameters. "
        f"{subject(parameters)} {verb(parameters, 'is', 'are')} never trained.",
        remedy="Add its output to the stream: x = x + F(x). Look for a result that is dropped, or for x + x.",
    )
