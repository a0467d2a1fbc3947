"""Keep what the additions of one pass add, and compare it with the same of another pass in fp32, site by site.

What is kept goes to a file without a name, so that it takes no memory and is gone however the scan ends.
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
from propcheck.tracing.propagation import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import IO

    from propcheck.records import SiteRecord
    from propcheck.tracing.additions import Site
    from propcheck.tracing.graph import Addition

_CHUNK = 1 << 20  # elements that are read and compared at a time


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the file."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class Spool:
    """The tensors of one pass's additions, in a temporary file, in the dtype that they had.

    A context: the file exists within it.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._places: dict[tuple[Addition, str, int], _Place] = {}

    def __enter__(self) -> Self:
        self._file = tempfile.TemporaryFile(dir=_directory())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        assert self._file is not None
        self._file.close()

    def clear(self) -> None:
        """Forget everything: the pass starts again."""
        assert self._file is not None
        self._file.truncate(0)
        self._places.clear()

    def keep(self, addition: Addition, column: str, part: int, tensor: Tensor) -> None:
        """Write one tensor, as ``Follower.on_value`` gives it.

        Raises
        ------
        PropcheckError
            If the disk is full.
        """
        assert self._file is not None
        if column == "grad_sum":
            return
        with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
            flat = tensor.detach().cpu().contiguous().view(-1)
            try:
                start = self._file.seek(0, os.SEEK_END)
                self._file.write(flat.view(torch.uint8).numpy().data)
            except OSError as error:
                raise PropcheckError(
                    f"scan.shadow: what the pass adds cannot be kept in {_directory()}: {error.strerror}; set TMPDIR to a "
                    "folder with more room"
                ) from error
        self._places[addition, column, part] = _Place(start, tensor.shape, tensor.dtype)

    def additions(self) -> dict[int, Addition]:
        """Return the additions by the step that made each sum, as ``Site.order`` has it."""
        found = {addition for addition, _, _ in self._places}
        return {addition.node.order: addition for addition in found if addition.node is not None}

    def place(self, addition: Addition, column: str, part: int) -> _Place | None:
        """Return where a tensor lies; None if there was none."""
        return self._places.get((addition, column, part))

    def read(self, place: _Place) -> Iterator[Tensor]:
        """Yield a tensor's elements in fp64, a chunk at a time."""
        assert self._file is not None
        count, size = place.shape.numel(), place.dtype.itemsize
        for start in range(0, count, _CHUNK):
            self._file.seek(place.start + start * size)
            data = bytearray(self._file.read(min(_CHUNK, count - start) * size))
            yield torch.frombuffer(data, dtype=place.dtype).double()


def _directory() -> str:
    """Return where temporary files do not lie in memory, which ``/tmp`` often does."""
    on_disk = Path("/var/tmp")  # noqa: S108 - the file has no name there
    chosen = "TMPDIR" in os.environ or not (on_disk.is_dir() and os.access(on_disk, os.W_OK))
    return tempfile.gettempdir() if chosen else str(on_disk)


class Draws(TorchFunctionMode):
    """Notes which functions draw random numbers in half precision: in fp32 the same generator gives others.

    On a CPU dropout draws its mask in the same way for every dtype, so it is not one of them.

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
        if name in self._names and any(_is_half(one) for one in tensors_in((result, *args))):
            self.found.add(name)
        return result


_DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "normal", "normal_", "uniform_", "bernoulli", "exponential_", "log_normal_",
    "cauchy_", "multinomial", "gumbel_softmax", "rrelu", "rrelu_", "rrelu_with_noise",
}  # fmt: skip
_MASKS = {"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "bernoulli_"}


class Casts(TorchFunctionMode):
    """Notes which functions make half precision out of other numbers: in an fp32 pass, what the model's own code casts."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(_is_half(one) for one in tensors_in((result,))) and not any(
            _is_half(one) for one in tensors_in((*args, kwargs))
        ):
            self.found.add(getattr(func, "__name__", "a function"))
        return result


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


@dataclass(frozen=True, slots=True)
class Deviation:
    """||a - b|| / ||b|| at one site, b in fp32; None where one of the two was not observed, or both are zero."""

    stream: float | None
    update: float | None
    grad_stream: float | None
    grad_update: float | None


def compare(
    own: Spool, sites: Sequence[Site], loss_scale: float, shadow: Spool, shadow_sites: Sequence[Site]
) -> tuple[Deviation, ...]:
    """Compare a pass with its shadow; one result a site.

    Parameters
    ----------
    own, sites
        What the pass added, and its sites.
    loss_scale
        The factor that is in its gradients.
    shadow, shadow_sites
        The same in fp32, without a factor.

    Raises
    ------
    PropcheckError
        If the two did not do the same additions.
    """
    if [site.shape for site in sites] != [site.shape for site in shadow_sites]:
        raise PropcheckError(
            f"scan.shadow: the pass has {len(sites)} residual additions and the fp32 one has {len(shadow_sites)}, or others; "
            "the model's code does something else in fp32, so the two cannot be compared; scan without a shadow"
        )
    found, counted = [], -1
    pairs = own.additions(), shadow.additions()
    previous = None
    for site, other in zip(sites, shadow_sites, strict=True):
        counted = counted + 1 if site.order == previous else 0  # of the updates of one addition
        previous = site.order
        a, b = pairs[0][site.order], pairs[1][other.order]
        found.append(
            Deviation(
                stream=_deviation(own, own.place(a.first, "stream", 0), shadow, shadow.place(b.first, "stream", 0)),
                update=_deviation(own, own.place(a, "update", counted), shadow, shadow.place(b, "update", counted)),
                grad_stream=_deviation(
                    own, own.place(a.first, "grad_stream", 0), shadow, shadow.place(b.first, "grad_stream", 0), loss_scale
                ),
                grad_update=_deviation(
                    own, own.place(a, "grad_update", 0), shadow, shadow.place(b, "grad_update", 0), loss_scale
                ),
            )
        )
    return tuple(found)


def _deviation(own: Spool, a: _Place | None, shadow: Spool, b: _Place | None, scale: float = 1.0) -> float | None:
    if a is None or b is None:
        return None
    error = size = 0.0
    for x, y in zip(own.read(a), shadow.read(b), strict=True):
        difference = (x / scale).sub_(y)
        error += float(torch.dot(difference, difference))
        size += float(torch.dot(y, y))
    if not size:
        return float("inf") if error else None
    return float((error / size) ** 0.5)


def with_shadow(rows: Sequence[SiteRecord], deviations: Sequence[Deviation]) -> tuple[SiteRecord, ...]:
    """Return the rows of a pass with what its shadow showed; as they are where there was none."""
    if not deviations:
        return tuple(rows)
    return tuple(
        replace(
            row,
            shadow_stream_error=one.stream,
            shadow_update_error=one.update,
            shadow_grad_stream_error=one.grad_stream,
            shadow_grad_update_error=one.grad_update,
        )
        for row, one in zip(rows, deviations, strict=True)
    )
