"""Recognise additions in a part of the model that is computed again for the backward pass, by their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.tracing.function_mode import FunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from propcheck.tracing.addition_calls import Sum
    from propcheck.tracing.events import FunctionCall, Listeners
    from propcheck.tracing.function_mode import Runner
    from propcheck.tracing.graph import Addition


class Recomputation(FunctionMode):
    """Sends the additions of the forward pass again, with the tensors whose graph will be differentiated.

    Parameters
    ----------
    names, listeners, runners
        As of ``FunctionMode``.
    place
        Returns the module and the block that run.
    additions
        The residual additions of the forward pass by number, and whether their first operand is the stream.
    first
        The number of the first addition in this part.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        listeners: Listeners,
        runners: Mapping[str, Runner],
        *,
        place: Callable[[], tuple[str | None, int | None]],
        additions: Mapping[int, tuple[Addition, bool]],
        first: int,
    ) -> None:
        super().__init__(names, listeners, runners)
        self.additions_met = first
        self._place, self._additions = place, additions

    def place(self) -> tuple[str | None, int | None]:
        """Return the module and the block that run."""
        return self._place()

    def _add(self, call: FunctionCall, addition: Sum, number: int) -> Tensor:
        residual, stream_is_first = self._additions.get(number, (None, True))
        result: Tensor
        if residual is None or residual.inner:
            result = call.run()
            return result
        operands = self._send_operands(residual, addition, stream_is_first=stream_is_first)
        result = call.run()
        self._send_total(operands, result)
        return result
