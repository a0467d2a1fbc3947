"""What a scan runs: how to build the model, what to feed it, and what its loss is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to scan.

    Attributes
    ----------
    build
        Constructs and initialises the model; run under fake tensors.
    batch
        Returns the positional inputs of the model for a seed.
    loss
        Returns the scalar loss from the model's output and its inputs.
    tokens
        Token positions in a batch, for estimates of memory.
    uniform_loss
        The loss of a uniform guess, ln(vocabulary); None if there is none.
    autocast
        The dtype of products, when parameters have another.
    loss_scale
        What the loss is multiplied by before the backward pass, and gradients divided by after it.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor]
    tokens: int
    uniform_loss: float | None
    autocast: torch.dtype | None
    loss_scale: float = 1.0
