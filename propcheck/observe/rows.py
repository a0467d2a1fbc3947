"""From what was seen at the sites to the rows of ``sublayers.parquet``: one transfer from the device for all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from propcheck.records import SiteRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from propcheck.observe.additions import Site


def placements(sites: Sequence[Site]) -> list[str]:
    """Return the placement of each site from where norms were met.

    pre: the branch read a normed copy of the stream. reordered: its last step was a norm. sandwich: both. post: the sum
    itself passed a norm before it was read again; deepnorm: and the stream was scaled for the addition alone. none: no norm.

    Parameters
    ----------
    sites
        In order.
    """
    found: list[str] = []
    for site in sites:
        own = site.stream.norm.number if site.stream.norm is not None else None
        read = site.branch.read_norm is not None and site.branch.read_norm.number != own
        written = site.branch.written_norm
        post = site.normed
        if not site.followed:  # the norm of the last sum is its own if the sum before it has its own, else the final one
            before = None if site.continues is None else found[site.continues]
            post = post and (before.endswith(("post", "deepnorm")) if before is not None else not (read or written))
        inner = "sandwich" if read and written else "pre" if read else "reordered" if written else None
        if inner is not None:
            found.append(f"{inner}+post" if post else inner)
        elif post:
            found.append("deepnorm" if site.stream.scalings > site.branch.read_scalings else "post")
        else:
            found.append("none")
    return found


def site_records(sites: Sequence[Site], seed: int, gradients: Mapping[str, float]) -> tuple[SiteRecord, ...]:
    """Return the rows of one pass.

    Parameters
    ----------
    sites
        What the follower saw.
    seed
        Of the pass.
    gradients
        The gradient norm of each parameter that has one.
    """
    values = iter(_to_host([tensor for site in sites for tensor in _tensors(site)]))
    records = []
    for site, placement in zip(sites, placements(sites), strict=True):
        column = dict(zip(_COLUMNS, (next(values) for _ in _COLUMNS), strict=True))
        seen = {name: value for name, value in column.items() if value is not None}
        root_width = site.shape[-1] ** 0.5
        stream, update, total = (seen[name] ** 0.5 for name in ("stream", "update", "sum"))
        correlation, nonfinite = seen["correlation"], int(seen["nonfinite"])
        norm_input = column["norm_input"]
        own = [gradients[name] for name in sorted(site.branch.parameters) if name in gradients]
        records.append(
            SiteRecord(
                seed=seed,
                site=site.number,
                block=site.block,
                sublayer=site.branch.sublayer(),
                module=site.branch.module,
                placement=placement,
                continues=site.continues,
                masked="drawn" in site.branch.features,
                stream_dtype=str(site.stream_dtype).removeprefix("torch."),
                update_dtype=str(site.update_dtype).removeprefix("torch."),
                stream_norm=stream * root_width,
                update_norm=update * root_width,
                sum_norm=total * root_width,
                stream_rms=stream,
                update_rms=update,
                sum_rms=total,
                stream_mean=seen["stream_mean"],
                update_mean=seen["update_mean"],
                sum_mean=seen["sum_mean"],
                sum_absmax=seen["absmax"],
                update_ratio=update / stream if stream else None,
                # Nothing is to be said of a zero update,
                cosine=seen["cosine"] if update and stream else None,
                add_error=seen["add_error"] if update else None,
                swallowed=seen["swallowed"] if update else None,
                nonfinite=nonfinite,
                # nor of pairs where fewer than two tokens are not zero.
                token_correlation=correlation if nonfinite or not math.isnan(correlation) else None,
                norm_input_rms=None if norm_input is None else norm_input**0.5,
                grad_stream_norm=column["grad_stream"],
                grad_update_norm=column["grad_update"],
                grad_sum_norm=column["grad_sum"],
                param_grad_norm=sum(norm * norm for norm in own) ** 0.5 if own else None,
            )
        )
    return tuple(records)


_COLUMNS = (
    "stream", "update", "sum", "stream_mean", "update_mean", "sum_mean", "absmax", "cosine", "add_error", "swallowed",
    "nonfinite", "correlation", "norm_input", "grad_stream", "grad_update", "grad_sum",
)  # fmt: skip


def _tensors(site: Site) -> list[Tensor | None]:
    """Return what was measured at a site, in the order of ``_COLUMNS``."""
    seen = site.statistics
    read = site.branch.read_norm
    own = site.stream.norm
    return [
        seen.stream.mean_square,
        seen.update.mean_square,
        seen.total.mean_square,
        seen.stream.mean,
        seen.update.mean,
        seen.total.mean,
        seen.total_absmax,
        seen.cosine,
        seen.add_error,
        seen.swallowed,
        seen.nonfinite,
        seen.token_correlation,
        None if read is None or (own is not None and read.number == own.number) else read.input_mean_square,
        *(site.gradients.get(name) for name in ("stream", "update", "sum")),
    ]


def _to_host(tensors: Sequence[Tensor | None]) -> list[float | None]:
    """Return 0-d tensors as numbers, in one transfer."""
    present = [tensor.double() for tensor in tensors if tensor is not None]
    numbers = iter(torch.stack(present).tolist() if present else [])
    return [None if tensor is None else next(numbers) for tensor in tensors]
