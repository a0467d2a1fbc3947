"""Factors that start at zero and are trained: until the first step they hold the gradient back from what they multiply.

A gate, a scale or a matrix that is zero passes no gradient on, and has one of its own. What it multiplies is not dead: the
first step ends that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path

if TYPE_CHECKING:
    from collections.abc import Collection

    from propcheck.records import ParameterRecord, Run, SiteRecord

_ADDED = ("bias", "step_bias")
_WEIGHTS = ("linear", "convolution", "norm")


def is_zero(record: ParameterRecord) -> bool:
    """Whether every element is zero."""
    return record.numel > 0 and record.zeros == record.numel


def holds(record: ParameterRecord) -> bool:
    """Whether a parameter is entirely zero and has a gradient above zero."""
    return record.kind == "parameter" and is_zero(record) and record.grad_state == "norm"


def multiplies(record: ParameterRecord) -> bool:
    """Whether a parameter is met as a factor: no bias, and no table whose rows are added or are the signal itself."""
    return record.role not in (*_ADDED, "embedding")


def holding(run: Run, site: SiteRecord, passed: Collection[str] = ()) -> list[ParameterRecord]:
    """List what may hold the gradient back from the branch of a site, in the branch or shared with other branches.

    A parameter that several branches share is known by the first of them, and one that is handed to the blocks as an argument
    by none: it may be in any branch behind the first, if it is in that block, or in none or several.

    Parameters
    ----------
    run
        The run.
    site
        The site whose branch is asked for.
    passed
        Names of parameters that are known to be dead: the bias beside one of them comes behind it.
    """
    weights = {path(p): p for p in run.parameters if p.role in _WEIGHTS}
    return [
        p
        for p in run.parameters
        if holds(p) and _may_be_in(p, site) and not _is_plain_bias(p, weights.get(_weight_name(p)), passed)
    ]


def _may_be_in(record: ParameterRecord, site: SiteRecord) -> bool:
    if record.site == site.site:
        return True
    if record.site is None:
        return record.block is None and record.role not in _ADDED  # a table that is added to the stream is in no branch
    if record.site > site.site:
        return False
    shared = record.branches is not None and record.branches > 1
    return record.block is None or (shared and (record.block == site.block or " = " in record.name))


def _is_plain_bias(record: ParameterRecord, weight: ParameterRecord | None, passed: Collection[str]) -> bool:
    """Whether a bias holds nothing back: its weight gives something already, or is what is dead.

    A bias without a weight (a table that is added to a gate) may be all that a factor consists of, and so may one whose weight
    is zero.
    """
    return record.role in _ADDED and weight is not None and (not is_zero(weight) or weight.name in passed)


def _weight_name(record: ParameterRecord) -> str:
    """Give the name that PyTorch's modules give the weight of a bias."""
    module, dot, name = path(record).rpartition(".")
    return f"{module}{dot}{name.replace('bias', 'weight')}"
