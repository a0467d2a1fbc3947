"""Compute any one parameter of a recorded model from the calls that made it.

Each random call is seeded by (seed, the parameter that owns it, its index among that parameter's random calls), so a
value does not depend on what else is computed, in which order, or by how many threads; and two models that differ in one
thing share every parameter of the same name. A random result that several parameters use belongs to the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from propcheck.build.calls import readable
from propcheck.build.compute import compute
from propcheck.build.random import draw
from propcheck.build.slices import Slicer

if TYPE_CHECKING:
    from torch import Tensor

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

        def drawn(index: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Tensor) -> Any:
            return draw(function, args, kwargs, memory, (seed, *self._owner[index]), self._workers)

        recording = self._recording
        value = compute(recording.log, recording.constants, self._slices[entry.name], entry.ref, drawn, out)
        if out is not None and value.data_ptr() != out.data_ptr():
            return out.view(entry.shape).copy_(value)
        if out is None and value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return value.clone()  # do not hold on to a larger storage
        return value

    def init_calls(self, entry: Entry) -> str | None:
        """Return the calls that gave a parameter its value in readable form, None if no call ever did."""
        log, piece = self._recording.log, self._slices[entry.name]
        inputs = (ref for index in piece.operations for ref in log[index].inputs)
        return readable(
            [log[index] for index in piece.operations if index in piece.valued],
            from_outside=any(ref.tensor in self._recording.constants for ref in (entry.ref, *inputs)),
        )
