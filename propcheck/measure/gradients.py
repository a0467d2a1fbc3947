"""Gradient norms of parameters, without the gradients of large weights.

The gradient of a linear layer's weight is G^T X, with G the gradient of its output and X its input, both
[tokens, features]. Its norm needs no [out, in] matrix: ||G^T X||_F^2 = sum((G G^T) * (X X^T)) over pairs of tokens, far
cheaper while tokens are few. An embedding's gradient is the same with one-hot rows for G. These are norms of the
unrounded gradient; a gradient that autograd forms itself is measured as it is, rounded to the parameter's dtype.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from propcheck.measure.statistics import frobenius, inner


@dataclass(slots=True)
class Factors:
    """One use of a weight: its gradient is left^T right.

    ``left`` is [tokens, out], or for a look-up the row numbers [tokens]; ``right`` is [tokens, in].
    """

    left: Tensor
    right: Tensor

    @property
    def lookup(self) -> bool:
        """Whether ``left`` holds row numbers."""
        return self.left.dim() == 1


def worth_factoring(x: Tensor, weight: Tensor) -> bool:
    """Whether the products over pairs of tokens cost less than the gradient of ``weight``, which ``x`` is multiplied with.

    The pairs are multiplied in fp32 (fp64 for fp32 weights), at about a third of the rate of half-precision products on
    CPUs that have them: hence the 3.
    """
    if x.dim() < 2 or weight.dim() != 2:
        return False
    out, into = weight.shape
    return 3 * x.shape[:-1].numel() * (out + into) < out * into


class Ledger:
    """Collects what the backward pass says of each parameter, by name, and settles it into one number each."""

    def __init__(self) -> None:
        self.norms: dict[str, Tensor] = {}
        self._factors: defaultdict[str, list[Factors]] = defaultdict(list)

    def add(self, name: str, factors: Factors) -> None:
        """Note one use of the weight ``name``."""
        self._factors[name].append(factors)

    def settle(self, parameters: dict[str, nn.Parameter]) -> None:
        """Turn all that is known of ``parameters`` into norms and let go of it."""
        grams: dict[tuple[Any, ...], Tensor] = {}  # q, k, v, gate and up read one tensor: its products are shared
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
    # Products of halves are exact in fp32; products of floats are not, so those are taken in fp64.
    return tensor.double() if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


# Columns at a time, so that the wide copy of a head's gradient [tokens, vocabulary] stays small.
_COLUMNS = 1 << 15


def _scale(tensor: Tensor) -> Tensor:
    """Return the largest magnitude in ``tensor``, fp32: halves are divided by it, since their squares leave fp32's range."""
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
    """Return a.left b.left^T; a row number stands for the one-hot vector of that row."""
    if a.lookup and b.lookup:
        return a.left[:, None] == b.left[None, :]
    if a.lookup:
        return b.left[:, a.left].t()
    if b.lookup:
        return a.left[:, b.left]
    return _gram(a.left, b.left)


def _lookup_norm(factors: list[Factors]) -> Tensor:
    """Return the norm of an embedding's gradient: the rows of equal numbers summed first."""
    numbers = torch.cat([use.left for use in factors])
    rows = torch.cat([_wide(use.right) for use in factors])
    unique, place = numbers.unique(return_inverse=True)
    return frobenius(rows.new_zeros(len(unique), rows.shape[1]).index_add_(0, place, rows))


def _add_dense(gradient: Tensor, factors: list[Factors]) -> Tensor:
    """Return ``gradient`` plus left^T right of all uses, for a weight that was used in other ways too."""
    total = _wide(gradient).clone()
    for use in factors:
        if use.lookup:
            total.index_add_(0, use.left, use.right.to(total.dtype))
        else:
            total.addmm_(use.left.to(total.dtype).t(), use.right.to(total.dtype))
    return total


class MeasuredLinear(torch.autograd.Function):
    """``F.linear`` whose backward notes the factors of the weight's gradient instead of forming it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ledger: Ledger, name: str) -> Tensor:
        """Compute x weight^T + bias; ``weight`` is cast to x's dtype, as autocast does."""
        ctx.save_for_backward(x, weight)
        ctx.ledger, ctx.name = ledger, name
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """Return the gradients of x and bias; that of the weight goes to the ledger as factors."""
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        ctx.ledger.add(ctx.name, Factors(flat, x.detach().reshape(-1, x.shape[-1])))
        grad_x = flat.mm(weight.to(flat.dtype)).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_bias = flat.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, None, None


class MeasuredEmbedding(torch.autograd.Function):
    """``F.embedding`` whose backward notes the rows of the weight's gradient; it keeps the weight for nothing."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, padding: int | None, ledger: Ledger, name: str) -> Tensor:
        """Look up rows ``numbers`` of ``weight``; the row ``padding`` gets no gradient."""
        ctx.save_for_backward(numbers)
        ctx.padding = padding if padding is None or padding >= 0 else padding + len(weight)
        ctx.ledger, ctx.name = ledger, name
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        """Hand the rows to the ledger."""
        (numbers,) = ctx.saved_tensors
        left, right = numbers.reshape(-1), grad.reshape(-1, grad.shape[-1])
        if ctx.padding is not None:
            right = right.masked_fill((left == ctx.padding)[:, None], 0.0)
        ctx.ledger.add(ctx.name, Factors(left, right))
        return None, None, None, None, None
