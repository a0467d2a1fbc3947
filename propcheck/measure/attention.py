"""Statistics of one attention: how large its logits are, and how far its weights are from uniform ones.

A fused attention never shows its logits, so they are computed again, in fp64 and a block of heads and queries at a time; an
eager one shows them at its softmax. Results are 0-d fp64 tensors; nothing here synchronises with the host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from propcheck.measure.statistics import blocks
from propcheck.tracing.graph import signal_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

# Elements of a block of logits: its few fp64 copies are 8 MiB each.
_BLOCK = 1 << 20
# What is added to a logit to hide a pair: -inf, the dtype's least number or half of it, and in older code -1e9 or -1e4, which
# bf16 rounds to -9984. A bias by distance (ALiBi, at most 0.71 a token) is as large after 12,000 tokens.
_HIDDEN = -9000.0


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """What one attention does, over the pairs of query and key that no mask hides; NaN where there are none.

    ``logit_mean_square`` and ``logit_absmax`` are of the logits as the softmax gets them: scaled, any bias included.
    ``entropy`` is that of the weights over ln(keys that the query sees), in the mean over heads and over the queries that
    see two keys or more: 1 for uniform weights, 0 for a single key.
    """

    logit_mean_square: Tensor
    logit_absmax: Tensor
    entropy: Tensor


_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def attention_of(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, masks: Iterable[Tensor]
) -> AttentionStatistics | None:
    """Measure an attention by the function that shows it, a fused attention or a softmax of products; None for any other.

    Parameters
    ----------
    name, args, kwargs, result
        The call, and what it gave.
    masks
        Which positions are real, [batch, tokens]: padded queries count in no number.
    """
    with torch.no_grad():
        if name == "scaled_dot_product_attention":
            given = {**dict(zip(_SDPA, args, strict=False)), **kwargs}
            return from_products(
                given["query"],
                given["key"],
                mask=_without_padding(given["query"], given.get("attn_mask"), masks),
                is_causal=given.get("is_causal", False),
                scale=given.get("scale"),
                enable_gqa=given.get("enable_gqa", False),
            )
        logits: Tensor = args[0] if args else kwargs["input"]
        known = signal_of(logits)
        if name not in ("softmax", "_softmax") or known is None or known.node is None or not known.node.mixed:
            return None
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim not in (-1, logits.dim() - 1):
            return None
        real = next((mask for mask in masks if _fits(mask, logits)), None)
        if real is not None:  # [batch, heads, tokens, keys]
            logits, result = (one.transpose(1, 2)[real] for one in (logits, result))
        return from_logits(logits, result)


def _fits(mask: Tensor, tensor: Tensor) -> bool:
    return tensor.dim() == 4 and mask.shape == (tensor.shape[0], tensor.shape[2])


def _without_padding(query: Tensor, mask: Tensor | None, masks: Iterable[Tensor]) -> Tensor | None:
    """Return ``mask`` with the rows of padded queries hidden whole."""
    real = next((one for one in masks if _fits(one, query)), None)
    if real is None:
        return mask
    rows = real[:, None, :, None]
    if mask is None or mask.dtype == torch.bool:
        return rows if mask is None else rows & mask
    return mask.masked_fill(~rows, -torch.inf)


def from_products(
    query: Tensor, key: Tensor, *, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> AttentionStatistics:
    """Measure an attention by what ``scaled_dot_product_attention`` is given.

    Parameters
    ----------
    query
        [..., heads, T, d].
    key
        [..., heads, S, d]; [..., fewer heads, S, d] with ``enable_gqa``.
    mask
        Broadcastable to [..., heads, T, S]. Boolean: true where a pair is seen. Of numbers: added to the logits.
    is_causal
        Hide the keys whose index is above the query's (T and S counted from their first, as torch does).
    scale
        By which the products are multiplied; ``None`` means 1 / sqrt(d).
    enable_gqa
        Whether each head of the keys serves several of the queries.
    """
    query, key = query.detach(), key.detach()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    (tokens, width), keys = query.shape[-2:], key.shape[-2]
    leading = torch.broadcast_shapes((1,), query.shape[:-2], key.shape[:-2], () if mask is None else mask.shape[:-2])
    query, key = query.expand(*leading, -1, -1), key.expand(*leading, -1, -1)
    if mask is not None:
        mask = mask.detach().expand(*leading, tokens, keys)
    factor = width**-0.5 if scale is None else scale
    some_queries = max(1, min(tokens, _BLOCK // max(1, keys)))
    some_heads = max(1, _BLOCK // max(1, some_queries * keys))
    positions = torch.arange(max(tokens, keys), device=query.device)
    sums = []
    for outer in itertools.product(*(range(size) for size in leading[:-1])):
        for head, first in itertools.product(range(0, leading[-1], some_heads), range(0, tokens, some_queries)):
            part: tuple[int | slice, ...] = (*outer, slice(head, head + some_heads))
            rows: tuple[int | slice, ...] = (*part, slice(first, first + some_queries))
            logits = query[rows].double() @ key[part].double().mT * factor
            visible = torch.ones_like(logits, dtype=torch.bool)
            if is_causal:
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
        What the softmax was given and gave, [..., T, S] both. A pair counts as hidden where its logit is -inf or so low that
        only a mask can have made it so.
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
