"""Run the operations of a slice for real."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from propcheck.deferred_init.op_log import RecordedOperation, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from propcheck.deferred_init.dependencies import Slice

    # index in the log, operator, its arguments, memory for its result -> what it returns
    Draw = Callable[[int, Any, tuple[Any, ...], dict[str, Any], Tensor], Any]


def compute(
    log: Sequence[RecordedOperation],
    constants: Mapping[int, Tensor],
    piece: Slice,
    draw: Draw | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the tensor that ``piece`` is the slice of.

    Parameters
    ----------
    log, constants
        Of the recording. Constants are not modified.
    piece
        The operations that the tensor depends on.
    draw
        Runs a random operator. None: the slice has no random operation.
    out
        A contiguous tensor whose memory is used for the target's, if that has the same size.
    """
    target = piece.target
    inputs = (ref for index in piece.operations for ref in log[index].inputs)
    outside = {ref.tensor for ref in (target, *inputs)} & constants.keys()
    values = {number: constants[number].clone() for number in outside}  # operations may write into them
    with torch.no_grad(), _reproducible():
        for index in piece.operations:
            operation = log[index]
            torch.set_default_dtype(operation.default_dtype)
            memory = out if any(ref.storage == target.storage for ref in operation.outputs) else None
            needs_value = index in piece.valued
            if operation.empty or (operation.allocates and not needs_value):
                results = [_allocate(ref, memory, written=not needs_value) for ref in operation.outputs]
            else:
                run_random = None if draw is None else partial(draw, index)
                results = _run(operation, values, run_random, memory)
            for ref, result in zip(operation.outputs, results, strict=True):
                values.setdefault(ref.tensor, result)
            for number in piece.last_used[index]:
                values.pop(number, None)  # its memory may be large
    return values[target.tensor]


def _run(
    operation: RecordedOperation, values: dict[int, Tensor], draw: Callable[..., Any] | None, out: Tensor | None
) -> list[Tensor]:
    args, kwargs = tree_map(
        lambda leaf: values[leaf.tensor] if isinstance(leaf, TensorRef) else leaf, (operation.args, operation.kwargs)
    )
    if operation.random:
        assert draw is not None, "the caller checks that no operation of the slice is random"
        memory = _allocate(operation.outputs[0], out, written=True) if operation.allocates else args[0]
        result = draw(operation.function, args, kwargs, memory)
    else:
        if torch.Tag.inplace_view in operation.function.tags:  # it turns a tensor that others may still want as it is
            args = (torch.ops.aten.alias(args[0]), *args[1:])
        result = operation.function(*args, **kwargs)
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] if operation.outputs else []


@contextmanager
def _reproducible() -> Iterator[None]:
    """Let nothing but the calls decide the bits: sums and factorisations depend on the number of threads that share them."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def _allocate(ref: TensorRef, out: Tensor | None, *, written: bool) -> Tensor:
    """Return memory for a tensor, in ``out`` if that fits.

    Memory that nothing writes holds NaN (the greatest number of an integer dtype), not whatever lies there: the same
    choice as ``torch.utils.deterministic.fill_uninitialized_memory``.
    """
    empty = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype, device="cpu")
    if out is not None and empty.is_contiguous() and empty.numel() == out.numel() and empty.dtype == out.dtype:
        empty = out.view(empty.shape)
    if not written:
        if ref.dtype.is_floating_point or ref.dtype.is_complex:
            empty.fill_(float("nan"))
        else:
            empty.fill_(1 if ref.dtype == torch.bool else torch.iinfo(ref.dtype).max)
    return empty
