"""The same model in fp32: the weights that were drawn in half precision, widened, and the same inputs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from propcheck.deferred_init.materialize import Materializer
from propcheck.errors import PropcheckError
from propcheck.execution.outside_tensors import OutsideTensors
from propcheck.tracing.tensors import is_narrow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.deferred_init.keyed_rng import Workers
    from propcheck.deferred_init.record import Entry, Recording
    from propcheck.execution.build import BuiltTarget


class WideMaterializer(Materializer):
    """Values as ``Materializer`` computes them, in the dtype that they have in training, then widened."""

    def __init__(self, recording: Recording, workers: Workers) -> None:
        super().__init__(recording, workers)
        self._narrow = {entry.name: entry for entry in recording.entries}

    def materialize(self, entry: Entry, seed: int, out: Tensor | None = None) -> Tensor:
        """Compute one parameter, as ``Materializer`` does; ``entry`` is the widened one."""
        narrow = self._narrow[entry.name]
        if narrow.dtype == entry.dtype:
            return super().materialize(entry, seed, out)
        value = super().materialize(narrow, seed)
        return value.to(entry.dtype) if out is None else out.view(entry.shape).copy_(value)

    def value(self, tensor: Tensor, name: str, seed: int) -> Tensor | None:
        """Compute a tensor that is no parameter or buffer, as ``Materializer`` does."""
        value = super().value(tensor, name, seed)
        return value if value is None else _wide(value)


def widened(built: BuiltTarget, *, seed: int, device: torch.device, workers: Workers) -> BuiltTarget:
    """Return a target that was built, and nothing more, as one whose tensors come in fp32 where they were narrower."""
    recording = built.recording
    entries = tuple(
        dataclasses.replace(entry, dtype=torch.float32) if is_narrow(entry.dtype) else entry for entry in recording.entries
    )
    wide = dataclasses.replace(recording, entries=entries)
    if not recording.recorded:
        return dataclasses.replace(built, recording=wide, held=sum(entry.nbytes for entry in entries))
    materializer = WideMaterializer(recording, workers)
    return dataclasses.replace(
        built, recording=wide, materializer=materializer, outside_tensors=OutsideTensors(materializer, seed, device)
    )


def widen_in_memory(built: BuiltTarget, room: int) -> None:
    """Widen the tensors of a target from ``widened`` that are in memory already, with ``room`` bytes for it.

    Raises
    ------
    PropcheckError
        If that is not enough.
    """
    recording = built.recording
    if recording.recorded:
        return
    tensors = [(entry, recording.tensors[entry.name]) for entry in recording.entries]
    more = sum(entry.nbytes - tensor.numel() * tensor.element_size() for entry, tensor in tensors)
    if more > room:
        raise PropcheckError(
            f"scan.shadow: in fp32 the model is {built.held / 2**30:.3g} GiB in memory, as a whole, and that does not fit the "
            "memory budget; raise --memory, or scan without a shadow"
        )
    for entry, tensor in tensors:
        if tensor.dtype != entry.dtype:
            tensor.data = tensor.data.to(entry.dtype)


def wide_batch(batch: Any) -> Any:
    """Return a batch with its floating-point numbers in fp32 where they were narrower."""
    return tree_map_only(Tensor, _wide, batch)


def has_narrow(entries: Sequence[Entry]) -> bool:
    """Whether a parameter or buffer is narrower than fp32."""
    return any(is_narrow(entry.dtype) for entry in entries)


def _wide(tensor: Tensor) -> Tensor:
    if not is_narrow(tensor.dtype):
        return tensor
    return tensor.detach().float().requires_grad_(tensor.requires_grad)
