"""Replacements, while recording, for the few pieces of torch that fake tensors cannot run."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@torch.library.custom_op("propcheck::trunc_normal_", mutates_args={"tensor"})
def _trunc_normal_(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    raise NotImplementedError("only recorded, and replayed by propcheck.deferred_init.materialize")


_trunc_normal_.register_fake(lambda tensor, mean, std, a, b: None)  # noqa: ARG005


@contextmanager
def recordable() -> Iterator[None]:
    """Put the replacements in place.

    ``nn.init.trunc_normal_`` loops until no value is out of bounds, which depends on data; it becomes one recorded call.
    ``Module._apply`` (behind ``.to``, ``.half``, ``.to_empty``) swaps fake tensors in a way that fails when anything
    else refers to them; here it does what it does for real tensors. ``deepcopy`` copies bytes of a storage, which a fake
    tensor does not have. ``data_ptr`` of a fake tensor is 0 for all, and code that looks for shared parameters by it would
    find that all are.
    """
    with (
        replaced(nn.init, "_no_grad_trunc_normal_", _record_trunc_normal_),
        replaced(nn.Module, "_apply", _apply),
        replaced(FakeTensor, "__deepcopy__", _deepcopy),
        replaced(FakeTensor, "data_ptr", _data_ptr),
    ):
        yield


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Set an attribute for a while."""
    own = name in vars(owner)
    saved = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, saved)
        else:
            delattr(owner, name)  # it was inherited


def _record_trunc_normal_(  # noqa: PLR0913 - the signature of the function that it replaces
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
) -> Tensor:
    del generator
    _ = (b - mean) / std  # std = 0 is an error here as it is in torch, not later
    with torch.no_grad():
        torch.ops.propcheck.trunc_normal_(tensor, float(mean), float(std), float(a), float(b))
    return tensor


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    if recurse:
        for child in self.children():
            child._apply(fn)  # noqa: SLF001
    with torch.no_grad():
        for name, parameter in self._parameters.items():
            if parameter is None:
                continue
            applied = fn(parameter)
            if applied.is_meta == parameter.is_meta:
                parameter.data = applied
                if isinstance(parameter, FakeTensor) and isinstance(applied, FakeTensor):
                    parameter.fake_device = applied.fake_device
            else:
                self._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
    return self


def _deepcopy(self: FakeTensor, memo: dict[int, Any]) -> Tensor:
    if id(self) in memo:
        return memo[id(self)]  # type: ignore[no-any-return]
    if not self.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    value = self.detach().clone()
    copied: Tensor = nn.Parameter(value) if isinstance(self, nn.Parameter) else value
    memo[id(self)] = copied.requires_grad_(self.requires_grad)
    return copied


def _data_ptr(self: FakeTensor) -> int:
    # A number that tensors share if and only if they begin at the same place of the same storage.
    return int(self.untyped_storage()._cdata + self.storage_offset() * self.element_size())  # noqa: SLF001
