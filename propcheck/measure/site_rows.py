"""Turn the measurements of a pass into the rows of ``sublayers.parquet`` and ``norms.parquet``.

All numbers leave the device in one transfer per table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from propcheck.measure.placements import placements, read_norm
from propcheck.records import NormRecord, SiteRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from propcheck.measure.measured_pass import MeasuredSite
    from propcheck.measure.norms import NormMeasurement
    from propcheck.records import NormPlace
    from propcheck.tracing.graph import Norm
    from propcheck.tracing.sites import Site


def site_records(sites: Sequence[MeasuredSite], seed: int, gradients: Mapping[str, float]) -> tuple[SiteRecord, ...]:
    """Return the rows of ``sublayers.parquet`` of one pass.

    Parameters
    ----------
    sites
        With their measurements, in order.
    seed
        Of the pass.
    gradients
        The gradient norm of each parameter that has one.
    """
    numbers = iter(_to_host([tensor for site in sites for tensor in _tensors(site)]))
    records = []
    for site, placement in zip(sites, placements(sites), strict=True):
        values = dict(zip(_VALUES, (next(numbers) for _ in _VALUES), strict=True))
        norms = [gradients[name] for name in sorted(site.branch.parameters) if name in gradients]
        records.append(_site_record(site, seed, placement, values, norms))
    return tuple(records)


def _site_record(
    site: MeasuredSite, seed: int, placement: str, values: Mapping[str, float | None], parameter_norms: Sequence[float]
) -> SiteRecord:
    measured = {name: value for name, value in values.items() if value is not None}
    root_width = site.shape[-1] ** 0.5
    stream, update, total = (measured[name] ** 0.5 for name in ("stream", "update", "sum"))
    correlation, nonfinite = measured["correlation"], int(measured["nonfinite"])
    return SiteRecord(
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
        stream_mean=measured["stream_mean"],
        update_mean=measured["update_mean"],
        sum_mean=measured["sum_mean"],
        sum_absmax=measured["absmax"],
        update_ratio=update / stream if stream else None,
        # Undefined for a zero update,
        cosine=measured["cosine"] if update and stream else None,
        add_error=measured["add_error"] if update else None,
        swallowed=measured["swallowed"] if update else None,
        nonfinite=nonfinite,
        # and for fewer than two tokens that are not zero.
        token_correlation=correlation if nonfinite or not math.isnan(correlation) else None,
        norm_input_rms=_root(values["norm_input"]),
        norm_output_rms=_root(values["norm_output"]),
        epsilon_share=values["epsilon_share"],
        bare_read=site.branch.reads_bare if site.read_norm is not None else None,
        attention_logit_rms=_root(values["logits"]),
        attention_logit_absmax=values["logit_absmax"],
        attention_entropy=_number(values["entropy"]),
        grad_stream_norm=values["grad_stream"],
        grad_update_norm=values["grad_update"],
        grad_sum_norm=values["grad_sum"],
        param_grad_norm=sum(norm * norm for norm in parameter_norms) ** 0.5 if parameter_norms else None,
    )


_VALUES = (
    "stream", "update", "sum", "stream_mean", "update_mean", "sum_mean", "absmax", "cosine", "add_error", "swallowed",
    "nonfinite", "correlation", "norm_input", "norm_output", "epsilon_share", "logits", "logit_absmax", "entropy",
    "grad_stream", "grad_update", "grad_sum",
)  # fmt: skip


def _tensors(site: MeasuredSite) -> list[Tensor | None]:
    """Return the measurements at a site, in the order of ``_VALUES``."""
    addition, norm, attentions = site.statistics, site.read_norm, site.attentions
    of_norm = None if norm is None else norm.statistics
    return [
        addition.stream.mean_square,
        addition.update.mean_square,
        addition.total.mean_square,
        addition.stream.mean,
        addition.update.mean,
        addition.total.mean,
        addition.total_absmax,
        addition.cosine,
        addition.add_error,
        addition.swallowed,
        addition.nonfinite,
        addition.token_correlation,
        None if of_norm is None else of_norm.input_mean_square,
        None if norm is None else norm.output_mean_square,
        None if of_norm is None else of_norm.epsilon_share,
        torch.stack([attention.logit_mean_square for attention in attentions]).mean() if attentions else None,
        torch.stack([attention.logit_absmax for attention in attentions]).amax() if attentions else None,
        torch.stack([attention.entropy for attention in attentions]).mean() if attentions else None,
        site.gradients.get("stream"),
        site.gradients.get("update"),
        site.gradients.get("sum"),
    ]


def _root(square: float | None) -> float | None:
    return None if square is None else square**0.5


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def norm_records(
    measured: Mapping[Norm, NormMeasurement], sites: Sequence[Site], seed: int, block_of: Callable[[str | None], int | None]
) -> tuple[NormRecord, ...]:
    """Return the rows of ``norms.parquet`` of one pass.

    Parameters
    ----------
    measured
        The norms, in order.
    sites
        Of the same pass.
    seed
        Of the pass.
    block_of
        Returns the block of a module.
    """
    places = _norm_places(sites)
    outside: tuple[NormPlace, None] = ("outside", None)
    numbers = iter(_to_host([tensor for norm in measured.values() for tensor in _norm_tensors(norm)]))
    records = []
    for norm in measured:
        place, site = places.get(norm, outside)
        source, absmax, output, gain, epsilon_share, zero_share = (next(numbers) for _ in range(6))
        records.append(
            NormRecord(
                seed=seed,
                norm=norm.number,
                site=None if site is None else site.number,
                block=site.block if site is not None else block_of(norm.module),
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


def _norm_places(sites: Sequence[Site]) -> dict[Norm, tuple[NormPlace, Site]]:
    """Return the site of each norm, and where at the site it is; norms on the stream come first."""
    places: dict[Norm, tuple[NormPlace, Site]] = {}
    by_number = {site.number: site for site in sites}
    for site in sites:
        before = None if site.continues is None else by_number.get(site.continues)
        if site.stream.norm is not None and before is not None:
            places.setdefault(site.stream.norm, ("stream", before))
    for site in sites:
        for norm in site.branch.norms:
            is_read, is_written = norm is read_norm(site), norm is site.branch.written_norm
            place: NormPlace = "read" if is_read else "written" if is_written else "inside"
            places.setdefault(norm, (place, site))
    return places


def _norm_tensors(norm: NormMeasurement) -> tuple[Tensor | None, ...]:
    statistics = norm.statistics
    if statistics is None:
        return (None, None, norm.output_mean_square, norm.gain_mean_square, None, None)
    return (
        statistics.input_mean_square,
        statistics.input_absmax,
        norm.output_mean_square,
        norm.gain_mean_square,
        statistics.epsilon_share,
        statistics.zero_share,
    )


def _to_host(tensors: Sequence[Tensor | None]) -> list[float | None]:
    """Return 0-d tensors as numbers, in one transfer from the device."""
    present = [tensor.double() for tensor in tensors if tensor is not None]
    numbers = iter(torch.stack(present).tolist() if present else [])
    return [None if tensor is None else next(numbers) for tensor in tensors]
