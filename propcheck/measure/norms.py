"""Measure the inputs, outputs and gains of normalisations as they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from propcheck.measure.padding import real_positions
from propcheck.measure.statistics import moments, norm_statistics
from propcheck.tracing.events import Listener
from propcheck.tracing.tensors import is_transformed

if TYPE_CHECKING:
    from torch import Tensor

    from propcheck.measure.statistics import NormStatistics
    from propcheck.tracing.events import NormCall
    from propcheck.tracing.graph import Norm


@dataclass(slots=True)
class NormMeasurement:
    """Of one norm; tensors are 0-d and still on the device."""

    statistics: NormStatistics | None = None  # None within a transform of torch.func, whose tensors stand for many
    final_mean_square: Tensor | None = None  # of the output after a gain that is a multiplication of its own
    gain_mean_square: Tensor | None = None

    @property
    def output_mean_square(self) -> Tensor | None:
        """Of the output, after the gain if there is one."""
        if self.final_mean_square is not None or self.statistics is None:
            return self.final_mean_square
        return self.statistics.output_mean_square


class NormMeasurer(Listener):
    """Measures every norm of a pass.

    Parameters
    ----------
    masks
        Of real positions, as ``padding_masks`` returns them.

    Attributes
    ----------
    measured
        By norm, in forward order.
    """

    def __init__(self, masks: tuple[Tensor, ...] = ()) -> None:
        self.measured: dict[Norm, NormMeasurement] = {}
        self._masks = masks

    def norm(self, call: NormCall) -> None:
        """Measure a norm."""
        measured = self.measured[call.norm] = NormMeasurement()
        if is_transformed(call.source) or call.norm.late:  # of a late norm, the source is not what was reduced
            return
        with torch.no_grad():
            width = call.norm.width
            output = None if call.output is None else self._vectors(call.output, width)
            source = self._vectors(call.source, width)
            measured.statistics = norm_statistics(source, output, kind=call.norm.kind, eps=call.norm.eps)

    def norm_gain(self, norm: Norm, gain: Tensor) -> None:
        """Measure the gain of a norm: a parameter, or a tensor computed from one."""
        with torch.no_grad():
            self.measured[norm].gain_mean_square = moments(gain.detach()).mean_square

    def norm_output(self, norm: Norm, output: Tensor) -> None:
        """Measure the output of a norm after its gain."""
        measured = self.measured[norm]
        if measured.statistics is not None and measured.statistics.output_mean_square is not None:
            with torch.no_grad():
                measured.final_mean_square = moments(self._vectors(output, norm.width)).mean_square

    def _vectors(self, tensor: Tensor, width: int) -> Tensor:
        real = real_positions(tensor, self._masks)
        return real if not real.dim() or real.shape[-1] == width else real.reshape(-1, width)
