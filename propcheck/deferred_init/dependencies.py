"""Which calls of a log the final value of one tensor depends on."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.deferred_init.op_log import RecordedOperation, TensorRef


@dataclass(frozen=True, slots=True)
class Slice:
    """The operations that one tensor's value needs, in order.

    Attributes
    ----------
    target
        The tensor.
    operations
        Indices of the operations in the log.
    valued
        Those whose results are needed with their values; of the others just the memory.
    last_used
        The tensors that no later operation of the slice uses, by operation.
    """

    target: TensorRef
    operations: tuple[int, ...]
    valued: frozenset[int]
    last_used: dict[int, tuple[int, ...]]


class Slicer:
    """Cuts slices out of ``log``."""

    def __init__(self, log: Sequence[RecordedOperation]) -> None:
        self._log = log
        self._producer: dict[int, int] = {}  # tensor -> operation that first returned it
        self._writers: dict[int, list[int]] = {}  # storage -> operations that wrote it, in order
        for index, operation in enumerate(log):
            given = {ref.tensor for ref in operation.inputs}
            for ref in operation.outputs:
                if ref.tensor not in given:
                    self._producer.setdefault(ref.tensor, index)
            for storage in {ref.storage for ref in operation.written}:
                self._writers.setdefault(storage, []).append(index)

    def slice(self, target: TensorRef) -> Slice:
        """Walk back from ``target`` over everything that its final value depends on.

        The value of a tensor at some time is what the last operation before then that wrote its storage left there; what
        was there before counts only if that operation reads it. If none wrote it, the value is what its producer gave.
        """
        needed: dict[int, bool] = {}  # operation -> whether with its value
        pending: list[tuple[TensorRef, int, bool]] = [(target, len(self._log), True)]  # a tensor, as before this operation

        def add(index: int, *, valued: bool) -> None:
            if index in needed and needed[index] >= valued:
                return
            needed[index] = valued
            operation = self._log[index]
            if valued:
                pending.extend((ref, index, True) for ref in operation.reads)
            if valued or not operation.allocates:
                pending.extend((ref, index, False) for ref in operation.inputs)

        while pending:
            ref, before, valued = pending.pop()
            if valued:
                writers = self._writers.get(ref.storage, ())
                place = bisect_left(writers, before)
                if place:
                    add(writers[place - 1], valued=True)
                    valued = False
            producer = self._producer.get(ref.tensor)
            if producer is not None and producer < before:
                add(producer, valued=valued)
        operations = tuple(sorted(needed))
        values = frozenset(index for index in operations if needed[index])
        return Slice(target, operations, values, self._last_used(operations, target))

    def _last_used(self, operations: tuple[int, ...], target: TensorRef) -> dict[int, tuple[int, ...]]:
        seen = {target.tensor}
        found: dict[int, tuple[int, ...]] = {}
        for index in reversed(operations):
            used = {ref.tensor for ref in (*self._log[index].inputs, *self._log[index].outputs)} - seen
            seen |= used
            found[index] = tuple(used)
        return found
