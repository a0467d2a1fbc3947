"""Default losses: the loss that a model returns, the next-token loss of its logits, or a random direction of its output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.targets.target import Batch

_IGNORED = -100  # the default ignore_index of torch


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar loss.

    Attributes
    ----------
    value
        0-d.
    uniform
        The loss of a uniform guess, ln(vocabulary), for a cross-entropy of tokens or classes; else None.
    logits
        [..., vocabulary], for a cross-entropy; else None.
    """

    value: Tensor
    uniform: float | None
    logits: Tensor | None = None


def default_loss(output: Any, batch: Batch) -> Loss:
    """Return the loss in the model's output, else the next-token loss of its logits.

    Parameters
    ----------
    output
        The model's output: a scalar; logits [batch, tokens, vocabulary]; a tuple or list that holds one of these, such as
        ``(logits, loss)``; or a mapping or object with ``loss`` or ``logits``.
    batch
        The model's arguments. The first integer tensor [batch, tokens] holds the token ids of the next-token loss.

    Raises
    ------
    PropcheckError
        If the output has neither: the target needs a loss function.
    """
    loss = _named(output, "loss")
    if loss is None:
        loss = next((tensor for tensor in _tensors(output) if tensor.dim() == 0 and tensor.is_floating_point()), None)
    logits = _named(output, "logits")
    if logits is None:
        logits = next((tensor for tensor in _tensors(output) if tensor.dim() == 3 and tensor.is_floating_point()), None)
    if loss is not None:
        uniform = _uniform_loss(logits, batch)
        return Loss(loss, uniform, None if uniform is None else logits)
    ids = next((tensor for tensor in _tensors(batch) if tensor.dim() == 2 and not tensor.is_floating_point()), None)
    if logits is None or ids is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise PropcheckError(
            "the model returns neither a loss nor logits [batch, tokens, vocabulary] for token ids [batch, tokens], but "
            f"{_shapes(output)}; return propcheck.Target(model, batch=..., loss=...) with a loss(output, batch)"
        )
    return Loss(next_token_loss(logits, ids, _named(batch, "attention_mask")), math.log(logits.shape[-1]), logits)


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy, in fp32, of each token given the logits of the position before it.

    Parameters
    ----------
    logits
        [batch, tokens, vocabulary].
    ids
        [batch, tokens].
    mask
        [batch, tokens], 0 at padding, which the loss ignores.
    """
    targets = ids[:, 1:].to(torch.long)
    if mask is not None and mask.shape == ids.shape:
        targets = targets.masked_fill(mask[:, 1:] == 0, _IGNORED)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


def random_direction(output: Any, batch: Batch) -> Tensor:
    """Return mean(output * u) in fp32, u ~ N(0, 1), summed over the floating-point output tensors that require a gradient.

    A loss for a model without a head. The direction u is the same for every seed.
    """
    del batch
    total: Tensor | None = None
    generator = torch.Generator().manual_seed(0)
    for value in tree_leaves(tuple(output.values()) if isinstance(output, Mapping) else output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            direction = torch.randn(value.shape, generator=generator).to(value.device)
            projection = (value.float() * direction).mean()
            total = projection if total is None else total + projection
    if total is None:
        raise PropcheckError(f"the model returns no floating-point tensor with a gradient, but {_shapes(output)}")
    return total


def _uniform_loss(logits: Tensor | None, batch: Batch) -> float | None:
    """Return ln(classes) if the batch has integer ``labels`` or ``targets``, one per row of the logits."""
    labels = batch.get("labels", batch.get("targets")) if isinstance(batch, Mapping) else None
    if logits is None or not isinstance(labels, Tensor) or labels.is_floating_point() or logits.shape[-1] < 2:
        return None
    return math.log(logits.shape[-1]) if labels.shape == logits.shape[:-1] else None


def _shapes(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a {str(output.dtype).removeprefix('torch.')} tensor {list(output.shape)}"
    if isinstance(output, Mapping):
        entries = (f"{key} {list(value.shape) if isinstance(value, Tensor) else ''}".rstrip() for key, value in output.items())
        return f"a {type(output).__name__} of {', '.join(entries)}"
    values = ", ".join(_shapes(value) if isinstance(value, Tensor) else type(value).__name__ for value in _values(output))
    return f"a {type(output).__name__}" + (f" of {values}" if values else "")


def _named(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in _values(output) if isinstance(value, Tensor)]


def _values(output: Any) -> Iterable[Any]:
    if isinstance(output, Tensor):
        return [output]
    return output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
