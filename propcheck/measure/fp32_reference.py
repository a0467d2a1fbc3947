"""Compare a pass with the same pass in fp32, site by site.

The tensors of both are written to an unnamed file, so they take no memory and are gone however the scan ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from propcheck.errors import PropcheckError
from propcheck.measure.padding import real_positions
from propcheck.tracing.events import Listener
from propcheck.tracing.tensors import channels_last, is_narrow, tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import IO

    from propcheck.records import SiteRecord
    from propcheck.tracing.events import AdditionValues, GradientOf
    from propcheck.tracing.graph import Addition
    from propcheck.tracing.sites import Site

_CHUNK = 1 << 20  # elements that are read and compared at a time


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the file."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class Spool(Listener):
    """Keeps the values and gradients of one pass's additions in a temporary file, in their dtype.

    A context: the file exists within it.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[tuple[Addition, str, int], _Place] = {}
        self._masks: tuple[Tensor, ...] = ()

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile(dir=_directory())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def restart(self, masks: tuple[Tensor, ...] = ()) -> None:
        """Drop what was kept: the pass starts again. ``masks`` are of real positions, as ``padding_masks`` returns them."""
        assert self._file is not None
        self._file.truncate(0)
        self._places.clear()
        self._masks = masks

    def addition(self, values: AdditionValues) -> None:
        """Keep the stream and the updates of an addition, without padding."""
        self._keep_real(values, "stream", 0, values.stream)
        for part, update in enumerate(values.updates):
            self._keep_real(values, "update", part, update)

    def _keep_real(self, values: AdditionValues, name: str, part: int, tensor: Tensor) -> None:
        real = real_positions(channels_last(tensor, values.addition.channels), self._masks)
        self.keep(values.addition, name, part, real)

    def gradient(self, addition: Addition, name: GradientOf, tensor: Tensor) -> None:
        """Keep the gradient of an operand; tensors come from ``GradientMeasurer``, without padding."""
        if name != "sum":
            self.keep(addition, f"grad_{name}", 0, tensor)

    def keep(self, addition: Addition, name: str, part: int, tensor: Tensor) -> None:
        """Write one tensor.

        Raises
        ------
        PropcheckError
            If the disk is full.
        """
        assert self._file is not None
        with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
            flat = tensor.detach().cpu().contiguous().view(-1)
            try:
                start = self._file.seek(0, os.SEEK_END)
                self._file.write(flat.view(torch.uint8).numpy().data)
            except OSError as error:
                raise PropcheckError(
                    f"scan.shadow: cannot write the tensors of the pass to {_directory()}: {error.strerror}; set TMPDIR to a "
                    "directory with more space"
                ) from error
        self._places[addition, name, part] = _Place(start, tensor.shape, tensor.dtype)

    def place(self, addition: Addition, name: str, part: int = 0) -> _Place | None:
        """Return where a tensor lies; None if it was not kept."""
        return self._places.get((addition, name, part))

    def read(self, place: _Place) -> Iterator[Tensor]:
        """Yield a tensor's elements in fp64, a chunk at a time."""
        assert self._file is not None
        count, size = place.shape.numel(), place.dtype.itemsize
        for start in range(0, count, _CHUNK):
            self._file.seek(place.start + start * size)
            data = bytearray(self._file.read(min(_CHUNK, count - start) * size))
            yield torch.frombuffer(data, dtype=place.dtype).double()


def _directory() -> str:
    """Return a directory for temporary files on disk; ``/tmp`` is often in memory."""
    on_disk = Path("/var/tmp")  # noqa: S108 - the file has no name there
    use_default = "TMPDIR" in os.environ or not (on_disk.is_dir() and os.access(on_disk, os.W_OK))
    return tempfile.gettempdir() if use_default else str(on_disk)


class Draws(TorchFunctionMode):
    """Notes which functions draw random numbers in half precision: in fp32 the same generator gives other numbers.

    On a CPU, dropout draws the same mask in every dtype, so it is not one of them.

    Parameters
    ----------
    device
        Where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._names = _DRAWS if device.type == "cpu" else _DRAWS | _MASKS

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in self._names and _has_narrow((result, *args)):
            self.found.add(name)
        return result


_DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "exponential_", "log_normal_",
    "cauchy_", "multinomial", "gumbel_softmax", "rrelu", "rrelu_", "rrelu_with_noise",
}  # fmt: skip
_MASKS = {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli_"}


class Casts(TorchFunctionMode):
    """Notes which functions return half precision from other dtypes: in an fp32 pass, the casts of the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _has_narrow((result,)) and not _has_narrow((*args, kwargs)):
            self.found.add(getattr(func, "__name__", "a function"))
        return result


def _has_narrow(values: tuple[Any, ...]) -> bool:
    return any(is_narrow(tensor.dtype) for tensor in tensors_in(values))


@dataclass(frozen=True, slots=True)
class Deviation:
    """||a - b|| / ||b|| at one site, b in fp32; None where one of the two was not observed, or both are zero."""

    stream: float | None
    update: float | None
    grad_stream: float | None
    grad_update: float | None


@dataclass(frozen=True, slots=True)
class KeptPass:
    """A pass whose additions were kept; ``loss_scale`` is the factor in its gradients."""

    spool: Spool
    sites: Sequence[Site]
    loss_scale: float = 1.0

    def place(self, site: Site, name: str) -> _Place | None:
        """Return where a tensor of a site lies; the sites of a parallel block share the stream of its first addition."""
        addition = site.addition.first if name.endswith("stream") else site.addition
        return self.spool.place(addition, name, site.part if name == "update" else 0)


def compare(measured: KeptPass, reference: KeptPass) -> tuple[Deviation, ...]:
    """Compare a pass with its fp32 reference; one result per site.

    Raises
    ------
    PropcheckError
        If the two passes did not do the same additions.
    """
    if [site.shape for site in measured.sites] != [site.shape for site in reference.sites]:
        raise PropcheckError(
            f"scan.shadow: the pass has {len(measured.sites)} residual additions, the fp32 pass has {len(reference.sites)}, or "
            "their shapes differ; the model's code takes another path in fp32, so the two cannot be compared; scan without a "
            "shadow"
        )
    return tuple(
        Deviation(
            *(
                _deviation(measured, measured.place(site, name), reference, reference.place(other, name), scale)
                for name, scale in (
                    ("stream", 1.0),
                    ("update", 1.0),
                    ("grad_stream", measured.loss_scale),
                    ("grad_update", measured.loss_scale),
                )
            )
        )
        for site, other in zip(measured.sites, reference.sites, strict=True)
    )


def _deviation(
    measured: KeptPass, place: _Place | None, reference: KeptPass, reference_place: _Place | None, scale: float
) -> float | None:
    if place is None or reference_place is None:
        return None
    error = size = 0.0
    for x, y in zip(measured.spool.read(place), reference.spool.read(reference_place), strict=True):
        difference = (x / scale).sub_(y)
        error += float(torch.dot(difference, difference))
        size += float(torch.dot(y, y))
    if not size:
        return float("inf") if error else None
    return float((error / size) ** 0.5)


def with_shadow(rows: Sequence[SiteRecord], deviations: Sequence[Deviation]) -> tuple[SiteRecord, ...]:
    """Return the rows of a pass with the deviations from its fp32 reference; unchanged if there are none."""
    if not deviations:
        return tuple(rows)
    return tuple(
        replace(
            row,
            shadow_stream_error=deviation.stream,
            shadow_update_error=deviation.update,
            shadow_grad_stream_error=deviation.grad_stream,
            shadow_grad_update_error=deviation.grad_update,
        )
        for row, deviation in zip(rows, deviations, strict=True)
    )
