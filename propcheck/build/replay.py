"""Compute any one parameter of a recorded model from the calls that made it.

Each random call is seeded by (seed, the parameter that owns it, its index among that parameter's random calls), so a
value does not depend on what else is computed, in which order, or by how many threads; and two models that differ in one
thing share every parameter of the same name. A random result that several parameters use belongs to the first of them.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from propcheck.build.random import Workers, fill_in_chunks, generator_for, truncated_normal_
from propcheck.build.record import Entry, Operation, Recording, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable

# Allocations: what they return has no value yet.
_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


@dataclass(frozen=True, slots=True)
class _Slice:
    """The operations that one parameter's value needs, in order; of those in ``allocate_only`` just the memory."""

    operations: tuple[int, ...]
    allocate_only: frozenset[int]


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
        self._producer: dict[int, int] = {}  # tensor -> operation that first returned it
        self._writers: dict[int, list[int]] = {}  # storage -> operations that wrote it, in order
        for index, operation in enumerate(recording.log):
            for ref in operation.outputs:
                self._producer.setdefault(ref.tensor, index)
            for storage in {ref.storage for ref in operation.written}:
                self._writers.setdefault(storage, []).append(index)
        self._slices = {entry.name: self._slice(entry.ref) for entry in recording.entries}
        # The owner and index of each random call.
        self._owner: dict[int, tuple[str, int]] = {}
        for name, piece in self._slices.items():
            random = [index for index in piece.operations if recording.log[index].random and index not in piece.allocate_only]
            for count, index in enumerate(random):
                self._owner.setdefault(index, (name, count))

    def _slice(self, target: TensorRef) -> _Slice:
        """Walk back from ``target`` over everything that its final value depends on."""
        log = self._recording.log
        needed: set[int] = set()
        with_content: set[int] = set()
        seen: set[tuple[int, int, bool]] = set()
        pending = [(target, len(log), True)]  # a tensor, as it was before that operation, and whether its content is read

        def include(index: int, *, content: bool) -> None:
            needed.add(index)
            if content:
                with_content.add(index)
            operation = log[index]
            unread = {ref.tensor for ref in operation.written} if operation.overwrites else set()
            pending.extend((ref, index, content and ref.tensor not in unread) for ref in operation.inputs)

        while pending:
            ref, before, content = pending.pop()
            if (ref.tensor, before, content) in seen:
                continue
            seen.add((ref.tensor, before, content))
            if content:
                writers = self._writers.get(ref.storage, [])
                writers = writers[: bisect_left(writers, before)]
                last = max((place for place, index in enumerate(writers) if log[index].overwrites), default=None)
                for index in writers if last is None else writers[last:]:
                    include(index, content=True)
                content = last is None
            producer = self._producer.get(ref.tensor)
            if producer is not None:
                include(producer, content=content)
        return _Slice(tuple(sorted(needed)), frozenset(needed - with_content))

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
        values: dict[int, Tensor] = {
            ref.tensor: self._recording.constants[ref.tensor]
            for index in piece.operations
            for ref in log[index].inputs
            if ref.tensor in self._recording.constants
        }
        with torch.no_grad():
            for index in piece.operations:
                operation = log[index]
                owns_target = any(ref.storage == entry.ref.storage for ref in operation.outputs)
                results = self._run(index, operation, values, seed, index in piece.allocate_only, out if owns_target else None)
                for ref, result in zip(operation.outputs, results, strict=True):
                    values.setdefault(ref.tensor, result)
        if entry.ref.tensor in values:
            value = values[entry.ref.tensor]
        else:  # made outside the recorded code, a real tensor that was registered as it is
            value = self._recording.constants[entry.ref.tensor]
        if out is not None and value.data_ptr() != out.data_ptr():
            value = out.view(entry.shape).copy_(value)
        elif out is None and value.untyped_storage().nbytes() > value.numel() * value.element_size():
            value = value.clone()  # do not hold on to a larger storage
        return value

    def _run(
        self, index: int, operation: Operation, values: dict[int, Tensor], seed: int, allocate_only: bool, out: Tensor | None
    ) -> list[Tensor]:
        args, kwargs = tree_map(
            lambda leaf: values[leaf.tensor] if isinstance(leaf, TensorRef) else leaf, (operation.args, operation.kwargs)
        )
        name = operation.name
        if name in _EMPTY or (allocate_only and not operation.written and not operation.inputs):
            return [self._allocate(operation, args, kwargs, written=allocate_only, out=out)]
        if operation.random:
            return self._draw(name, operation, args, kwargs, (seed, *self._owner[index]))
        result = operation.function(*args, **kwargs)
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]

    def _allocate(
        self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], *, written: bool, out: Tensor | None
    ) -> Tensor:
        # Memory that nothing writes is NaN, not whatever lies there: the same choice as
        # torch.utils.deterministic.fill_uninitialized_memory.
        empty = operation.function(*args, **kwargs) if operation.name in _EMPTY else None
        if empty is None:
            size = args[0]
            empty = torch.empty(size, dtype=kwargs.get("dtype"))
        if out is not None and empty.is_contiguous() and empty.numel() == out.numel() and empty.dtype == out.dtype:
            empty = out.view(empty.shape)
        if not written and empty.is_floating_point():
            empty.fill_(float("nan"))
        return empty

    def _draw(
        self, name: str, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[object, ...]
    ) -> list[Tensor]:
        """Run a random call with its own generator; the common in-place ones in chunks."""
        draw = _chunked_draw(name, args, kwargs)
        if draw is not None and args[0].is_floating_point():
            fill_in_chunks(args[0], draw, key, self._workers, through_fp32=name != "uniform_")
            return [args[0]] if operation.outputs else []
        generator = generator_for(*key)
        if any(argument.name == "generator" for argument in operation.function._schema.arguments):  # noqa: SLF001
            result = operation.function(*args, **{**kwargs, "generator": generator})
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator.initial_seed())
                result = operation.function(*args, **kwargs)
        return [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]

    def init_calls(self, entry: Entry) -> str | None:
        """Return the calls that gave a parameter its value in readable form, None if no call ever did."""
        log, piece = self._recording.log, self._slices[entry.name]
        if not piece.operations and entry.ref.tensor in self._recording.constants:
            return "constant"
        calls = [
            _readable(log[index])
            for index in piece.operations
            if index not in piece.allocate_only and log[index].name not in _EMPTY and not _is_view(log[index])
        ]
        return ", ".join(calls) or None


def _is_view(operation: Operation) -> bool:
    sources = {ref.storage for ref in operation.inputs}
    return not operation.written and bool(sources) and all(ref.storage in sources for ref in operation.outputs)


def _readable(operation: Operation) -> str:
    """Write a call as Python does, tensors left out: ``normal_(0.0, 0.02)``."""
    if operation.name == "_to_copy":
        return f"to({str(operation.kwargs.get('dtype')).removeprefix('torch.')})"
    if operation.name == "lift_fresh":
        return "constant"
    shown = [
        f"{argument:.6g}" if isinstance(argument, float) else str(argument)
        for argument in operation.args
        if isinstance(argument, int | float) and not isinstance(argument, bool)
    ]
    return f"{operation.name}({', '.join(shown)})"


def _chunked_draw(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[Tensor, torch.Generator], object] | None:
    """Return how to draw one chunk of a call whose elements are independent, None for other calls."""

    def value(position: int, keyword: str, default: float) -> float:
        return float(args[position]) if len(args) > position else float(kwargs.get(keyword, default))

    if name == "normal_":
        mean, std = value(1, "mean", 0.0), value(2, "std", 1.0)
        return lambda chunk, generator: chunk.normal_(mean, std, generator=generator)
    if name == "uniform_":
        low, high = value(1, "from", 0.0), value(2, "to", 1.0)
        return lambda chunk, generator: chunk.uniform_(low, high, generator=generator)
    if name == "trunc_normal_":
        bounds = value(1, "mean", 0.0), value(2, "std", 1.0), value(3, "a", -2.0), value(4, "b", 2.0)
        return lambda chunk, generator: truncated_normal_(chunk, *bounds, generator)
    return None
