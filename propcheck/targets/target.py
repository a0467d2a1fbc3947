"""What a scan runs: a model, what to feed it, and what its loss is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from torch import Tensor

from propcheck.errors import PropcheckError
from propcheck.formatting import count

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

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
        that returns one of these; it may take the seed. None: token ids ``[batch, tokens]`` as set by
        the probe's inputs, with the next token of each if ``forward`` also takes ``targets`` or ``labels``.
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
    precision
        What the run says of the precision; None: what the dtypes of the parameters say.
    source
        What the run says of the inputs, where the target brings no batch of its own: ``zipf`` and its like for token ids.
    notes
        Sentences for the user about what was chosen.
    around
        Entered for as long as the target is built and run.
    """

    build: Callable[[], Target]
    batch: Callable[[nn.Module, int], Batch]
    autocast: torch.dtype | None = None
    loss_scale: float = 1.0
    precision: str | None = None
    source: str = "zipf"
    notes: tuple[str, ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def call(model: nn.Module, batch: Batch) -> Any:
    """Call ``model`` with ``batch``; ``PropcheckError`` where its forward does not take that."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    try:
        signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise PropcheckError(
            f"{type(model).__name__}.forward takes ({names_of(model.forward)}), and the batch gives "
            f"{', '.join(kwargs) or count(len(args), 'argument')}: {error}; return propcheck.Target(model, batch=...)"
        ) from None
    return model(*args, **kwargs)


def names_of(function: Callable[..., Any]) -> str:
    """Return the parameters of ``function`` as it is called: ``width, layers=4, *args``."""
    words = [str(one.replace(annotation=Parameter.empty)) for one in signature(function).parameters.values()]
    return ", ".join(words if len(words) <= 12 else [*words[:12], "..."])
