"""While a scan runs, activation checkpointing is a plain call: each addition is seen once, in the forward pass.

The engine has its own way to save memory. ``torch.utils.checkpoint`` would run parts of the model again in the backward
pass, out of sight. Replaced are the two names that ``checkpoint`` looks up when it is called, so it does not matter how the
user's code imported it.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from propcheck.deferred_init.fake_patches import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def plain_checkpoints() -> Iterator[None]:
    """Have checkpointed functions run once."""
    with (
        replaced(torch_checkpoint.CheckpointFunction, "apply", _reentrant),
        replaced(torch_checkpoint, "_checkpoint_without_reentrant_generator", _without_reentrant),
    ):
        yield


def _reentrant(function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
    """Call ``function``; the reentrant kind has a gradient only if one of its own arguments has."""
    torch_checkpoint.check_backward_validity(args)
    has_path = any(isinstance(one, Tensor) and one.requires_grad for one in args)
    with nullcontext() if has_path else torch.no_grad():
        return function(*args)


def _without_reentrant(
    _function: Callable[..., Any],
    _preserve_rng_state: bool = True,
    context_fn: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn,
    *_: Any,
    **__: Any,
) -> Iterator[None]:
    """Yield once, where ``checkpoint`` calls its function, within the context that the user gave for the forward pass."""
    around, _again = context_fn()
    with around:
        yield
