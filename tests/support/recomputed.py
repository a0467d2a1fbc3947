"""A block that computes something else when it runs again."""

from __future__ import annotations

import torch


class Recomputed(torch.autograd.Function):
    """Computes a module again in its backward, as reversible code does."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, grad)
        return None, x.grad
