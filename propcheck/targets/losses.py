"""The loss of a scan where the target does not bring its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.targets.target import Batch


@dataclass(frozen=True, slots=True)
class Loss:
    """A scalar, and ln(vocabulary), the loss of a uniform guess, where it is a next-token loss."""

    value: Tensor
    uniform: float | None


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
    if own is not None:
        return Loss(own, None)
    logits = _named(output, "logits")
    if logits is None:
        logits = next((one for one in _tensors(output) if one.dim() == 3 and one.is_floating_point()), None)
    ids = next((one for one in _tensors(batch) if one.dim() == 2 and not one.is_floating_point()), None)
    if logits is None or ids is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise PropcheckError(
            "the model returns neither a loss nor logits [batch, tokens, vocabulary] for token ids [batch, tokens]; return "
            "propcheck.Target(model, batch=..., loss=...) with a loss(output, batch)"
        )
    return Loss(next_token_loss(logits, ids), math.log(logits.shape[-1]))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy, in fp32, of each token under the logits of the position before it.

    Parameters
    ----------
    logits
        [batch, tokens, vocabulary].
    ids
        [batch, tokens].
    """
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten().to(torch.long))


def _named(output: Any, name: str) -> Tensor | None:
    value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    return [part for part in parts if isinstance(part, Tensor)]
