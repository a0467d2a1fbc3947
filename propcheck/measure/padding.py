"""Exclude padding positions from measurements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def padding_masks(batch: Any) -> tuple[Tensor, ...]:
    """Return the masks of a keyword batch that exclude positions: bool [batch, tokens], true at real positions.

    These are the arguments named ``attention_mask`` (``decoder_attention_mask`` ...), which are 0 at padding.
    """
    if not isinstance(batch, Mapping):
        return ()
    values = (value for key, value in batch.items() if str(key).endswith("attention_mask"))
    masks = (value.bool() for value in values if isinstance(value, Tensor) and value.dim() == 2)
    return tuple(mask for mask in masks if not mask.all())


def real_positions(tensor: Tensor, masks: Iterable[Tensor]) -> Tensor:
    """Return the rows of ``tensor`` at real positions, [positions, width].

    ``tensor`` is [batch, tokens, ..., width], [tokens, batch, ..., width] or [batch * tokens, width]. A tensor of another shape
    is returned unchanged, and any tensor if nothing is padded.
    """
    for mask in masks:
        if tensor.shape[:2] == mask.shape:
            return tensor[mask]
        if tensor.dim() > 2 and tensor.shape[:2] == mask.t().shape:
            return tensor[mask.t()]
        if tensor.dim() == 2 and len(tensor) == mask.numel():
            return tensor[mask.flatten()]
    return tensor
