"""What one tensor holds beside finite numbers, and at which tokens. Everything here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from propcheck.formatting import number

if TYPE_CHECKING:
    from collections.abc import Sequence

_FIRST_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Content:
    """Which kinds of number a tensor holds beside finite ones, and the finite ones in words."""

    nan: bool = False
    plus: bool = False  # infinity
    minus: bool = False  # -infinity
    words: str = ""  # empty for integers

    @property
    def infinite(self) -> bool:
        """Whether it holds an infinity of either sign."""
        return self.plus or self.minus

    @property
    def finite(self) -> bool:
        """Whether it holds nothing but finite numbers."""
        return not (self.nan or self.infinite)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds finite numbers only; one that holds no floating-point numbers does."""
    values = _values(tensor)
    return values is None or bool(torch.isfinite(values).all())


def content_of(tensor: Tensor) -> Content:
    """Say what a tensor of any dtype holds."""
    values = _values(tensor)
    if values is None or not values.numel():
        return Content()
    nan, plus, minus = torch.stack([values.isnan().any(), (values == torch.inf).any(), (values == -torch.inf).any()]).tolist()
    kinds = (("NaN", nan), ("infinity", plus), ("-infinity", minus))
    parts = [name for name, found in kinds if found]
    finite = values[torch.isfinite(values)] if parts else values
    if finite.numel():
        low, high = (number(one.item()) for one in torch.aminmax(finite))
        span = f"that are all {low}" if low == high else f"from {low} to {high}"
        parts.insert(0, f"{str(tensor.dtype).removeprefix('torch.')} numbers {span}")
    return Content(nan, plus, minus, " and ".join(parts))


def whole_rows_masked(scores: Tensor, dim: int) -> bool:
    """Whether ``scores`` are -infinity all along ``dim`` somewhere."""
    return bool((scores == -torch.inf).all(dim).any())


@dataclass(frozen=True, slots=True)
class Spoilt:
    """The tokens at which a tensor is spoilt: the first of them, their number, and the tokens in all."""

    tokens: tuple[int, ...] = ()
    affected: int | None = None
    positions: int | None = None


def spoilt_tokens(tensor: Tensor, shape: tuple[int, int], value: Literal["NaN", "infinity"], *, rows: bool) -> Spoilt:
    """Tell the tokens at which ``tensor`` holds a ``value``.

    Parameters
    ----------
    tensor
        Any.
    shape
        Sequences, and tokens of each.
    value
        What is looked for: -infinity beside a NaN may be a mask.
    rows
        Whether its rows are what it was computed for, as in attention probabilities [..., queries, keys].

    Returns
    -------
    Spoilt
        Empty where no dimension can be told to be that of the tokens.
    """
    values = _values(tensor)
    dim = None if values is None else _token_dimension(tuple(values.shape), shape, rows=rows)
    if values is None or dim is None:
        return Spoilt()
    bad = (values.isnan() if value == "NaN" else values.isinf()).movedim(dim, 0).flatten(1).any(1)
    if len(bad) != shape[1]:  # [batch * tokens, ...]
        bad = bad.view(shape).any(0)
    found = bad.nonzero().flatten().tolist()
    return Spoilt(tuple(found[:_FIRST_TOKENS]), len(found), shape[1])


def _token_dimension(dims: Sequence[int], shape: tuple[int, int], *, rows: bool) -> int | None:
    batch, tokens = shape
    if rows and len(dims) > 2:
        return len(dims) - 2 if dims[-2] == tokens else None
    if len(dims) > 1 and dims[0] == batch and dims[1] == tokens:
        return 1
    if len(dims) > 2 and dims[1] == batch and dims[0] == tokens:
        return 0
    if len(dims) > 2 and dims[-2] == tokens:  # [batch, heads, tokens, width]
        return len(dims) - 2
    if len(dims) > 2 and dims[-1] == tokens:  # [batch, channels, tokens]
        return len(dims) - 1
    return 0 if len(dims) == 2 and dims[0] == batch * tokens else None


def _values(tensor: Tensor) -> Tensor | None:
    """Return the floating-point numbers of a tensor as real ones; None where it has none that torch can compare."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj()).sum(-1)
    return tensor.detach() if tensor.is_floating_point() and tensor.element_size() > 1 else None
