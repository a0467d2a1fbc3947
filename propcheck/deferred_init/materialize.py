"""Compute any one parameter of a recorded model from the calls that made it.

Each random call is seeded by (seed, the parameter that owns it, its index among that parameter's random calls), so a
value does not depend on what else is computed, in which order, or by how many threads; and two models that differ in one
thing share every parameter of the same name. A random result that several parameters use belongs to the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from propcheck.deferred_init.dependencies import Slicer
from propcheck.deferred_init.fp64_reference import excess, in_fp64
from propcheck.deferred_init.init_calls import readable
from propcheck.deferred_init.keyed_rng import draw
from propcheck.deferred_init.run_ops import compute

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.deferred_init.dependencies import Slice
    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.deferred_init.record import Entry, Recording


class Materializer:
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
        slicer = self._slicer = Slicer(recording.log)
        self._slices = {entry.name: slicer.slice(entry.ref) for entry in recording.entries}
        # The owner and index of each random call.
        self._owner: dict[int, tuple[str, int]] = {}
        for name, piece in self._slices.items():
            self._own(name, piece)

    def _own(self, name: str, piece: Slice) -> None:
        random = [index for index in piece.operations if index in piece.valued and self._recording.log[index].random]
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
            On the CPU, of the entry's shape and dtype; in ``out``'s memory if ``out`` was given and the model was recorded.
        """
        if not self._recording.recorded:
            return self._recording.tensors[entry.name].detach()
        value = self._compute(self._slices[entry.name], seed, out)
        if out is not None and value.data_ptr() != out.data_ptr():
            return out.view(entry.shape).copy_(value)
        return _alone(value) if out is None else value

    def value(self, tensor: Tensor, name: str, seed: int) -> Tensor | None:
        """Compute a tensor that the constructor made and that is no parameter or buffer, an input say; None if it did not.

        Its random calls are those of ``name``, unless a parameter has them.
        """
        ref = self._recording.known(tensor)
        if ref is None:
            return None
        piece = self._slicer.slice(ref)
        self._own(name, piece)
        return _alone(self._compute(piece, seed, None)).requires_grad_(tensor.requires_grad)

    def _compute(self, piece: Slice, seed: int, out: Tensor | None) -> Tensor:
        def drawn(index: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memory: Tensor) -> Any:
            return draw(function, args, kwargs, memory, (seed, *self._owner[index]), self._workers)

        return compute(self._recording.log, self._recording.constants, piece, drawn, out)

    def init_calls(self, entry: Entry) -> str | None:
        """Return the calls that gave a parameter its value in readable form, None if no call ever did.

        Of a model that was not recorded nothing is known; the text says so.
        """
        if not self._recording.recorded:
            return "built without a record"
        log, piece = self._recording.log, self._slices[entry.name]
        inputs = (ref for index in piece.operations for ref in log[index].inputs)
        return readable(
            [log[index] for index in piece.operations if index in piece.valued],
            from_outside=any(ref.tensor in self._recording.constants for ref in (entry.ref, *inputs)),
        )

    def fp64_error(self, entry: Entry, seed: int) -> float | None:
        """Say how far a half-precision buffer is from what the same calls give in fp64, beyond the rounding of its own dtype.

        Parameters
        ----------
        entry
            Which one.
        seed
            Of the pass; no random call has a part in what is compared.

        Returns
        -------
        float or None
            As :func:`propcheck.deferred_init.fp64_reference.excess`: relative to the largest exact number. None for whatever
            is no buffer in bf16 or fp16, for a model that was not recorded, for what chance has a part in or no call wrote,
            and for what cannot be computed in fp64.
        """
        if entry.kind != "buffer" or entry.dtype not in (torch.bfloat16, torch.float16) or not entry.numel:
            return None
        if not self._recording.recorded or self.init_calls(entry) is None:
            return None
        exact = in_fp64(self._recording.log, self._recording.constants, self._slices[entry.name])
        return None if exact is None else excess(self.materialize(entry, seed), exact)


def _alone(value: Tensor) -> Tensor:
    """Return a value that does not hold on to a larger storage."""
    return value.clone() if value.untyped_storage().nbytes() > value.numel() * value.element_size() else value
