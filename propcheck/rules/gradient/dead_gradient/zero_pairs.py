"""Matrices in a row that are zero: the gradient of each is a product with the other, so both stay zero."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path
from propcheck.rules.zero_init import is_zero, trained_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord, Run, SiteRecord


def zero_pairs(run: Run, site: SiteRecord, branch: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """List the matrices of a branch that are zero, get a gradient of exactly zero, and follow one another.

    A zero that has a gradient (the second matrix of an adapter, an output projection, a scale) may block the gradient of others
    until the first step. If there is one, the result is empty.
    """
    dead = {p.name: p for p in branch if is_zero(p) and p.grad_state == "zero" and p.role == "linear" and len(p.shape) == 2}
    paired: set[str] = set()
    for matrix in dead.values():
        for axis in (0, 1):
            others = _adjacent(matrix, axis, branch)
            back = [_adjacent(other, 1 - axis, branch) for other in others]
            names = {p.name for p in itertools.chain([matrix], others, *back)}
            if others and all(matrix in matrices for matrices in back) and names <= dead.keys():
                paired |= names
    if paired and trained_zeros(run, site, paired):
        return []
    return [p for name, p in dead.items() if name in paired]


def _adjacent(matrix: ParameterRecord, axis: int, branch: Sequence[ParameterRecord]) -> list[ParameterRecord]:
    """List the matrices that read a matrix's output or write its input (the layout decides which axis is which).

    Only the nearest by name count: the matrices of one adapter share the longest beginning of their names.
    """
    fitting = [p for p in branch if p is not matrix and len(p.shape) == 2 and p.shape[1 - axis] == matrix.shape[axis]]
    nearest = max((shared_prefix(path(matrix), path(p)) for p in fitting), default=0)
    return [p for p in fitting if shared_prefix(path(matrix), path(p)) == nearest]


def shared_prefix(*sequences: Sequence[str]) -> int:
    """Count the elements at the beginning that all sequences share."""
    return sum(1 for _ in itertools.takewhile(lambda elements: len(set(elements)) == 1, zip(*sequences, strict=False)))
