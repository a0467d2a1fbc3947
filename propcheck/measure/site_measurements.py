"""Measure the residual additions of a pass: the statistics of their values and the norms of their gradients."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from propcheck.measure.padding import real_positions
from propcheck.measure.statistics import addition_statistics, frobenius, joint_statistics
from propcheck.tracing.events import Listener
from propcheck.tracing.graph import outermost
from propcheck.tracing.tensors import channels_last, version

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from propcheck.measure.statistics import AdditionStatistics
    from propcheck.tracing.events import AdditionOperands, AdditionValues, GradientOf
    from propcheck.tracing.graph import Addition


class AdditionMeasurer(Listener):
    """Measures the values of each addition as it happens.

    Parameters
    ----------
    masks
        Of real positions, as ``padding_masks`` returns them.

    Attributes
    ----------
    statistics
        Of each addition, one per update.
    """

    def __init__(self, masks: tuple[Tensor, ...] = ()) -> None:
        self.statistics: dict[Addition, list[AdditionStatistics]] = {}
        self._masks = masks

    def addition(self, values: AdditionValues) -> None:
        """Measure an addition; of a parallel block, all additions up to it together."""
        group = (*values.earlier, (values.addition, values.updates))
        tensors = [values.stream, values.total, *(update for _, updates in group for update in updates)]
        stream, total, *updates = (
            real_positions(channels_last(tensor, values.addition.channels), self._masks) for tensor in tensors
        )
        if len(updates) == 1:
            measured = iter([addition_statistics(stream, updates[0], total)])
        else:
            measured = iter(joint_statistics(stream, updates, total))
        for addition, parts in group:
            self.statistics[addition] = [next(measured) for _ in parts]


_READERS = "_propcheck_gradient_readers"
_Geometry = tuple[Any, Any, int]  # shape, strides and offset of a view


class GradientMeasurer(Listener):
    """Measures the gradients of the operands and sums of additions, by hooks on the tensors.

    Parameters
    ----------
    masks
        Of real positions, as ``padding_masks`` returns them.
    on_gradient
        Called with each gradient, without padding: its addition, what it is the gradient of, and the tensor.

    Attributes
    ----------
    norms
        Frobenius norms by addition.
    """

    def __init__(
        self,
        masks: tuple[Tensor, ...] = (),
        on_gradient: Callable[[Addition, GradientOf, Tensor], None] | None = None,
    ) -> None:
        self.norms: defaultdict[Addition, dict[GradientOf, Tensor]] = defaultdict(dict)
        self._masks, self._on_gradient = masks, on_gradient

    def before_addition(self, operands: AdditionOperands) -> None:
        """Register hooks on the operands."""
        if "stream" not in operands.gradients_at_sum:
            self._watch(outermost(operands.stream), operands, "stream")
        if "update" not in operands.gradients_at_sum:
            self._watch(operands.update, operands, "update")

    def after_addition(self, operands: AdditionOperands, total: Tensor) -> None:
        """Register hooks on the sum."""
        for name in operands.gradients_at_sum:
            self._watch(outermost(total) if name == "stream" else total, operands, name)

    def _watch(self, tensor: Tensor, operands: AdditionOperands, name: GradientOf) -> None:
        """Measure the gradient of ``tensor`` once for all who read it."""
        geometry = None
        base = tensor._base if operands.in_place and tensor._is_view() else None  # noqa: SLF001
        if base is not None:
            # What overwrites a view leads its gradient past the view, to the tensor below it.
            if not base.is_contiguous():
                return
            geometry = tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset()
            tensor = base
        if not tensor.requires_grad:
            return
        seen, readers = tensor.__dict__.get(_READERS, (None, []))
        if seen != version(tensor):  # a tensor that was changed in place is another one to autograd
            readers = []
            tensor.__dict__[_READERS] = (version(tensor), readers)
            tensor.register_hook(self._hook(readers))
        readers.append((operands.addition, name, geometry))

    def _hook(self, readers: list[tuple[Addition, GradientOf, _Geometry | None]]) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is None:  # where all readers are detached, autograd may still call the hook
                return
            measured: dict[_Geometry | None, tuple[Tensor, Tensor]] = {}  # the norm, and what it is of
            for addition, name, geometry in readers:
                if addition.inner:
                    continue
                if geometry not in measured:
                    part = gradient if geometry is None else gradient.contiguous().as_strided(*geometry)
                    real = real_positions(part, self._masks)
                    measured[geometry] = frobenius(real), real
                self.norms[addition][name] = measured[geometry][0]
                if self._on_gradient is not None:
                    self._on_gradient(addition, name, measured[geometry][1])

        return hook
