"""What a scan runs: a model, what to feed it, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import nn

# What a model is called with: one tensor, positional arguments, or keyword arguments; values of any nesting of tensors.
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A model with what its scan needs beside it. The code that is scanned returns one, or the model alone.

    Attributes
    ----------
    model
        Initialised as for training.
    batch
        What the model is called with: a tensor, a tuple of positional arguments or a dict of keyword arguments, or a function
        that returns one of these; it may take the seed. None: token ids ``[batch, tokens]`` as the probe's inputs say.
    loss
        Returns the scalar loss from the model's output and the batch. None: the loss that the model itself returns, else the
        next-token loss of logits ``[batch, tokens, vocabulary]``.
    blocks
        Names of the modules that are the blocks, in order, or one name of a container of them. None: they are found.
    """

    model: nn.Module
    batch: Batch | Callable[..., Batch] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    blocks: str | Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A target before it is built, with the settings that the probe adds.

    Attributes
    ----------
    build
        Constructs and initialises the target; run under fake tensors.
    batch
        The token ids for a model and a seed, where the target brings no batch of its own.
    autocast
        The dtype of products, when parameters have another.
    loss_scale
        What the loss is multiplied by before the backward pass, and gradients divided by after it.
    """

    build: Callable[[], Target]
    batch: Callable[[nn.Module, int], Batch]
    autocast: torch.dtype | None = None
    loss_scale: float = 1.0


def call(model: nn.Module, batch: Batch) -> Any:
    """Call ``model`` with ``batch``."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch) if isinstance(batch, Tensor) else model(*batch)
