"""Run linear layers and embeddings through autograd functions whose backward measures the weight's gradient."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from propcheck.measure.gradients import MeasuredEmbedding, MeasuredLinear, worth_factoring
from propcheck.tracing.tensors import bound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from propcheck.measure.gradients import Ledger
    from propcheck.tracing.function_mode import Runner

# The hooks that save tensors in place of autograd, or None. torch 2.6 and 2.7 do not expose them; there too, checkpointing is a
# plain call during a scan, and the model's own hooks accept whatever is saved.
_SAVING_HOOKS: Callable[[bool], object] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # noqa: SLF001


def weight_runners(names: Mapping[int, str], ledger: Ledger) -> dict[str, Runner]:
    """Return what runs ``linear`` and ``embedding``, so that the gradients of their weights go to the ledger.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    ledger
        Receives the gradients.
    """

    def linear(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        x, weight, bias = bound(("input", "weight", "bias"), args, kwargs)
        name = names.get(id(weight))
        autocast = torch.is_autocast_enabled(x.device.type)
        if (
            name is None
            or not _is_differentiated(weight)
            or not worth_factoring(x, weight)
            or (x.dtype == torch.float64 if autocast else x.dtype != weight.dtype)
        ):
            return func(*args, **kwargs)
        if autocast:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        return MeasuredLinear.apply(x, weight, bias, partial(ledger.add, name))

    def embedding(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        keys = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        numbers, weight, padding, max_norm, _, by_frequency, _ = bound(keys, args, kwargs)
        name = names.get(id(weight))
        if name is None or not _is_differentiated(weight) or max_norm is not None or by_frequency:
            return func(*args, **kwargs)
        return MeasuredEmbedding.apply(numbers, weight, padding, partial(ledger.add, name))

    return {"linear": linear, "embedding": embedding}


def _is_differentiated(weight: Tensor) -> bool:
    """Whether autograd will ask for the gradient of ``weight`` in the usual way.

    Non-reentrant checkpointing, recognised by its hooks on saved tensors, runs its part again outside of the tracer and expects
    the same tensors to be saved that plain code saves.
    """
    hooks = _SAVING_HOOKS(False)
    transformed = torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001 - torch.func, with a way of its own
    return weight.requires_grad and torch.is_grad_enabled() and not transformed and hooks is None
