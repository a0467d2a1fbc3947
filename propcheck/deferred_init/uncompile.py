"""Undo ``torch.compile`` where a model carries it: what runs fused cannot be followed, and is the same function."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._dynamo import OptimizedModule

if TYPE_CHECKING:
    from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """Put the modules that ``torch.compile`` wrapped, and ``Module.compile`` marked, back in their places.

    Compiled functions and methods are not held by modules; the engine runs under a stance that has them run as written.
    """
    model = _original(model)
    for module in list(model.modules()):
        for name, child in module._modules.items():  # noqa: SLF001
            if isinstance(child, OptimizedModule):
                module._modules[name] = _original(child)  # noqa: SLF001
    for module in model.modules():
        module._compiled_call_impl = None  # noqa: SLF001
    return model


def _original(module: nn.Module) -> nn.Module:
    while isinstance(module, OptimizedModule):
        module = module._orig_mod  # noqa: SLF001
    return module
