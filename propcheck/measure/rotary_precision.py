"""Sines and cosines of angles that half precision has made too coarse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from propcheck.measure.statistics import is_narrow
from propcheck.records import Angle
from propcheck.tracing.graph import is_transformed, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FUNCTIONS = frozenset({"sin", "cos", "sin_", "cos_", "polar"})


class Angles:
    """The angles of one pass, one for each module and each parameter or buffer that makes them coarse.

    Parameters
    ----------
    coarse
        The dtype of each parameter and buffer of half precision that was met.
    names
        The name of each parameter and buffer, by ``id``.
    """

    def __init__(self, coarse: Mapping[str, torch.dtype], names: Mapping[int, str]) -> None:
        self._coarse, self._names = coarse, names
        self._met: dict[tuple[str | None, str | None], tuple[torch.dtype, Tensor]] = {}

    def meet(self, angles: Tensor, module: str | None) -> None:
        """Measure what a sine or cosine is about to be taken of."""
        trace = trace_of(angles)
        sources = [self._names.get(id(angles)), *(sorted(trace.parameters) if trace is not None else ())]
        parameter = next((name for name in sources if name in self._coarse), None)
        dtype = self._coarse[parameter] if parameter is not None else angles.dtype
        if is_narrow(dtype) and angles.numel() and not is_transformed(angles) and (module, parameter) not in self._met:
            self._met[module, parameter] = dtype, angles.detach().abs().amax().double()

    def records(self, block_of: Callable[[str | None], int | None]) -> tuple[Angle, ...]:
        """Return what was met.

        An angle a in a dtype that keeps p bits, or made from a number that has so few, is off by up to a / 2^p.
        """
        if not self._met:
            return ()
        largest = torch.stack([value for _, value in self._met.values()]).tolist()
        return tuple(
            Angle(
                module=module,
                block=block_of(module),
                parameter=parameter,
                dtype=str(dtype).removeprefix("torch."),
                largest=value,
                error=value * torch.finfo(dtype).eps / 2,
            )
            for ((module, parameter), (dtype, _)), value in zip(self._met.items(), largest, strict=True)
        )
