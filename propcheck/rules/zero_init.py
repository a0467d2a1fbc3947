"""Parameters that start at zero and are trained: they block the gradient of what they multiply until the first step.

A gate, a scale or a matrix that is zero passes no gradient on, but has a gradient of its own. The branch that it multiplies is
therefore not dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path

if TYPE_CHECKING:
    from collections.abc import Collection

    from propcheck.records import ParameterRecord, Run, SiteRecord

_ADDED = ("bias", "step_bias")
_WEIGHTS = ("linear", "convolution", "norm")


def is_zero(parameter: ParameterRecord) -> bool:
    """Whether every element is zero."""
    return parameter.numel > 0 and parameter.zeros == parameter.numel


def is_trained_zero(parameter: ParameterRecord) -> bool:
    """Whether a parameter is entirely zero and has a gradient above zero."""
    return parameter.kind == "parameter" and is_zero(parameter) and parameter.grad_state == "norm"


def is_factor(parameter: ParameterRecord) -> bool:
    """Whether a parameter multiplies: no bias, and no table whose rows are added or are the signal itself."""
    return parameter.role not in (*_ADDED, "embedding")


def trained_zeros(run: Run, site: SiteRecord, dead: Collection[str] = ()) -> list[ParameterRecord]:
    """List the trained zeros that may block the gradient of a site's branch, in the branch or shared with other branches.

    A parameter that several branches share is recorded at the first of them; one that is passed to the blocks as an argument,
    at none. So it may belong to any later branch in its block, or to any branch at all if it is in no block or in several.

    Parameters
    ----------
    run
        The run.
    site
        The site of the branch.
    dead
        Names of parameters known to be dead. A bias next to one of them comes after it, and blocks nothing.
    """
    weights = {path(p): p for p in run.parameters if p.role in _WEIGHTS}
    return [
        p
        for p in run.parameters
        if is_trained_zero(p) and _may_be_in_branch(p, site) and not _is_plain_bias(p, weights.get(_weight_name(p)), dead)
    ]


def _may_be_in_branch(parameter: ParameterRecord, site: SiteRecord) -> bool:
    if parameter.site == site.site:
        return True
    if parameter.site is None:
        return parameter.block is None and parameter.role not in _ADDED  # a table added to the stream is in no branch
    if parameter.site > site.site:
        return False
    shared = parameter.branches is not None and parameter.branches > 1
    return parameter.block is None or (shared and (parameter.block == site.block or " = " in parameter.name))


def _is_plain_bias(parameter: ParameterRecord, weight: ParameterRecord | None, dead: Collection[str]) -> bool:
    """Whether a bias blocks nothing, because its weight is not zero or is itself known to be dead.

    A bias without a weight (a table added to a gate) may be the whole factor, and so may one whose weight is zero.
    """
    return parameter.role in _ADDED and weight is not None and (not is_zero(weight) or weight.name in dead)


def _weight_name(bias: ParameterRecord) -> str:
    """Return the name that PyTorch's modules give the weight of a bias."""
    module, dot, name = path(bias).rpartition(".")
    return f"{module}{dot}{name.replace('bias', 'weight')}"
