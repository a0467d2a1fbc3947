"""Branches none of whose trainable parameters gets a gradient, although one reaches their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.idle_experts import idle_parameters
from propcheck.rules.zero_init import trained_zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord, Run, SiteRecord

MATRICES = ("linear", "convolution")


def reached_sites(run: Run) -> dict[int, SiteRecord]:
    """Return the sites whose sum or update gets a gradient, by number, in the first seed (which the parameters are of)."""
    first = run.sites[0].seed if run.sites else None
    return {
        site.site: site
        for site in run.sites
        # A random mask differs at the next step.
        if site.seed == first
        and not site.masked
        and any(gradient is not None and gradient > 0 for gradient in (site.grad_sum_norm, site.grad_update_norm))
    }


def trainable_parameters(run: Run) -> list[ParameterRecord]:
    """List the parameters that require a gradient, without those of experts that got no token."""
    idle = idle_parameters(run)
    return [p for p in run.parameters if p.kind == "parameter" and p.requires_grad and p.name not in idle]


def branch_parameters(run: Run) -> dict[int, list[ParameterRecord]]:
    """Return the trainable parameters of each reached branch, by site, if all of them were observed."""
    reached = reached_sites(run)
    branches: dict[int, list[ParameterRecord]] = {}
    for p in trainable_parameters(run):
        if p.site is not None and p.site in reached:
            branches.setdefault(p.site, []).append(p)
    for site, branch in branches.items():
        # If no path leads into the update, a norm with a gradient gets it from another branch of a parallel block.
        if reached[site].grad_update_norm is None:
            branches[site] = [p for p in branch if p.role in MATRICES or p.grad_state != "norm"]
    return {site: branch for site, branch in branches.items() if all(p.grad_state is not None for p in branch)}


def is_untrained(run: Run, site: SiteRecord, branch: Sequence[ParameterRecord]) -> bool:
    """Whether no parameter of a branch will ever get a gradient; a trained zero may block it until the first step only."""
    states = {p.grad_state for p in branch}
    return bool(branch) and states <= {"zero", "none"} and ("zero" not in states or not trained_zeros(run, site))
