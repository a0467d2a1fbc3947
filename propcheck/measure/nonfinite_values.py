"""Non-finite values of a tensor, and the tokens at which they are. Everything here waits for the device."""

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
    """Which non-finite values a tensor holds, and a description of its numbers."""

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
        """Whether all numbers are finite."""
        return not (self.nan or self.infinite)


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; those of a tensor that is not floating-point are."""
    values = _values(tensor)
    return values is None or bool(torch.isfinite(values).all())


def content_of(tensor: Tensor) -> Content:
    """Describe the values of a tensor of any dtype."""
    values = _values(tensor)
    if values is None or not values.numel():
        return Content()
    nan, plus, minus = torch.stack([values.isnan().any(), (values == torch.inf).any(), (values == -torch.inf).any()]).tolist()
    kinds = (("NaN", nan), ("infinity", plus), ("-infinity", minus))
    parts = [name for name, is_held in kinds if is_held]
    finite = values[torch.isfinite(values)] if parts else values
    if finite.numel():
        low, high = (number(extreme.item()) for extreme in torch.aminmax(finite))
        span = f"all equal to {low}" if low == high else f"from {low} to {high}"
        parts.insert(0, f"{str(tensor.dtype).removeprefix('torch.')} numbers {span}")
    return Content(nan, plus, minus, " and ".join(parts))


def whole_rows_masked(scores: Tensor, dim: int) -> bool:
    """Whether ``scores`` are all -infinity along ``dim`` for some row."""
    return bool((scores == -torch.inf).all(dim).any())


@dataclass(frozen=True, slots=True)
class Spoilt:
    """The tokens at which a tensor is not finite: the first ones, their number, and the number of all tokens."""

    tokens: tuple[int, ...] = ()
    affected: int | None = None
    positions: int | None = None


def spoilt_tokens(tensor: Tensor, shape: tuple[int, int], value: Literal["NaN", "infinity"], *, rows: bool) -> Spoilt:
    """Return the tokens at which ``tensor`` holds a ``value``.

    Parameters
    ----------
    tensor
        Any.
    shape
        Sequences, and tokens per sequence.
    value
        Which of the two counts: an infinity in a tensor with NaN may be a mask.
    rows
        Whether its rows are the tokens, as in attention probabilities [..., queries, keys].

    Returns
    -------
    Spoilt
        Empty if no dimension can be identified as the tokens.
    """
    values = _values(tensor)
    dim = None if values is None else _token_dimension(tuple(values.shape), shape, rows=rows)
    if values is None or dim is None:
        return Spoilt()
    bad = (values.isnan() if value == "NaN" else values.isinf()).movedim(dim, 0).flatten(1).any(1)
    if len(bad) != shape[1]:  # [batch * tokens, ...]
        bad = bad.view(shape).any(0)
    tokens = bad.nonzero().flatten().tolist()
    return Spoilt(tuple(tokens[:_FIRST_TOKENS]), len(tokens), shape[1])


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
    """Return the floating-point numbers of a tensor as real numbers; None if it has none that torch can compare."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.detach().resolve_conj()).sum(-1)
    return tensor.detach() if tensor.is_floating_point() and tensor.element_size() > 1 else None
