"""The unit that a scan runs: a model with its batch and loss (``Target``), and how to build it (``Task``)."""

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

# The arguments of a model: one tensor, positional arguments, or keyword arguments; each value any nesting of tensors.
Batch = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A model with its batch and loss. The scanned code returns a target, or the model alone.

    Attributes
    ----------
    model
        Initialised as for training.
    batch
        What the model is called with: a tensor, a tuple of positional arguments or a dict of keyword arguments, or a function
        that returns one of these; it may take the seed. None: token ids ``[batch, tokens]`` as set by
        the probe's inputs, with the next token of each if ``forward`` also takes ``targets`` or ``labels``.
    loss
        Function of the model's output and the batch that returns the scalar loss. None: the loss that the model returns, else
        the next-token loss of its logits ``[batch, tokens, vocabulary]``.
    blocks
        Names of the block modules, in order, or the name of a container of them. None: blocks are detected.
    """

    model: nn.Module
    batch: Batch | Callable[..., Batch] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    blocks: str | Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """How to build and run a target, with the settings from the probe.

    Attributes
    ----------
    build
        Function that constructs and initialises the target; called under fake tensors.
    batch
        Function of the model and the seed that returns token ids, for a target without a batch.
    autocast
        Dtype of matrix products, if it differs from that of the parameters.
    loss_scale
        Factor on the loss in the backward pass; the gradients are divided by it.
    precision
        Name of the precision in the run; None: derived from the dtypes of the parameters.
    source
        Name of the inputs in the run, for a target without a batch, such as ``zipf``.
    notes
        Notes for the user on choices that were made for the target.
    around
        Returns a context manager that is active while the target is built and run.
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
    """Call ``model`` with ``batch``.

    Raises
    ------
    PropcheckError
        If the model's forward does not take these arguments.
    """
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
            f"{type(model).__name__}.forward takes ({parameter_list(model.forward)}), but the batch has "
            f"{', '.join(kwargs) or count(len(args), 'argument')}: {error}; return propcheck.Target(model, batch=...)"
        ) from None
    return model(*args, **kwargs)


def parameter_list(function: Callable[..., Any]) -> str:
    """Return the parameters of ``function`` without annotations, at most 12: ``width, layers=4, *args``."""
    parameters = [str(parameter.replace(annotation=Parameter.empty)) for parameter in signature(function).parameters.values()]
    return ", ".join(parameters if len(parameters) <= 12 else [*parameters[:12], "..."])
