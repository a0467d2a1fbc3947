"""Measure attention: the size of the logits and the entropy of the weights.

A fused attention does not show its logits, so they are computed again, in fp64, a block of heads and queries at a time; an
eager one shows them at its softmax. Results are 0-d fp64 tensors. Nothing here waits for the device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from propcheck.measure.statistics import blocks
from propcheck.tracing.events import Listener

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.tracing.events import AttentionCall

# Elements of a block of logits: its few fp64 copies are 8 MiB each.
_BLOCK = 1 << 20
# Masks add -inf, the dtype's lowest number or half of it, and in older code -1e9 or -1e4, which bf16 rounds to -9984. A bias by
# distance (ALiBi, at most 0.71 per token) reaches that after 12,000 tokens.
_HIDDEN = -9000.0


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Of one attention, over the pairs of query and key that no mask hides; NaN where there are none.

    ``logit_mean_square`` and ``logit_absmax`` are of the logits that enter the softmax: scaled, any bias included. ``entropy``
    is that of the weights divided by ln(keys that the query sees), averaged over heads and the queries that see two keys or
    more: 1 for uniform weights, 0 for a single key.
    """

    logit_mean_square: Tensor
    logit_absmax: Tensor
    entropy: Tensor


class AttentionMeasurer(Listener):
    """Measures every attention of a pass.

    Parameters
    ----------
    masks
        Of real positions, as ``padding_masks`` returns them: padded queries count in no number.

    Attributes
    ----------
    statistics
        By the step of the attention in the graph.
    """

    def __init__(self, masks: tuple[Tensor, ...] = ()) -> None:
        self.statistics: dict[int, AttentionStatistics] = {}
        self._masks = masks

    def fused_attention(self, call: AttentionCall) -> None:
        """Compute the logits again and measure them."""
        with torch.no_grad():
            self.statistics[call.step] = from_products(replace(call, mask=self._without_padding(call.query, call.mask)))

    def softmax_attention(self, step: int, logits: Tensor, weights: Tensor) -> None:
        """Measure the logits and weights that the softmax shows."""
        real = self._mask_of(logits)
        with torch.no_grad():
            if real is not None:  # [batch, heads, tokens, keys]
                logits, weights = (tensor.transpose(1, 2)[real] for tensor in (logits, weights))
            self.statistics[step] = from_logits(logits, weights)

    def _mask_of(self, tensor: Tensor) -> Tensor | None:
        """Return the mask of a tensor [batch, heads, tokens, ...]."""
        shape = (tensor.shape[0], tensor.shape[2]) if tensor.dim() == 4 else None
        return next((mask for mask in self._masks if mask.shape == shape), None)

    def _without_padding(self, query: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return ``mask`` with the rows of padded queries hidden."""
        real = self._mask_of(query)
        if real is None:
            return mask
        rows = real[:, None, :, None]
        if mask is None or mask.dtype == torch.bool:
            return rows if mask is None else rows & mask
        return mask.masked_fill(~rows, -torch.inf)


def from_products(call: AttentionCall) -> AttentionStatistics:  # noqa: PLR0914 - one local per step of the formula
    """Measure a fused attention by its arguments.

    Parameters
    ----------
    call
        ``query`` is [..., heads, T, d]. ``key`` is [..., heads, S, d], or has fewer heads with ``enable_gqa``: each then serves
        several of the queries. ``mask`` is broadcastable to [..., heads, T, S]: if boolean, true where a pair is seen, else
        added to the logits. ``is_causal`` hides the keys whose index is above the query's, both counted from their first.
        ``scale`` multiplies the products; None is 1 / sqrt(d).
    """
    query, key, mask = call.query.detach(), call.key.detach(), call.mask
    if call.enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    (tokens, width), keys = query.shape[-2:], key.shape[-2]
    leading = torch.broadcast_shapes((1,), query.shape[:-2], key.shape[:-2], () if mask is None else mask.shape[:-2])
    query, key = query.expand(*leading, -1, -1), key.expand(*leading, -1, -1)
    if mask is not None:
        mask = mask.detach().expand(*leading, tokens, keys)
    factor = width**-0.5 if call.scale is None else call.scale
    queries_at_once = max(1, min(tokens, _BLOCK // max(1, keys)))
    heads_at_once = max(1, _BLOCK // max(1, queries_at_once * keys))
    positions = torch.arange(max(tokens, keys), device=query.device)
    sums = []
    for outer in itertools.product(*(range(size) for size in leading[:-1])):
        for head, first in itertools.product(range(0, leading[-1], heads_at_once), range(0, tokens, queries_at_once)):
            part: tuple[int | slice, ...] = (*outer, slice(head, head + heads_at_once))
            rows: tuple[int | slice, ...] = (*part, slice(first, first + queries_at_once))
            logits = query[rows].double() @ key[part].double().mT * factor
            visible = torch.ones_like(logits, dtype=torch.bool)
            if call.is_causal:
                visible &= positions[first : first + logits.shape[-2], None] >= positions[:keys]
            if mask is not None:
                visible &= mask[rows] if mask.dtype == torch.bool else ~(mask[rows] <= _HIDDEN)
                logits = logits if mask.dtype == torch.bool else logits + mask[rows]
            sums.append(_sums(logits, logits.masked_fill(~visible, -torch.inf).softmax(-1), visible))
    return _statistics(sums)


def from_logits(logits: Tensor, weights: Tensor) -> AttentionStatistics:
    """Measure an attention by its softmax over the last dimension.

    Parameters
    ----------
    logits, weights
        Input and output of the softmax, both [..., T, S]. A pair counts as hidden if its logit is -inf or so low that only a
        mask explains it.
    """
    return _statistics([_sums(rows, shares, ~(rows <= _HIDDEN)) for rows, shares in blocks(logits, weights)])


def _sums(logits: Tensor, weights: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums over one block, [..., S] each: squares, pairs, entropies, queries; and the largest magnitude."""
    seen = torch.where(visible, logits, 0.0)
    shares = torch.where(visible, weights, 0.0)
    pairs = visible.sum(-1)
    entropy = -torch.xlogy(shares, shares).sum(-1) / pairs.double().log()
    several = pairs > 1
    numbers = [(seen * seen).sum(), pairs.sum(), torch.where(several, entropy, 0.0).sum(), several.sum()]
    return torch.stack([number.double() for number in numbers]), seen.abs().amax()


def _statistics(sums: list[tuple[Tensor, Tensor]]) -> AttentionStatistics:
    squares, pairs, entropies, queries = torch.stack([numbers for numbers, _ in sums]).sum(0)
    largest = torch.stack([largest for _, largest in sums]).amax()
    return AttentionStatistics(
        logit_mean_square=squares / pairs,
        logit_absmax=torch.where(pairs > 0, largest, torch.nan),
        entropy=entropies / queries,
    )
