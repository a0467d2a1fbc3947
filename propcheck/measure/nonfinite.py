"""Search for the operation that first makes a NaN or an infinity out of finite numbers, forward and backward.

``NonfiniteSearch`` looks at the result of every function in the second pass of a model whose first pass was not finite. A value
that is not finite is traced by the memory that it lies in, through views, copies and the engine's cuts, to the function that
made it; one that was not finite from the start (-inf in a mask, a parameter) has no such origin. Every look waits for the
device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from propcheck.formatting import number
from propcheck.measure.nonfinite_gradients import GradientSearch, Step
from propcheck.measure.nonfinite_values import Content, content_of, is_finite, spoilt_tokens, whole_rows_masked
from propcheck.records import Origin
from propcheck.tracing.events import Listener
from propcheck.tracing.graph import trace_of
from propcheck.tracing.op_names import ATTENTIONS, DIVISIONS, EXPONENTIALS, ROOTS, SOFTMAXES
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
# Their second operand may be a plain number that matters.
_QUOTIENTS = DIVISIONS | {"pow", "pow_"}


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """The operation that made values that are not finite; ``order`` numbers these."""

    order: int
    origin: Origin
    may_be_mask: bool = False


@dataclass(frozen=True, slots=True)
class _Overwritten:
    """The argument that a function changes in place, and what it held; ``content`` is None where that does not matter."""

    tensor: Tensor | None
    content: Content | None


@dataclass(frozen=True, slots=True)
class _Operands:
    """What a function read.

    Attributes
    ----------
    contents
        Of its tensors.
    nonfinite_numbers
        Its arguments that are NaN or an infinity.
    numbers
        Its plain numbers that matter to the result.
    earliest
        The first source of a value that is not finite among its tensors.
    """

    contents: Sequence[Content]
    nonfinite_numbers: Sequence[float]
    numbers: Sequence[float]
    earliest: _Source | None

    @property
    def has_nan(self) -> bool:
        """Whether a tensor holds NaN."""
        return any(content.nan for content in self.contents)

    @property
    def has_infinity(self) -> bool:
        """Whether a tensor holds an infinity."""
        return any(content.infinite for content in self.contents)

    @property
    def words(self) -> str:
        """Describe them, one phrase per kind: the experts of a stack would repeat the same many times."""
        phrases = [*dict.fromkeys(content.words for content in self.contents if content.words), *map(number, self.numbers)]
        return ", and ".join(phrases[:3]) or "integers"


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
        self._sources: dict[int, tuple[StorageWeakRef, _Source]] = {}
        self._overwritten = _Overwritten(None, None)  # by the function that runs
        self._orders = 0
        self._sums: dict[Addition, _Source | None] = {}  # additions whose result is not finite
        self._source_of_loss: _Source | None = None
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
        tensor = _changed_in_place(call)
        content = None
        if tensor is not None and call.name not in _OVERWRITING:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
                content = content_of(tensor)
        self._overwritten = _Overwritten(tensor, content)

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

    def _look_at(self, call: FunctionCall, results: Sequence[Tensor]) -> _Source | None:
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

    def _source(self, call: FunctionCall, results: Sequence[Tensor]) -> _Source | None:
        """Return the source of results that are not finite: this function, or an earlier one; None if neither."""
        operands = self._operands(call)
        if operands is None:
            return None  # a constant
        contents = [content_of(tensor) for tensor in results]
        if any(content.nan for content in contents) and not operands.has_nan:
            return self._source_of_nan(call, operands, results[0])
        if any(content.infinite for content in contents) and not operands.has_nan and not operands.nonfinite_numbers:
            return self._source_of_infinity(call, operands, contents, results[0])
        return operands.earliest

    def _operands(self, call: FunctionCall) -> _Operands | None:
        leaves = tree_leaves((call.args, {key: value for key, value in call.kwargs.items() if key != "out"}))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            return None
        nonfinite_numbers = [leaf for leaf in leaves if isinstance(leaf, float) and not math.isfinite(leaf)]
        numbers = (
            [value for value in call.args if type(value) in (int, float)] if call.name in _QUOTIENTS else nonfinite_numbers
        )
        written, before = self._overwritten.tensor, self._overwritten.content
        read = [tensor for tensor in tensors if tensor is not written or before is not None]
        contents = [before if tensor is written and before is not None else content_of(tensor) for tensor in read]
        sources = [
            source
            for tensor, content in zip(read, contents, strict=True)
            if not content.finite and (source := self._source_in(tensor))
        ]
        earliest = min(sources, key=lambda source: source.order, default=None)
        return _Operands(contents, nonfinite_numbers, numbers, earliest)

    def _source_of_nan(self, call: FunctionCall, operands: _Operands, result: Tensor) -> _Source | None:
        """Return the source of a NaN that is in no operand."""
        earliest = operands.earliest
        if any(map(math.isnan, operands.nonfinite_numbers)):
            return earliest  # a fill with NaN
        masked = _masked(call)
        if masked is not None:
            if earliest is not None and not earliest.may_be_mask:
                masked += f", and hold an infinity that {_maker(earliest.origin)} makes"
            return self._new_source("NaN", call, masked, result)
        if not operands.has_infinity or earliest is None:
            return self._new_source("NaN", call, operands.words, result)
        more = f"; {_plain(call.name)}{_in(self._place(call)[0])} makes NaN of the infinity"
        return replace(earliest, origin=replace(earliest.origin, inputs=earliest.origin.inputs + more), may_be_mask=False)

    def _source_of_infinity(
        self, call: FunctionCall, operands: _Operands, results: Sequence[Content], result: Tensor
    ) -> _Source | None:
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
    ) -> _Source:
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
        return _Source(self._orders, origin, may_be_mask)

    def _source_in(self, tensor: Tensor) -> _Source | None:
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


def _changed_in_place(call: FunctionCall) -> Tensor | None:
    """Return the argument that a function changes in place."""
    name = call.name
    in_place = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__", "__isub__")
    first = call.args[0] if call.args else call.kwargs.get("input")
    changes_first = (in_place or call.kwargs.get("inplace") is True) and isinstance(first, Tensor)
    return first if changes_first else call.kwargs.get("out")


def _forward_note(call: FunctionCall, results: Sequence[Tensor], source: _Source | None) -> str:
    """Describe what the forward pass showed at a function whose backward makes a gradient that is not finite."""
    if source is not None:
        return f"; the forward pass holds {source.origin.value} there, first made by {_maker(source.origin)}"
    if call.name in ROOTS and any((tensor == 0).any() for tensor in results):
        return "; the result of it in the forward pass holds zeros"
    return ""


def _masked(call: FunctionCall) -> str | None:
    """Describe a softmax whose input is masked in whole rows; None for any other call."""
    args, kwargs = call.args, call.kwargs
    if call.name in SOFTMAXES and isinstance(args[0] if args else None, Tensor):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if isinstance(dim, int) and whole_rows_masked(args[0], dim):
            return "scores that are -infinity in whole rows"
    if call.name in ATTENTIONS:
        of_layer = call.name == "multi_head_attention_forward"  # its masks are true where hidden, the others where seen
        for mask in (kwargs.get("key_padding_mask"), kwargs.get("attn_mask", args[3] if len(args) > 3 else None)):
            if isinstance(mask, Tensor):
                hidden = mask == -torch.inf if mask.dtype != torch.bool else mask if of_layer else ~mask
                if bool(hidden.all(-1).any()):
                    return "a mask that leaves whole rows nothing to attend to"
    return None


def _plain(name: str) -> str:
    """Return the name of an operation without underscores: of ``exp_``, ``__rsub__``."""
    return name.strip("_")


def _in(module: str | None) -> str:
    return "" if module is None else f" in {module}"


def _maker(origin: Origin) -> str:
    return f"{origin.function}{_in(origin.module)}"
