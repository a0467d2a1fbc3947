"""Measure the gradient norms of parameters without forming the gradients of large weights.

The gradient of a linear layer's weight is G^T X, with G the gradient of its output and X its input, both [tokens, features].
Its norm needs no [out, in] matrix: ||G^T X||_F^2 = sum((G G^T) * (X X^T)) over pairs of tokens, which is far cheaper while
tokens are few. An embedding's gradient is the same with one-hot rows as X. These are norms of the unrounded gradient; a
gradient that autograd forms itself is measured after its rounding to the parameter's dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propcheck.measure.statistics import frobenius, inner


@dataclass(slots=True)
class Factors:
    """One use of a weight, whose gradient is left^T right.

    ``left`` is [tokens, out], or for a lookup the row numbers [tokens]; ``right`` is [tokens, in].
    """

    left: Tensor
    right: Tensor

    @property
    def lookup(self) -> bool:
        """Whether ``left`` holds row numbers."""
        return self.left.dim() == 1


def worth_factoring(x: Tensor, weight: Tensor) -> bool:
    """Whether the products over pairs of tokens cost less than forming the gradient of ``weight``.

    The pairs are multiplied in fp32 (fp64 for fp32 weights), which is about three times slower than half precision on CPUs that
    multiply in it: hence the factor 3.
    """
    if x.dim() < 2 or weight.dim() != 2:
        return False
    out, into = weight.shape
    return 3 * x.shape[:-1].numel() * (out + into) < out * into


class Ledger:
    """Collects the gradient of each parameter, by name, and reduces it to a norm."""

    def __init__(self) -> None:
        self.norms: dict[str, Tensor] = {}
        self._factors: defaultdict[str, list[Factors]] = defaultdict(list)

    def add(self, name: str, factors: Factors) -> None:
        """Add one use of the weight ``name``."""
        self._factors[name].append(factors)

    def settle(self, parameters: dict[str, nn.Parameter]) -> None:
        """Reduce the gradients of ``parameters`` to norms and free them."""
        grams: dict[tuple[Any, ...], Tensor] = {}  # q, k, v, gate and up share one input, so its products are shared too
        for name, parameter in parameters.items():
            factors = self._factors.pop(name, [])
            if factors and parameter.grad is not None:
                self.norms[name] = frobenius(_add_dense(parameter.grad, factors))
            elif factors and all(use.lookup for use in factors):
                self.norms[name] = _lookup_norm(factors)
            elif factors:
                self.norms[name] = _pairs_norm(factors, grams)
            elif parameter.grad is not None:
                self.norms[name] = frobenius(parameter.grad)
            parameter.grad = None


def _wide(tensor: Tensor) -> Tensor:
    # Products of half-precision numbers are exact in fp32; products of fp32 numbers need fp64.
    return tensor.double() if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# Columns at a time, so that the wide copy of the head's gradient [tokens, vocabulary] stays small.
_COLUMNS = 1 << 15


def _scale(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in fp32; half-precision numbers are divided by it, as their squares leave fp32's range."""
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low, high).float().clamp(min=torch.finfo(torch.float32).tiny)


def _gram(left: Tensor, right: Tensor) -> Tensor:
    """Return left right^T in fp64, [rows of left, rows of right], accumulated in fp32 or fp64."""
    if not left.shape[1]:
        return left.new_zeros(len(left), len(right), dtype=torch.float64)
    in_fp64 = torch.float64 in (_wide(left[:0]).dtype, _wide(right[:0]).dtype)
    scales = None if in_fp64 else (_scale(left), _scale(right))
    total = None
    for start in range(0, left.shape[1], _COLUMNS):
        a, b = (part[:, start : start + _COLUMNS] for part in (left, right))
        if scales is None:
            a, b = a.double(), a.double() if left is right else b.double()
        else:
            a = a.float().div_(scales[0])
            b = a if left is right else b.float().div_(scales[1])
        total = a @ b.t() if total is None else total.addmm_(a, b.t())
    assert total is not None
    return total.double() if scales is None else total.double() * scales[0].double() * scales[1].double()


def _pairs_norm(factors: list[Factors], grams: dict[tuple[Any, ...], Tensor]) -> Tensor:
    """Return the norm of the sum of left^T right over all uses."""
    square: Tensor | float = 0.0
    for i, a in enumerate(factors):
        for b in factors[: i + 1]:
            key = tuple((use.right.data_ptr(), use.right.shape, use.right.stride(), use.right.dtype) for use in (a, b))
            if key not in grams:
                grams[key] = _gram(a.right, b.right)
            # A pair of different uses counts twice, (a, b) and (b, a).
            square = square + (1 if a is b else 2) * inner(_left_products(a, b), grams[key])
    assert isinstance(square, Tensor)
    return square.clamp(min=0).sqrt()


def _left_products(a: Factors, b: Factors) -> Tensor:
    """Return a.left b.left^T; a row number stands for a one-hot vector."""
    if a.lookup and b.lookup:
        return a.left[:, None] == b.left[None, :]
    if a.lookup:
        return b.left[:, a.left].t()
    if b.lookup:
        return a.left[:, b.left]
    return _gram(a.left, b.left)


def _lookup_norm(factors: list[Factors]) -> Tensor:
    """Return the norm of an embedding's gradient; rows with equal numbers are summed first."""
    numbers = torch.cat([use.left for use in factors])
    rows = torch.cat([_wide(use.right) for use in factors])
    unique, place = numbers.unique(return_inverse=True)
    return frobenius(rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, place, rows))


def _add_dense(gradient: Tensor, factors: list[Factors]) -> Tensor:
    """Return ``gradient`` plus left^T right of all uses, for a weight that is also used in other ways."""
    total = _wide(gradient).clone()
    for use in factors:
        if use.lookup:
            total.index_add_(0, use.left, use.right.to(total.dtype))
        else:
            total.addmm_(use.left.to(total.dtype).t(), use.right.to(total.dtype))
    return total


Receiver = Callable[[Factors], None]


class MeasuredLinear(torch.autograd.Function):
    """``F.linear`` whose backward hands over the factors of the weight's gradient instead of forming it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, receive: Receiver) -> Tensor:
        """Compute x weight^T + bias; ``weight`` is cast to x's dtype, as autocast does."""
        ctx.save_for_backward(x, weight)
        ctx.receive = receive
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        """Return the gradients of x and bias; that of the weight is handed over as factors."""
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        ctx.receive(Factors(flat, x.detach().reshape(-1, x.shape[-1])))
        grad_x = flat.mm(weight.to(flat.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None


class MeasuredEmbedding(torch.autograd.Function):
    """``F.embedding`` whose backward hands over the rows of the weight's gradient; it does not keep the weight."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, padding: int | None, receive: Receiver) -> Tensor:
        """Look up the rows ``numbers`` of ``weight``; the row ``padding`` gets no gradient."""
        ctx.save_for_backward(numbers)
        ctx.padding = padding if padding is None or padding >= 0 else padding + len(weight)
        ctx.receive = receive
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        """Hand the rows over."""
        (numbers,) = ctx.saved_tensors
        left, right = numbers.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding is not None:
            right = right.masked_fill((left == ctx.padding)[:, None], 0.0)
        ctx.receive(Factors(left, right))
        return None, None, None, None
