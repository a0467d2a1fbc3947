"""From what was seen at the sites to the rows of ``sublayers.parquet``: one transfer from the device for all of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from propcheck.records import NormRecord, SiteRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from propcheck.records import NormPlace
    from propcheck.tracing.additions import Site
    from propcheck.tracing.graph import Norm


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
        read = _read_norm(site) is not None
        written = site.branch.written_norm is not None
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
                promoted=site.stream.promoted,
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
                norm_input_rms=_root(column["norm_input"]),
                norm_output_rms=_root(column["norm_output"]),
                epsilon_share=column["epsilon_share"],
                bare_read=site.branch.reads_bare if _read_norm(site) is not None else None,
                attention_logit_rms=_root(column["logits"]),
                attention_logit_absmax=column["logit_absmax"],
                attention_entropy=_number(column["entropy"]),
                grad_stream_norm=column["grad_stream"],
                grad_update_norm=column["grad_update"],
                grad_sum_norm=column["grad_sum"],
                param_grad_norm=sum(norm * norm for norm in own) ** 0.5 if own else None,
            )
        )
    return tuple(records)


_COLUMNS = (
    "stream", "update", "sum", "stream_mean", "update_mean", "sum_mean", "absmax", "cosine", "add_error", "swallowed",
    "nonfinite", "correlation", "norm_input", "norm_output", "epsilon_share", "logits", "logit_absmax", "entropy",
    "grad_stream", "grad_update", "grad_sum",
)  # fmt: skip


def _tensors(site: Site) -> list[Tensor | None]:
    """Return what was measured at a site, in the order of ``_COLUMNS``."""
    seen = site.statistics
    read = _read_norm(site)
    measured = None if read is None else read.statistics
    attentions = site.branch.attentions
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
        None if measured is None else measured.input_mean_square,
        None if read is None else _output(read),
        None if measured is None else measured.epsilon_share,
        torch.stack([one.logit_mean_square for one in attentions]).mean() if attentions else None,
        torch.stack([one.logit_absmax for one in attentions]).amax() if attentions else None,
        torch.stack([one.entropy for one in attentions]).mean() if attentions else None,
        *(site.gradients.get(name) for name in ("stream", "update", "sum")),
    ]


def _read_norm(site: Site) -> Norm | None:
    """Return the norm that a branch reads the stream through, if that is not on the stream itself."""
    read = site.branch.read_norm
    return None if read is site.stream.norm else read


def _output(norm: Norm) -> Tensor | None:
    if norm.output_mean_square is not None or norm.statistics is None:
        return norm.output_mean_square
    return norm.statistics.output_mean_square


def _measured(norm: Norm) -> tuple[Tensor | None, ...]:
    seen = norm.statistics
    first = (None, None) if seen is None else (seen.input_mean_square, seen.input_absmax)
    last = (None, None) if seen is None else (seen.epsilon_share, seen.zero_share)
    return (*first, _output(norm), norm.gain_mean_square, *last)


def _root(square: float | None) -> float | None:
    return None if square is None else square**0.5


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def norm_records(
    norms: Sequence[Norm], sites: Sequence[Site], seed: int, block_of: Callable[[str | None], int | None]
) -> tuple[NormRecord, ...]:
    """Return the rows of ``norms.parquet`` of one pass.

    Parameters
    ----------
    norms
        What was met, in order.
    sites
        Of the same pass.
    seed
        Of the pass.
    block_of
        Gives the block of a module.
    """
    places: dict[Norm, tuple[NormPlace, Site]] = {}
    by_number = {site.number: site for site in sites}
    for site in sites:
        before = by_number.get(-1 if site.continues is None else site.continues)
        if site.stream.norm is not None and before is not None:
            places.setdefault(site.stream.norm, ("stream", before))
    for site in sites:
        read, written = _read_norm(site), site.branch.written_norm
        for norm in site.branch.norms:
            place: NormPlace = "read" if norm is read else "written" if norm is written else "inside"
            places.setdefault(norm, (place, site))
    values = iter(_to_host([tensor for norm in norms for tensor in _measured(norm)]))
    records = []
    for norm in norms:
        place, at = places.get(norm, ("outside", None))
        source, absmax, output, gain, epsilon_share, zero_share = (next(values) for _ in range(6))
        block = at.block if at is not None else block_of(norm.module)
        records.append(
            NormRecord(
                seed=seed,
                norm=norm.number,
                site=None if at is None else at.number,
                block=block,
                place=place,
                module=norm.module,
                parameter=norm.parameter,
                kind=norm.kind,
                dtype=str(norm.dtype).removeprefix("torch."),
                width=norm.width,
                eps=norm.eps,
                input_rms=_root(source),
                input_absmax=absmax,
                output_rms=_root(output),
                gain=_root(gain),
                epsilon_share=epsilon_share,
                zero_share=_number(zero_share),
            )
        )
    return tuple(records)


def _to_host(tensors: Sequence[Tensor | None]) -> list[float | None]:
    """Return 0-d tensors as numbers, in one transfer."""
    present = [tensor.double() for tensor in tensors if tensor is not None]
    numbers = iter(torch.stack(present).tolist() if present else [])
    return [None if tensor is None else next(numbers) for tensor in tensors]
