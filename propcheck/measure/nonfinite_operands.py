"""The operands of a function call as the search for non-finite values needs them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from propcheck.formatting import number
from propcheck.measure.nonfinite_values import Content, content_of, whole_rows_masked
from propcheck.tracing.op_names import ATTENTIONS, DIVISIONS, SOFTMAXES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.records import Origin
    from propcheck.tracing.events import FunctionCall

# Their second operand may be a plain number that matters.
_QUOTIENTS = DIVISIONS | {"pow", "pow_"}


@dataclass(frozen=True, slots=True, eq=False)
class OperandSource:
    """The operation that made values that are not finite; ``order`` numbers these."""

    order: int
    origin: Origin
    may_be_mask: bool = False


@dataclass(frozen=True, slots=True)
class Overwritten:
    """The argument that a function changes in place, and what it held; ``content`` is None where that does not matter."""

    tensor: Tensor | None
    content: Content | None


@dataclass(frozen=True, slots=True)
class Operands:
    """What a function read.

    Attributes
    ----------
    contents
        Of its tensors.
    nonfinite_numbers
        Its arguments that are NaN or an infinity.
    numbers
        Its plain numbers that matter to the result.
    earliest
        The first source of a value that is not finite among its tensors.
    """

    contents: Sequence[Content]
    nonfinite_numbers: Sequence[float]
    numbers: Sequence[float]
    earliest: OperandSource | None

    @property
    def has_nan(self) -> bool:
        """Whether a tensor holds NaN."""
        return any(content.nan for content in self.contents)

    @property
    def has_infinity(self) -> bool:
        """Whether a tensor holds an infinity."""
        return any(content.infinite for content in self.contents)

    @property
    def words(self) -> str:
        """Describe them, one phrase per kind: the experts of a stack would repeat the same many times."""
        phrases = [*dict.fromkeys(content.words for content in self.contents if content.words), *map(number, self.numbers)]
        return ", and ".join(phrases[:3]) or "integers"


def read_operands(
    call: FunctionCall, overwritten: Overwritten, source_in: Callable[[Tensor], OperandSource | None]
) -> Operands | None:
    """Return what a function read, None if it has no tensor; ``source_in`` returns the source of the values in a tensor."""
    leaves = tree_leaves((call.args, {key: value for key, value in call.kwargs.items() if key != "out"}))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        return None
    nonfinite_numbers = [leaf for leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]
    numbers = [value for value in call.args if type(value) in (int, float)] if call.name in _QUOTIENTS else nonfinite_numbers
    written, before = overwritten.tensor, overwritten.content
    read = [tensor for tensor in tensors if tensor is not written or before is not None]
    contents = [before if tensor is written and before is not None else content_of(tensor) for tensor in read]
    sources = [
        source for tensor, content in zip(read, contents, strict=True) if not content.finite and (source := source_in(tensor))
    ]
    earliest = min(sources, key=lambda source: source.order, default=None)
    return Operands(contents, nonfinite_numbers, numbers, earliest)


def changed_in_place(call: FunctionCall) -> Tensor | None:
    """Return the argument that a function changes in place."""
    name = call.name
    in_place = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__", "__isub__")
    first = call.args[0] if call.args else call.kwargs.get("input")
    changes_first = (in_place or call.kwargs.get("inplace") is True) and isinstance(first, Tensor)
    return first if changes_first else call.kwargs.get("out")


def masked_rows(call: FunctionCall) -> str | None:
    """Describe the input of a softmax or attention in which entire rows are masked; None for any other call."""
    args, kwargs = call.args, call.kwargs
    if call.name in SOFTMAXES and isinstance(args[0] if args else None, Tensor):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if isinstance(dim, int) and whole_rows_masked(args[0], dim):
            return "scores with entire rows of -infinity"
    if call.name in ATTENTIONS:
        of_layer = call.name == "multi_head_attention_forward"  # its masks are true where hidden, the others where seen
        for mask in (kwargs.get("key_padding_mask"), kwargs.get("attn_mask", args[3] if len(args) > 3 else None)):
            if isinstance(mask, Tensor):
                hidden = mask == -torch.inf if mask.dtype != torch.bool else mask if of_layer else ~mask
                if bool(hidden.all(-1).any()):
                    return "a mask that hides every key from some queries"
    return None
