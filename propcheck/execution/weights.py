"""The parameters of a recorded model as they come into memory and go.

At rest a parameter has its shape and dtype but no memory: one NaN, expanded. Code that reads a parameter which was not
brought in would give NaN, never a plausible number.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.deferred_init.record import Entry, Recording
    from propcheck.execution.plan import Unit

_ALIGNMENT = 64  # bytes, as torch's own allocator


class Weights:
    """Materialises units on demand, and lets go of them.

    Parameters
    ----------
    recording
        The model, whose fake tensors are replaced by real ones here.
    materialize
        Returns the value of an entry, in the memory ``out`` if that is given.
    units
        Of ``divide``.
    device
        Where the parameters are used; they are always computed on the CPU, so that every device gets the same values.
    census
        Called once for each entry, the first time that it is in memory.
    """

    def __init__(
        self,
        recording: Recording,
        materialize: Callable[..., Tensor],
        units: Sequence[Unit],
        *,
        device: torch.device,
        census: Callable[[Entry, Tensor], None],
    ) -> None:
        self._real = not recording.recorded  # every tensor is there already
        self._materialize, self._device, self._census = materialize, device, census
        self._counted: set[str] = set()
        self._holders: Counter[str] = Counter()  # how many units that are in memory have the parameter
        self._buffers: dict[str, Tensor] = {}  # memory of the units that are in
        self._spare: list[Tensor] = []
        self._block_bytes = max((_packed_bytes(unit.entries) for unit in units if unit.block is not None), default=0)
        self.tensors = _realise(recording, device) if recording.recorded else dict(recording.tensors)

    def bring_permanently(self, entries: Sequence[Entry]) -> None:
        """Materialise entries that stay: buffers, and parameters of no unit."""
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():  # noqa: SLF001
            self._bring_permanently(entries)

    def _bring_permanently(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._holders[entry.name] += 1
            if self._holders[entry.name] > 1:
                continue
            value = self._materialize(entry)
            self._put(entry, value)

    def bring(self, unit: Unit) -> None:
        """Materialise the parameters of ``unit`` that are not in memory."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            self._bring(unit)

    def _bring(self, unit: Unit) -> None:
        missing = [entry for entry in unit.entries if not self._holders[entry.name]]
        for entry in unit.entries:
            self._holders[entry.name] += 1
        if not missing:
            return
        if self._real:
            for entry in missing:
                self._put(entry, self._materialize(entry))
            return
        memory = self._buffers[unit.path] = self._memory(_packed_bytes(missing), recycled=unit.block is not None)
        start = 0
        for entry in missing:
            part = memory[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)
            value = self._materialize(entry, out=part)
            self._put(entry, value)
            start += _padded(entry.nbytes)

    def drop(self, unit: Unit) -> None:
        """Let go of the parameters of ``unit`` that no other unit in memory has."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
        shared = False
        for entry in unit.entries:
            self._holders[entry.name] -= 1
            if self._holders[entry.name]:
                shared = True
            elif not self._real:
                self.tensors[entry.name].data = _placeholder(entry, self._device)
        memory = self._buffers.pop(unit.path, None)
        if memory is not None and not shared and unit.block is not None and not self._spare:
            self._spare.append(memory)  # the next block's: pages that are mapped already cost nothing

    def present(self, name: str) -> bool:
        """Whether a parameter is in memory."""
        return bool(self._holders[name])

    def _memory(self, size: int, *, recycled: bool) -> Tensor:
        if recycled and self._spare and _is_free(self._spare[0]):
            return self._spare.pop()
        self._spare.clear()  # a large part beside the blocks, a head say, needs the room more
        return torch.empty(max(size, self._block_bytes if recycled else 0), dtype=torch.uint8)

    def _put(self, entry: Entry, value: Tensor) -> None:
        if entry.name not in self._counted:
            self._counted.add(entry.name)
            self._census(entry, value)
        # A tensor that was there before the scan, on its device, is left as it is: its class may know no other memory.
        if not self._real or value.device != self._device:
            self.tensors[entry.name].data = value.to(self._device)


def _is_free(memory: Tensor) -> bool:
    """Whether nothing else, an output or a view that the model's code keeps, lies in the memory."""
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        storage = memory.untyped_storage()
        return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # noqa: SLF001 - the tensor and this name


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _packed_bytes(entries: Sequence[Entry]) -> int:
    return sum(_padded(entry.nbytes) for entry in entries)


def _placeholder(entry: Entry, device: torch.device) -> Tensor:
    value = float("nan") if entry.dtype.is_floating_point else 0
    return torch.full((), value, dtype=entry.dtype, device=device).expand(entry.shape)


def _realise(recording: Recording, device: torch.device) -> dict[str, Tensor]:
    """Put real tensors without memory in the places of the model's fake ones; return them by name."""
    modules = dict(recording.model.named_modules(remove_duplicate=False))
    tensors: dict[str, Tensor] = {}
    for entry in recording.entries:
        empty = _placeholder(entry, device)
        real: Any = nn.Parameter(empty, requires_grad=entry.requires_grad) if entry.kind == "parameter" else empty
        tensors[entry.name] = real
        for name in entry.names:
            parent, _, key = name.rpartition(".")
            owner = modules[parent]
            if entry.kind == "parameter":
                owner._parameters[key] = real  # noqa: SLF001
            else:
                owner._buffers[key] = real  # noqa: SLF001
    return tensors
