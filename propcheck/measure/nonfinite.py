"""Search for the operation that first makes a NaN or an infinity out of finite numbers, forward and backward.

``NonfiniteSearch`` looks at the result of every function in the second pass of a model whose first pass was not finite. A value
that is not finite is traced by the memory that it lies in, through views, copies and the engine's cuts, to the function that
made it; one that was not finite from the start (-inf in a mask, a parameter) has no such origin. Every look waits for the
device.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from propcheck.measure.nonfinite_gradients import GradientSearch, Step
from propcheck.measure.nonfinite_operands import (
    Operands,
    OperandSource,
    Overwritten,
    changed_in_place,
    masked_rows,
    read_operands,
)
from propcheck.measure.nonfinite_values import Content, content_of, is_finite, spoilt_tokens
from propcheck.records import Origin
from propcheck.tracing.events import Listener
from propcheck.tracing.graph import trace_of
from propcheck.tracing.op_names import EXPONENTIALS, ROOTS, SOFTMAXES
from propcheck.tracing.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.measure.site_measurements import AdditionMeasurer
    from propcheck.tracing.events import FunctionCall
    from propcheck.tracing.graph import Addition

# Memory that was not written to yet holds anything; attributes share the memory of their tensor.
_IGNORED = {"empty_like", "new_empty", "empty_strided", "new_empty_strided", "__get__", "__set__"}
# These overwrite all of their first argument, whatever it held.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"}
# The logarithm of a mask of zeros and ones has -infinity for zeros, as intended.
_LOGARITHMS = {"log", "log_", "log2", "log10"}


class NonfiniteSearch(Listener):
    """Finds where a pass ceases to be finite.

    Parameters
    ----------
    additions
        Measures the additions of the same pass.
    gradients
        Searches the backward pass.
    shape
        Sequences, and tokens per sequence.
    blocks
        The number of each block by its path.
    """

    def __init__(
        self, additions: AdditionMeasurer, gradients: GradientSearch, *, shape: tuple[int, int], blocks: Mapping[str, int]
    ) -> None:
        self._additions, self._gradients, self._shape = additions, gradients, shape
        self._paths = {block: path for path, block in blocks.items()}
        # By address, which no other storage has while the reference exists.
        self._sources: dict[int, tuple[StorageWeakRef, OperandSource]] = {}
        self._overwritten = Overwritten(None, None)  # by the function that runs
        self._orders = 0
        self._sums: dict[Addition, OperandSource | None] = {}  # additions whose result is not finite
        self._source_of_loss: OperandSource | None = None
        self._loss_is_finite = True

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The first operation of each direction, once the pass is over.

        Forward: the operation that made the first sum of a residual stream, or else the loss, not finite. Backward: only if the
        loss is finite. A direction is missing where the values came from outside, or from code that cannot be followed.
        """
        origins = []
        sums = [source for addition, source in self._sums.items() if not addition.inner and self._is_nonfinite(addition)]
        forward = sums[0] if sums else self._source_of_loss
        if forward is not None:
            origins.append(forward.origin)
        if self._gradients.origin is not None and self._loss_is_finite:
            origins.append(self._gradients.origin)
        return tuple(origins)

    def _is_nonfinite(self, addition: Addition) -> bool:
        """Whether an addition was measured to be not finite, without padding."""
        return any(float(statistics.nonfinite) > 0 for statistics in self._additions.statistics[addition])

    def pass_ended(self, loss: Tensor) -> None:
        """Look at the loss."""
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            self._loss_is_finite = is_finite(loss)
            self._source_of_loss = None if self._loss_is_finite else self._source_in(loss)
            self._gradients.watch(loss, Step("loss", None, None))

    def function_called(self, call: FunctionCall) -> None:
        """Look at the tensor that a function is about to change in place."""
        if _is_ignored(call):
            return
        tensor = changed_in_place(call)
        content = None
        if tensor is not None and call.name not in _OVERWRITING:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
                content = content_of(tensor)
        self._overwritten = Overwritten(tensor, content)

    def function_returned(self, call: FunctionCall, result: Any) -> None:
        """Look at the result of a function."""
        if _is_ignored(call):
            return
        results = tensors_in((self._overwritten.tensor if result is None else result,))
        if results:
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                with torch.no_grad():
                    source = self._look_at(call, results)
                    note = _forward_note(call, results, source)
                if torch.is_grad_enabled():
                    step = Step(_plain(call.name), *self._place(call), note)
                    for tensor in results:
                        self._gradients.watch(tensor, step)

    def _look_at(self, call: FunctionCall, results: Sequence[Tensor]) -> OperandSource | None:
        """Return the source of what is not finite in the results, and remember it."""
        nonfinite = [tensor for tensor in results if not is_finite(tensor)]
        source = self._source(call, nonfinite) if nonfinite else None
        for tensor in nonfinite:
            if source is not None:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._sources[reference.cdata] = reference, source
            trace = trace_of(tensor)
            addition = None if trace is None or trace.node is None else trace.node.addition
            if addition is not None:
                self._sums.setdefault(addition, source)
        return source

    def _source(self, call: FunctionCall, results: Sequence[Tensor]) -> OperandSource | None:
        """Return the source of results that are not finite: this function, or an earlier one; None if neither."""
        operands = read_operands(call, self._overwritten, self._source_in)
        if operands is None:
            return None  # a constant
        contents = [content_of(tensor) for tensor in results]
        if any(content.nan for content in contents) and not operands.has_nan:
            return self._source_of_nan(call, operands, results[0])
        if any(content.infinite for content in contents) and not operands.has_nan and not operands.nonfinite_numbers:
            return self._source_of_infinity(call, operands, contents, results[0])
        return operands.earliest

    def _source_of_nan(self, call: FunctionCall, operands: Operands, result: Tensor) -> OperandSource | None:
        """Return the source of a NaN that is in no operand."""
        earliest = operands.earliest
        if any(map(math.isnan, operands.nonfinite_numbers)):
            return earliest  # a fill with NaN
        masked = masked_rows(call)
        if masked is not None:
            if earliest is not None and not earliest.may_be_mask:
                masked += f", and an infinity made by {_maker(earliest.origin)}"
            return self._new_source("NaN", call, masked, result)
        if not operands.has_infinity or earliest is None:
            return self._new_source("NaN", call, operands.words, result)
        more = f"; {_plain(call.name)}{_in(self._place(call)[0])} turns the infinity into NaN"
        return replace(earliest, origin=replace(earliest.origin, inputs=earliest.origin.inputs + more), may_be_mask=False)

    def _source_of_infinity(
        self, call: FunctionCall, operands: Operands, results: Sequence[Content], result: Tensor
    ) -> OperandSource | None:
        """Return the source of an infinity."""
        positive = any(content.plus for content in results)
        exponential_overflows = (
            operands.earliest is None
            and call.name in EXPONENTIALS
            and positive
            and not any(content.plus for content in operands.contents)
        )
        if operands.has_infinity and not exponential_overflows:
            return operands.earliest
        may_be_mask = call.name in _LOGARITHMS and not positive
        return self._new_source("infinity", call, operands.words, result, may_be_mask=may_be_mask)

    def _new_source(
        self, value: Literal["NaN", "infinity"], call: FunctionCall, words: str, result: Tensor, *, may_be_mask: bool = False
    ) -> OperandSource:
        module, block = self._place(call)
        spoilt = spoilt_tokens(result, self._shape, value, rows=call.name in SOFTMAXES)
        self._orders += 1
        origin = Origin(
            self._gradients.seed,
            "forward",
            value,
            _plain(call.name),
            module,
            block,
            words,
            spoilt.tokens,
            spoilt.affected,
            spoilt.positions,
        )
        return OperandSource(self._orders, origin, may_be_mask)

    def _source_in(self, tensor: Tensor) -> OperandSource | None:
        """Return the source of the values in a tensor's memory."""
        if tensor.layout != torch.strided:
            return None
        entry = self._sources.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        return None if entry is None else entry[1]

    def _place(self, call: FunctionCall) -> tuple[str | None, int | None]:
        # A block that is computed again is not entered by way of its module.
        module = self._paths.get(-1 if call.block is None else call.block) if call.module is None else call.module
        return module, call.block


def _is_ignored(call: FunctionCall) -> bool:
    return call.name in _IGNORED or torch._C._functorch.maybe_current_level() is not None  # noqa: SLF001


def _forward_note(call: FunctionCall, results: Sequence[Tensor], source: OperandSource | None) -> str:
    """Describe what the forward pass showed at a function whose backward makes a gradient that is not finite."""
    if source is not None:
        return f"; the forward pass already has {source.origin.value} there, first made by {_maker(source.origin)}"
    if call.name in ROOTS and any((tensor == 0).any() for tensor in results):
        return "; its forward output has zeros"
    return ""


def _plain(name: str) -> str:
    """Return the name of an operation without underscores: of ``exp_``, ``__rsub__``."""
    return name.strip("_")


def _in(module: str | None) -> str:
    return "" if module is None else f" in {module}"


def _maker(origin: Origin) -> str:
    return f"{origin.function}{_in(origin.module)}"
