"""Measure the sines and cosines of angles that half precision made too coarse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from propcheck.records import Angle
from propcheck.tracing.events import Listener
from propcheck.tracing.tensors import is_narrow, is_transformed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from propcheck.tracing.events import AngleCall


class AngleMeasurer(Listener):
    """Measures the largest angle per module, and per parameter or buffer in half precision that it was computed from."""

    def __init__(self) -> None:
        self._largest: dict[tuple[str | None, str | None], tuple[torch.dtype, Tensor]] = {}

    def angles(self, call: AngleCall) -> None:
        """Measure angles, if they or a parameter that they were computed from are in half precision."""
        narrow = ((name, dtype) for name, dtype in call.parameters if is_narrow(dtype))
        parameter, dtype = next(narrow, (None, call.angles.dtype))
        key = call.module, parameter
        if is_narrow(dtype) and call.angles.numel() and not is_transformed(call.angles) and key not in self._largest:
            self._largest[key] = dtype, call.angles.detach().abs().amax().double()

    def records(self, block_of: Callable[[str | None], int | None]) -> tuple[Angle, ...]:
        """Return one record per measurement; ``block_of`` gives the block of a module.

        An angle a in a dtype with p significant bits, or computed from a number in that dtype, is off by up to a / 2^p.
        """
        if not self._largest:
            return ()
        largest = torch.stack([value for _, value in self._largest.values()]).tolist()
        return tuple(
            Angle(
                module=module,
                block=block_of(module),
                parameter=parameter,
                dtype=str(dtype).removeprefix("torch."),
                largest=value,
                error=value * torch.finfo(dtype).eps / 2,
            )
            for ((module, parameter), (dtype, _)), value in zip(self._largest.items(), largest, strict=True)
        )
