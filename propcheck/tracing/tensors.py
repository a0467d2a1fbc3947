"""Properties of tensors and arguments that tracing and measuring both need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among ``values`` and one level inside them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors += [item for item in value if isinstance(item, Tensor)]
        elif isinstance(value, dict):
            tensors += [item for item in value.values() if isinstance(item, Tensor)]
    return tensors


def bound(keys: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments in the order of ``keys``, None for those that were not passed."""
    return tuple(args[index] if index < len(args) else kwargs.get(key) for index, key in enumerate(keys))


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is floating-point with fewer than 32 bits."""
    return dtype.is_floating_point and dtype.itemsize < 4


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor belongs to a ``torch.func`` transform: it stands for many tensors and has no value yet."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count this and give 0."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def channels_last(tensor: Tensor, channels: int | None) -> Tensor:
    """Return a tensor with dimension ``channels`` moved to the end; None means it is there already."""
    return tensor if channels is None else tensor.movedim(channels, -1)
