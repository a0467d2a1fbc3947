"""Leave padding positions out of what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def padding_masks(batch: Any) -> tuple[Tensor, ...]:
    """Return which positions are real, bool [batch, tokens], for each mask of a keyword batch that leaves some out.

    These are the arguments that the field calls ``attention_mask`` (``decoder_attention_mask`` ...), 0 at padding.
    """
    if not isinstance(batch, Mapping):
        return ()
    given = (value for key, value in batch.items() if str(key).endswith("attention_mask"))
    masks = (mask.bool() for mask in given if isinstance(mask, Tensor) and mask.dim() == 2)
    return tuple(mask for mask in masks if not mask.all())


def real_positions(tensor: Tensor, masks: Iterable[Tensor]) -> Tensor:
    """Return the rows of ``tensor`` at real positions, [positions, width].

    ``tensor`` is [batch, tokens, ..., width], [tokens, batch, ..., width] or [batch * tokens, width]; one of another shape, and
    every one where nothing is padded, is returned as it is.
    """
    for mask in masks:
        if tensor.shape[:2] == mask.shape:
            return tensor[mask]
        if tensor.dim() > 2 and tensor.shape[:2] == mask.t().shape:
            return tensor[mask.t()]
        if tensor.dim() == 2 and len(tensor) == mask.numel():
            return tensor[mask.flatten()]
    return tensor
