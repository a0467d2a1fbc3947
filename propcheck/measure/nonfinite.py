"""Find the operation that first makes a NaN or an infinity out of finite numbers, forward and backward.

``Watcher`` is a ``Follower`` that looks at the result of every function, for the second pass of a model whose first one was
not finite. Whatever is not finite is traced to the function that made it so, through views, copies and the engine's cuts by
the memory that it lies in; what was not finite from the outset (-inf in a mask, a parameter) has no such origin. Every look
waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from propcheck.formatting import number
from propcheck.measure.nonfinite_gradients import GradientWatcher, Step
from propcheck.measure.nonfinite_values import Content, content_of, is_finite, spoilt_tokens, whole_rows_masked
from propcheck.records import Origin
from propcheck.tracing.graph import trace_of
from propcheck.tracing.op_names import ATTENTIONS, EXPONENTIALS, ROOTS, SOFTMAXES
from propcheck.tracing.propagation import tensors_in
from propcheck.tracing.tracer import Follower

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from propcheck.measure.gradients import Ledger
    from propcheck.tracing.graph import Addition

# Memory that nothing was written to yet holds anything; attributes share the memory of their tensor.
_NOT_LOOKED_AT = {"empty_like", "new_empty", "empty_strided", "new_empty_strided", "__get__", "__set__"}
# What writes over all of its first argument, whatever that held.
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_"}
# Zeros become -infinity in the logarithm of a mask of zeros and ones, and that is what is meant.
_LOGARITHMS = {"log", "log_", "log2", "log10"}
# Whose second operand may be a plain number that matters.
_QUOTIENTS = {"div", "div_", "divide", "true_divide", "pow", "pow_"}


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What is not finite in a tensor: when it was made, and by what."""

    order: int
    origin: Origin
    mask: bool = False  # it may be meant, as a mask


class Watcher(Follower):
    """Follows a pass like ``Follower``, and finds where it ceases to be finite.

    Parameters
    ----------
    names, ledger
        As of ``Follower``.
    seed
        Of the pass.
    shape
        Sequences, and tokens of each.
    is_cut
        Whether a node of the autograd graph stands for a part with a graph of its own.
    """

    def __init__(
        self, names: dict[int, str], ledger: Ledger, *, seed: int, shape: tuple[int, int], is_cut: Callable[[Any], bool]
    ) -> None:
        super().__init__(names, ledger)
        self._seed, self._shape = seed, shape
        self._gradients = GradientWatcher(seed, shape, is_cut)
        self._paths: dict[int, str] = {}  # of the blocks, by number
        self._made: dict[int, tuple[StorageWeakRef, _Made]] = {}  # by address, which is no other's while the reference exists
        self._orders = 0
        self._sums: list[tuple[Addition, _Made | None]] = []  # additions whose result is not finite
        self._of_loss: _Made | None = None
        self._loss_is_finite = True

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The first operation of each direction, once the pass is over.

        Forward: of what made the first sum of a residual stream, or else the loss, not finite. Backward: only where the loss
        is finite. None where what is not finite came from outside, or from code that cannot be followed.
        """
        found = []
        sums = [made for addition, made in self._sums if not addition.inner and _holds_nonfinite(addition)]
        forward = sums[0] if sums else self._of_loss
        if forward is not None:
            found.append(forward.origin)
        if self._gradients.origin is not None and self._loss_is_finite:
            found.append(self._gradients.origin)
        return tuple(found)

    def end(self, loss: Tensor) -> None:
        """Say what the pass led to."""
        super().end(loss)
        with torch._C.DisableTorchFunction():  # noqa: SLF001
            self._loss_is_finite = is_finite(loss)
            self._of_loss = None if self._loss_is_finite else self._known(loss)
            self._gradients.watch(loss, Step("loss", None, None))

    def watch(self, model: nn.Module, blocks: Mapping[str, int] = MappingProxyType({})) -> list[Any]:
        """Register hooks on every module, as ``Follower`` does."""
        self._paths = {number: path for path, number in blocks.items()}
        return super().watch(model, blocks)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        if name in _NOT_LOOKED_AT or torch._C._functorch.maybe_current_level() is not None:  # noqa: SLF001
            return super().__torch_function__(func, types, args, kwargs)
        overwritten = _overwritten(name, args, kwargs)
        before = None
        if overwritten is not None and name not in _OVERWRITING:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # noqa: SLF001
                before = content_of(overwritten)
        result = super().__torch_function__(func, types, args, kwargs)
        results = tensors_in((overwritten if result is None else result,))
        if results:
            with torch._C.DisableTorchFunction():  # noqa: SLF001
                self._look_at(name, (args, kwargs), results, (overwritten, before))
        return result

    # ------------------------------------------------------------------ forward

    def _look_at(
        self, name: str, given: tuple[Any, Any], results: Sequence[Tensor], overwritten: tuple[Tensor | None, Content | None]
    ) -> None:
        with torch.no_grad():
            bad = [one for one in results if not is_finite(one)]
            made = self._source(name, given, bad, overwritten) if bad else None
            if made is not None:
                for one in bad:
                    reference = StorageWeakRef(one.untyped_storage())
                    self._made[reference.cdata] = reference, made
            for one in bad if self.measure else ():
                trace = trace_of(one)
                addition = None if trace is None or trace.node is None else trace.node.addition
                if addition is not None and all(addition is not other for other, _ in self._sums):
                    self._sums.append((addition, made))
            more = ""
            if made is not None:
                more = f"; the forward pass holds {made.origin.value} there, first made by {_by(made.origin)}"
            elif name in ROOTS and any((one == 0).any() for one in results):
                more = "; the result of it in the forward pass holds zeros"
        if torch.is_grad_enabled():
            step = Step(_plain(name), *self._where(), more)
            for one in results:
                self._gradients.watch(one, step)

    def _source(
        self,
        name: str,
        given: tuple[Any, Any],
        bad: Sequence[Tensor],
        overwritten: tuple[Tensor | None, Content | None],
    ) -> _Made | None:
        """Tell what made the results ``bad`` of a function not finite: this function, or an earlier one; None: neither."""
        args, kwargs = given
        leaves = tree_leaves((args, {key: value for key, value in kwargs.items() if key != "out"}))
        operands = [one for one in leaves if isinstance(one, Tensor)]
        if not operands:
            return None  # a constant
        numbers = [one for one in leaves if isinstance(one, float) and not math.isfinite(one)]
        plain = [one for one in args if type(one) in (int, float)] if name in _QUOTIENTS else numbers
        written, before = overwritten
        read = [one for one in operands if one is not written or before is not None]
        inputs = [before if one is written and before is not None else content_of(one) for one in read]
        known = [made for one, content in zip(read, inputs, strict=True) if not content.finite and (made := self._known(one))]
        earlier = min(known, key=lambda made: made.order, default=None)
        outputs = [content_of(one) for one in bad]
        nan, infinite = (any(getattr(one, kind) for one in inputs) for kind in ("nan", "infinite"))
        if any(one.nan for one in outputs) and not nan:
            if any(map(math.isnan, numbers)):
                return earlier  # a fill with NaN
            masked = _masked(name, args, kwargs)
            if masked is not None:
                if earlier is not None and not earlier.mask:
                    masked += f", and hold an infinity that {_by(earlier.origin)} makes"
                return self._made_by("NaN", name, masked, bad[0])
            if not infinite or earlier is None:
                return self._made_by("NaN", name, _words(inputs, plain), bad[0])
            what = f"; {_plain(name)}{_in(self._where()[0])} makes NaN of the infinity"
            return replace(earlier, origin=replace(earlier.origin, inputs=earlier.origin.inputs + what), mask=False)
        overflow = not infinite or (
            earlier is None
            and name in EXPONENTIALS
            and any(one.plus for one in outputs)
            and not any(one.plus for one in inputs)
        )
        if any(one.infinite for one in outputs) and overflow and not nan and not numbers:
            mask = name in _LOGARITHMS and not any(one.plus for one in outputs)
            return self._made_by("infinity", name, _words(inputs, plain), bad[0], mask=mask)
        return earlier

    def _made_by(
        self, value: Literal["NaN", "infinity"], name: str, words: str, result: Tensor, *, mask: bool = False
    ) -> _Made:
        module, block = self._where()
        spoilt = spoilt_tokens(result, self._shape, value, rows=name in SOFTMAXES)
        self._orders += 1
        origin = Origin(
            self._seed, "forward", value, _plain(name), module, block, words, spoilt.tokens, spoilt.affected, spoilt.positions
        )
        return _Made(self._orders, origin, mask)

    def _known(self, tensor: Tensor) -> _Made | None:
        """Return what made a tensor not finite."""
        if tensor.layout != torch.strided:
            return None
        found = self._made.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
        return None if found is None else found[1]

    def _where(self) -> tuple[str | None, int | None]:
        block = self._block()
        # A block that is computed again is not entered by way of its module.
        return self._modules[-1][0] if self._modules else self._paths.get(-1 if block is None else block), block


def _holds_nonfinite(addition: Addition) -> bool:
    """Whether an addition was measured to be not finite, padding left out."""
    return any(float(one.statistics.nonfinite) > 0 for one in addition.updates)


def _overwritten(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the argument that a function changes in place."""
    in_place = (name.endswith("_") and not name.startswith("__")) or name in ("__setitem__", "__iadd__", "__imul__", "__isub__")
    first = args[0] if args else kwargs.get("input")
    return first if (in_place or kwargs.get("inplace") is True) and isinstance(first, Tensor) else kwargs.get("out")


def _masked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Say that a softmax was given nothing to choose from, in words; None if that is not so."""
    if name in SOFTMAXES and isinstance(args[0] if args else None, Tensor):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if isinstance(dim, int) and whole_rows_masked(args[0], dim):
            return "scores that are -infinity in whole rows"
    if name in ATTENTIONS:
        of_layer = name == "multi_head_attention_forward"  # whose masks say what is hidden, the others what is seen
        for mask in (kwargs.get("key_padding_mask"), kwargs.get("attn_mask", args[3] if len(args) > 3 else None)):
            if isinstance(mask, Tensor):
                hidden = mask == -torch.inf if mask.dtype != torch.bool else mask if of_layer else ~mask
                if bool(hidden.all(-1).any()):
                    return "a mask that leaves whole rows nothing to attend to"
    return None


def _words(inputs: Sequence[Content], numbers: Sequence[float]) -> str:
    # One text a kind of operand: the experts of a stack say the same many times.
    parts = [*dict.fromkeys(one.words for one in inputs if one.words), *map(number, numbers)]
    return ", and ".join(parts[:3]) or "integers"


def _plain(name: str) -> str:
    """Return the name of an operation without what Python and torch put around it: ``exp_``, ``__rsub__``."""
    return name.strip("_")


def _in(module: str | None) -> str:
    return "" if module is None else f" in {module}"


def _by(origin: Origin) -> str:
    return f"{origin.function}{_in(origin.module)}"
