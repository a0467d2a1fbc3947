"""The loss of a scan where the target does not bring its own."""

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


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar, and the loss of a uniform guess, ln(vocabulary), where it is the cross-entropy of tokens or classes.

    ``logits`` [..., vocabulary] are given where it is that.
    """

    value: Tensor
    uniform: float | None
    logits: Tensor | None = None


def default_loss(output: Any, batch: Batch) -> Loss:
    """Return the loss that a model returns itself, or the next-token loss of its logits.

    Parameters
    ----------
    output
        Of the model: a scalar; logits [batch, tokens, vocabulary]; a tuple or list of tensors with one of these (``(logits,
        loss)``, ``(loss, logits)``); a mapping or an object with ``loss`` or ``logits``.
    batch
        What the model was called with; for the next-token loss its first integer tensor [batch, tokens] is the token ids.

    Raises
    ------
    PropcheckError
        If neither is there: the target has to say what its loss is.
    """
    own = _named(output, "loss")
    if own is None:
        own = next((one for one in _tensors(output) if one.dim() == 0 and one.is_floating_point()), None)
    logits = _named(output, "logits")
    if logits is None:
        logits = next((one for one in _tensors(output) if one.dim() == 3 and one.is_floating_point()), None)
    if own is not None:
        uniform = _uniform(logits, batch)
        return Loss(own, uniform, None if uniform is None else logits)
    ids = next((one for one in _tensors(batch) if one.dim() == 2 and not one.is_floating_point()), None)
    if logits is None or ids is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise PropcheckError(
            "the model returns neither a loss nor logits [batch, tokens, vocabulary] for token ids [batch, tokens], but "
            f"{_shapes(output)}; return propcheck.Target(model, batch=..., loss=...) with a loss(output, batch)"
        )
    return Loss(next_token_loss(logits, ids, _named(batch, "attention_mask")), math.log(logits.shape[-1]), logits)


def next_token_loss(logits: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy, in fp32, of each token under the logits of the position before it.

    Parameters
    ----------
    logits
        [batch, tokens, vocabulary].
    ids
        [batch, tokens].
    mask
        [batch, tokens], 0 at padding, which is not predicted.
    """
    targets = ids[:, 1:].to(torch.long)
    if mask is not None and mask.shape == ids.shape:
        targets = targets.masked_fill(mask[:, 1:] == 0, _IGNORED)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten(), ignore_index=_IGNORED)


_IGNORED = -100  # torch's own default


def random_direction(output: Any, batch: Batch) -> Tensor:
    """Return mean(output * u), u ~ N(0, 1), summed over the floating-point tensors of the output that have a gradient.

    For a model without a head. The direction u is the same for every seed. In fp32.
    """
    del batch
    total: Tensor | None = None
    generator = torch.Generator().manual_seed(0)
    for value in tree_leaves(tuple(output.values()) if isinstance(output, Mapping) else output):
        if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad:
            direction = torch.randn(value.shape, generator=generator).to(value.device)
            part = (value.float() * direction).mean()
            total = part if total is None else total + part
    if total is None:
        raise PropcheckError(f"the model returns no floating-point tensor with a gradient, but {_shapes(output)}")
    return total


def _uniform(logits: Tensor | None, batch: Batch) -> float | None:
    """Return ln(classes) where the loss is that of integer ``labels`` or ``targets``, one for each row of the logits."""
    labels = batch.get("labels", batch.get("targets")) if isinstance(batch, Mapping) else None
    if logits is None or not isinstance(labels, Tensor) or labels.is_floating_point() or logits.shape[-1] < 2:
        return None
    return math.log(logits.shape[-1]) if labels.shape == logits.shape[:-1] else None


def _shapes(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a {str(output.dtype).removeprefix('torch.')} tensor {list(output.shape)}"
    if isinstance(output, Mapping):
        named = (f"{key} {list(value.shape) if isinstance(value, Tensor) else ''}".rstrip() for key, value in output.items())
        return f"a {type(output).__name__} of {', '.join(named)}"
    parts = ", ".join(_shapes(part) if isinstance(part, Tensor) else type(part).__name__ for part in _parts(output))
    return f"a {type(output).__name__}" + (f" of {parts}" if parts else "")


def _named(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _tensors(values: Any) -> list[Tensor]:
    return [part for part in _parts(values) if isinstance(part, Tensor)]


def _parts(values: Any) -> Iterable[Any]:
    if isinstance(values, Tensor):
        return [values]
    return values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
