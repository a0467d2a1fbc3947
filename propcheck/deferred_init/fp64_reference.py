"""What the calls that made a half-precision table would have given, had every one of them been made in fp64."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from propcheck.deferred_init.op_log import TensorRef
from propcheck.deferred_init.run_ops import compute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.deferred_init.dependencies import Slice
    from propcheck.deferred_init.op_log import RecordedOperation

# Elements of the largest tensor on the way: 128 MiB in fp64. A rotary table of 131072 positions by 128 is one.
_MOST = 2**24


def in_fp64(log: Sequence[RecordedOperation], constants: Mapping[int, Tensor], piece: Slice) -> Tensor | None:
    """Compute a tensor of a log with each floating dtype replaced by fp64.

    Parameters
    ----------
    log, constants
        Of the recording. Literal numbers stay those that they were in their own dtype.
    piece
        The operations that the tensor depends on.

    Returns
    -------
    Tensor or None
        None where chance is part of it, where it takes more memory than a look at a table is worth, and where the calls
        depend on the dtype that they were made with (the bits of a number seen as an integer, a kernel without fp64).
    """
    operations = {index: log[index] for index in piece.operations}
    sizes = (math.prod(ref.shape) for operation in operations.values() for ref in operation.outputs)
    if max(sizes, default=0) > _MOST or any(_depends_on_dtype(operation) for operation in operations.values()):
        return None
    if any(operations[index].random for index in piece.valued):
        return None
    wide = list(log)
    for index, operation in operations.items():
        wide[index] = _widened(operation)
    needed = {ref.tensor for operation in operations.values() for ref in operation.inputs} | {piece.target.tensor}
    values = {number: constants[number] for number in needed & constants.keys()}
    values = {number: value.to(_wide(value.dtype)) for number, value in values.items()}
    try:
        return compute(wide, values, piece)
    except RuntimeError:  # torch's for whatever an operator does not do with the dtypes it is given
        return None


def excess(value: Tensor, exact: Tensor) -> float | None:
    """Say how far a tensor is from its exact value beyond what rounding that once to the tensor's dtype explains.

    Parameters
    ----------
    value
        In its own dtype.
    exact
        The same in fp64.

    Returns
    -------
    float or None
        max |value - exact| less max |rounded exact - exact|, relative to max |exact|, 0 or more; infinite where a number is
        not finite that rounding would have kept finite. None where there is nothing to compare: NaN, or nothing but zeros
        and infinities, in the exact one.
    """
    if exact.isnan().any():
        return None
    rounded = exact.to(value.dtype)
    # Masks hold infinities on purpose; those agree, and their difference would be NaN.
    differs = (value != rounded) | value.isnan()
    finite = exact.isfinite() & rounded.isfinite()
    scale = exact[finite].abs().max().item() if finite.any() else 0.0
    if (differs & ~(finite & value.isfinite())).any():
        return math.inf
    if not scale:
        return None
    off, half = ((one[finite].double() - exact[finite]).abs().max().item() for one in (value, rounded))
    return max(0.0, off - half) / scale


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _widened_ref(ref: TensorRef) -> TensorRef:
    return dataclasses.replace(ref, dtype=_wide(ref.dtype))


def _widened(operation: RecordedOperation) -> RecordedOperation:
    """Replace the floating dtypes among a call's arguments, and those that its results are allocated with."""

    def leaf(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return _widened_ref(value)
        return _wide(value) if isinstance(value, torch.dtype) else value

    args, kwargs = tree_map(leaf, (operation.args, operation.kwargs))
    return dataclasses.replace(
        operation,
        args=args,
        kwargs=kwargs,
        outputs=tuple(map(_widened_ref, operation.outputs)),
        default_dtype=_wide(operation.default_dtype),
    )


def _depends_on_dtype(operation: RecordedOperation) -> bool:
    """Whether a call shows the bits of a number as another dtype."""
    return str(operation.function) in ("aten.view.dtype", "aten.view_copy.dtype")
