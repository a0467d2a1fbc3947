"""Search for the step of the backward pass that first makes a gradient not finite out of finite ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from propcheck.formatting import number
from propcheck.measure.gradients import MeasuredEmbedding, MeasuredLinear
from propcheck.measure.nonfinite_values import content_of, is_finite, spoilt_tokens
from propcheck.records import Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WATCHED = "propcheck"  # in the metadata of an autograd node: it is watched
_OWN_NODES = (MeasuredLinear._backward_cls, MeasuredEmbedding._backward_cls)  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Step:
    """What built a node of the autograd graph: the function, where, and a note on what the forward pass showed there."""

    function: str
    module: str | None
    block: int | None
    note: str = ""


class GradientSearch:
    """Watches the nodes of autograd graphs. The backward pass calls them in its order, so the first one found is the first.

    Parameters
    ----------
    seed
        Of the pass.
    shape
        Sequences, and tokens per sequence.
    is_cut
        Whether a node stands for a part of the model that has a graph of its own.
    """

    def __init__(self, seed: int, shape: tuple[int, int], is_cut: Callable[[Any], bool]) -> None:
        self.origin: Origin | None = None
        self.seed = seed
        self._shape, self._is_cut = shape, is_cut

    def watch(self, result: Tensor, step: Step) -> None:
        """Watch the nodes above ``result`` that no earlier call has met: ``step`` built them."""
        pending: list[Any] = [result.grad_fn]
        while pending:
            node = pending.pop()
            # No reference to a node is kept: its graph is freed when the model drops it.
            if node is None or hasattr(node, "variable") or _WATCHED in node.metadata:
                continue
            node.metadata[_WATCHED] = True
            if self._is_cut(node):
                continue
            is_custom = isinstance(node, BackwardCFunction) and not isinstance(node, _OWN_NODES)
            built_by = replace(step, function=type(node).__name__.removesuffix("Backward")) if is_custom else step
            node.register_hook(self._hook(built_by))
            pending += [following for following, _ in node.next_functions]

    def _hook(self, step: Step) -> Callable[[Any, Any], None]:
        def hook(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
            if self.origin is not None:
                return
            with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
                arrived = [gradient for gradient in grad_outputs if isinstance(gradient, Tensor)]
                spoilt = next((gradient for gradient in arrived if not is_finite(gradient)), None)
                bad = next(
                    (gradient for gradient in grad_inputs if isinstance(gradient, Tensor) and not is_finite(gradient)), None
                )
                if spoilt is not None:
                    # No earlier step made it: the gradients from several readers were finite, their sum is not.
                    words = f"the finite gradients from all readers of the output of {step.function}"
                    self.origin = self._origin("the sum of gradients", step, words, spoilt)
                elif bad is not None:
                    largest = max((float(gradient.abs().amax()) for gradient in arrived if gradient.numel()), default=0.0)
                    dtype = str(bad.dtype).removeprefix("torch.")
                    words = f"finite gradients of at most {number(largest)} ({dtype}){step.note}"
                    self.origin = self._origin(f"the backward of {step.function}", step, words, bad)

        return hook

    def _origin(self, function: str, step: Step, words: str, bad: Tensor) -> Origin:
        value: Literal["NaN", "infinity"] = "NaN" if content_of(bad).nan else "infinity"
        spoilt = spoilt_tokens(bad, self._shape, value, rows=False)
        return Origin(
            seed=self.seed,
            direction="backward",
            value=value,
            function=function,
            module=step.module,
            block=step.block,
            inputs=words,
            tokens=spoilt.tokens,
            affected=spoilt.affected,
            positions=spoilt.positions,
        )
