"""Linear layers and look-ups as they are run: by functions whose backward measures the weight's gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from propcheck.measure.gradients import MeasuredEmbedding, MeasuredLinear, worth_factoring
from propcheck.tracing.addition_calls import bound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from propcheck.measure.gradients import Ledger

# What saves tensors otherwise than autograd does, or None. torch 2.6 and 2.7 cannot tell: there, as everywhere, checkpointing
# is a plain call during a scan, and hooks of the model's own take whatever is saved.
_SAVING_HOOKS: Callable[[bool], object] = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)  # noqa: SLF001


def run_linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, str], ledger: Ledger) -> Tensor:
    """Run ``F.linear``; where it pays, the gradient of the weight goes to the ledger as factors."""
    x, weight, bias = bound(("input", "weight", "bias"), args, kwargs)
    name = names.get(id(weight))
    autocast = torch.is_autocast_enabled(x.device.type)
    plain = (
        name is None
        or not _is_differentiated(weight)
        or not worth_factoring(x, weight)
        or (x.dtype == torch.float64 if autocast else x.dtype != weight.dtype)
    )
    if plain:
        unchanged: Tensor = func(*args, **kwargs)
        return unchanged
    if autocast:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    result: Tensor = MeasuredLinear.apply(x, weight, bias, ledger, name)
    return result


def run_embedding(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Mapping[int, str], ledger: Ledger
) -> tuple[Tensor, Tensor]:
    """Run ``F.embedding``, the gradient of whose weight goes to the ledger as rows; return the result and the weight."""
    keys = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    numbers, weight, padding, max_norm, _, by_frequency, _ = bound(keys, args, kwargs)
    name = names.get(id(weight))
    if name is not None and _is_differentiated(weight) and max_norm is None and not by_frequency:
        return MeasuredEmbedding.apply(numbers, weight, padding, ledger, name), weight
    return func(*args, **kwargs), weight


def _is_differentiated(weight: Tensor) -> bool:
    """Whether autograd will ask for the gradient of ``weight`` in the usual way.

    Non-reentrant checkpointing runs its part again outside of the follower, and expects the very tensors to be saved that
    plain code saves; it shows by its hooks on saved tensors.
    """
    hooks = _SAVING_HOOKS(False)
    transformed = torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001 - torch.func, with a way of its own
    return weight.requires_grad and torch.is_grad_enabled() and not transformed and hooks is None
