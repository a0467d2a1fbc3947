"""Compute any one parameter of a recorded model from the calls that made it.

Each random call is seeded by (seed, the parameter that owns it, its index among that parameter's random calls), so a
value does not depend on what else is computed, in which order, or by how many threads; and two models that differ in one
thing share every parameter of the same name. A random result that several parameters use belongs to the first of them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from propcheck.build.calls import readable
from propcheck.build.log import Operation, TensorRef
from propcheck.build.random import draw
from propcheck.build.slices import Slice, Slicer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from propcheck.build.random import Workers
    from propcheck.build.record import Entry, Recording


class Replay:
    """Values for the parameters of ``recording``.

    Parameters
    ----------
    recording
        From ``record``.
    workers
        Threads for large random fills.
    """

    def __init__(self, recording: Recording, workers: Workers) -> None:
        self._recording = recording
        self._workers = workers
        slicer = Slicer(recording.log)
        self._slices = {entry.name: slicer.slice(entry.ref) for entry in recording.entries}
        # The owner and index of each random call.
        self._owner: dict[int, tuple[str, int]] = {}
        for name, piece in self._slices.items():
            random = [index for index in piece.operations if index in piece.valued and recording.log[index].random]
            for count, index in enumerate(random):
                self._owner.setdefault(index, (name, count))

    def materialize(self, entry: Entry, seed: int, out: Tensor | None = None) -> Tensor:
        """Compute one parameter.

        Parameters
        ----------
        entry
            Which one.
        seed
            Of the random calls.
        out
            A contiguous tensor of the right dtype and size whose memory may be used for the result.

        Returns
        -------
        Tensor
            On the CPU, of the entry's shape and dtype; in ``out``'s memory if ``out`` was given.
        """
        log, piece = self._recording.log, self._slices[entry.name]
        values = self._constants(piece, entry.ref)
        with torch.no_grad(), _reproducible():
            for index in piece.operations:
                operation = log[index]
                torch.set_default_dtype(operation.default_dtype)
                owns_target = any(ref.storage == entry.ref.storage for ref in operation.outputs)
                results = self._run(index, values, seed, index in piece.valued, out if owns_target else None)
                for ref, result in zip(operation.outputs, results, strict=True):
                    values.setdefault(ref.tensor, result)
                for number in piece.last_used[index]:
                    values.pop(number, None)  # its memory may be large
            value = values[entry.ref.tensor]
            if out is not None and value.data_ptr() != out.data_ptr():
                value = out.view(entry.shape).copy_(value)
            elif out is None and value.untyped_storage().nbytes() > value.numel() * value.element_size():
                value = value.clone()  # do not hold on to a larger storage
        return value

    def init_calls(self, entry: Entry) -> str | None:
        """Return the calls that gave a parameter its value in readable form, None if no call ever did."""
        log, piece = self._recording.log, self._slices[entry.name]
        return readable([log[index] for index in piece.operations if index in piece.valued]) or (
            "constant" if self._constants(piece, entry.ref) else None
        )

    def _constants(self, piece: Slice, target: TensorRef) -> dict[int, Tensor]:
        """Return copies, for operations may write into them, of the constants that a slice uses."""
        inputs = (ref for index in piece.operations for ref in self._recording.log[index].inputs)
        constants = self._recording.constants
        return {ref.tensor: constants[ref.tensor].clone() for ref in (target, *inputs) if ref.tensor in constants}

    def _run(self, index: int, values: dict[int, Tensor], seed: int, valued: bool, out: Tensor | None) -> list[Tensor]:
        operation = self._recording.log[index]
        if operation.empty or (operation.allocates and not valued):
            return [_allocate(ref, out, written=not valued) for ref in operation.outputs]
        args, kwargs = tree_map(
            lambda leaf: values[leaf.tensor] if isinstance(leaf, TensorRef) else leaf, (operation.args, operation.kwargs)
        )
        if operation.random:
            memory = _allocate(operation.outputs[0], out, written=True) if operation.allocates else args[0]
            result = draw(operation.function, args, kwargs, memory, (seed, *self._owner[index]), self._workers)
        else:
            if torch.Tag.inplace_view in operation.function.tags:  # it turns a tensor that others may still want as it is
                args = (torch.ops.aten.alias(args[0]), *args[1:])
            result = operation.function(*args, **kwargs)
        return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)][: len(operation.outputs)]


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
    empty = torch.empty_strided(ref.shape, ref.stride, dtype=ref.dtype)
    if out is not None and empty.is_contiguous() and empty.numel() == out.numel() and empty.dtype == out.dtype:
        empty = out.view(empty.shape)
    if not written:
        if ref.dtype.is_floating_point or ref.dtype.is_complex:
            empty.fill_(float("nan"))
        else:
            empty.fill_(1 if ref.dtype == torch.bool else torch.iinfo(ref.dtype).max)
    return empty
