"""One call of one unit, cut out of the autograd graph, so that its parameters need not outlive it.

Forward: the unit runs on detached inputs. Backward: its own small graph is differentiated, either the one that the forward
pass kept (resident) or one that is computed again (streamed). Both ways run the same kernels on the same values and cut the
graph at the same places, so they give the same bits.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from propcheck.errors import PropcheckError
from propcheck.execution.rng import seeded
from propcheck.execution.whole_model import ANOTHER, IsolationError, sources
from propcheck.measure.statistics import as_integers
from propcheck.tracing.graph import mark, stands_for, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from propcheck.execution.pass_state import PassState
    from propcheck.execution.plan import Unit


class Call:
    """One call of a unit: what it was given, and how its backward is obtained."""

    def __init__(self, state: PassState, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.state, self.unit, self.forward_function = state, unit, forward
        leaves, self.spec = flattened((args, kwargs))
        self.leaves: list[Any] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.traces = [trace_of(leaf) for leaf in leaves]
        self.given = leaves
        self.needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        # A tensor that was given twice is one tensor to the unit too.
        self.first = [next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves]
        self.versions = [_version(leaf) for leaf in leaves]
        self.first_addition = self.last_addition = state.tracer.additions_met
        self.number = state.next_call()
        self.in_memory = False
        self.graph: tuple[list[Tensor | None], list[Tensor]] | None = None  # inputs and outputs of the kept graph
        device = next((leaf.device.type for leaf in self.leaves if isinstance(leaf, Tensor)), "cpu")
        self.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        self.sums: list[Tensor] = []  # of the outputs' bits, where they will be computed again
        self.shapes: list[torch.Size] = []

    def run(self, given: list[Any]) -> Any:
        """Forward: return the output.

        Parameters
        ----------
        given
            The leaves of the arguments, attached to the outer graph. What the unit returns as it came is returned as it came.
        """
        state, unit = self.state, self.unit
        state.progress("forward", unit)
        kept = unit.path in state.resident
        before = state.occupied()
        state.weights.bring(unit)
        listeners = state.listeners.forward if kept else state.listeners.forward_without_graph
        with state.tracer.segment(unit.block, listeners):
            inputs, passed, result = self._compute()
        self.last_addition = state.tracer.additions_met
        self.in_memory = state.keeps(unit, before)
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - what happens here is not the model's doing
            return self._cut(given, inputs, passed, result)

    def _cut(self, given: list[Any], inputs: list[Tensor | None], passed: list[Any], result: Any) -> Any:
        """Return the unit's output as seen from outside: its tensors cut from the unit's graph, and put into the outer one."""
        state, unit = self.state, self.unit
        kept = self.in_memory
        found, spec = flattened(result)
        as_it_came = {id(one): given[index] for index, one in enumerate(passed) if self._is_as_it_came(index, one)}
        outputs = _tensors(leaf for leaf in found if id(leaf) not in as_it_came)
        self._note_changes(given, passed, outputs)
        self._check_sources(inputs, outputs)
        if kept or (state.only_lookups and self.last_addition == self.first_addition):
            # A look-up needs no weight in its backward: its graph is as good as free.
            self.graph = inputs, outputs
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable and self.graph is None:
            self.sums = [_bit_sum(output) for output in outputs]
            self.shapes = [output.shape for output in outputs]
        cut = [output.detach() for output in outputs]
        if not kept:
            state.weights.drop(unit)
        outer = as_it_came | {id(output): one for output, one in zip(outputs, cut, strict=True)}
        for output, one in zip(outputs, cut, strict=True):
            mark(one, trace_of(output))
        if differentiable:
            state.expect(unit)
            anchor = torch.zeros((), requires_grad=True)
            starts = [outer[id(output)] for output in differentiable]
            attached = _Segment.apply(self, starts, anchor, *(leaf for leaf in given if isinstance(leaf, Tensor)))
            for output, one in zip(differentiable, attached, strict=True):
                mark(one, trace_of(output))
                outer[id(output)] = one
        return tree_unflatten([outer[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in found], spec)

    def _compute(self) -> tuple[list[Tensor | None], list[Any], Any]:
        """Run the unit on its inputs with a graph; return the graph's inputs, the leaves that it was passed, and its output."""
        inputs: list[Tensor | None] = []
        passed: list[Any] = []
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            for index, leaf in enumerate(self.leaves):
                if self.first[index] < index and isinstance(leaf, Tensor):
                    inputs.append(None)
                    passed.append(passed[self.first[index]])
                elif self.needs_grad[index]:
                    start = leaf.detach().requires_grad_()
                    self.state.mark_start(start, self.unit)
                    inputs.append(start)
                    passed.append(start.clone())  # code may change its input in place
                    mark(passed[-1], self.traces[index])
                    stands_for(passed[-1], self.given[index])
                else:
                    inputs.append(None)
                    passed.append(leaf)
                    if self.traces[index] is not None:
                        mark(leaf, self.traces[index])
            args, kwargs = tree_unflatten(passed, self.spec)
            stack.enter_context(self.state.runs(self.unit))
            stack.enter_context(seeded("forward", self.state.seed, self.number))
            result = self.forward_function(*args, **kwargs)
            after, spec = flattened((args, kwargs))
        if spec != self.spec or any(one is not other for one, other in zip(after, passed, strict=True)):
            self.state.refuse(self.unit.path, "changes a list or dict that it is given, which is not what its caller has")
        return inputs, passed, result

    def _is_as_it_came(self, index: int, passed: Any) -> bool:
        """Whether an argument is a tensor that the unit did not change, or that is the caller's own."""
        return isinstance(passed, Tensor) and not (self.needs_grad[index] and _version(passed))

    def _note_changes(self, given: list[Any], passed: list[Any], outputs: list[Tensor]) -> None:
        """Have the tensors watched that plain code would have changed, or would have let share memory with an output."""
        guard, path = self.state.guard, self.unit.path
        memories = [_memory(leaf) for leaf in self.leaves]
        of_outputs = {_memory(output): output for output in outputs}
        for index, (one, copy) in enumerate(zip(given, passed, strict=True)):
            if not self.needs_grad[index] and isinstance(copy, Tensor) and copy.requires_grad:
                self.state.refuse(path, "gives an input a gradient by changing it in place")
            if not self.needs_grad[index] or self.first[index] < index:
                continue
            if _version(copy):
                if memories.count(memories[index]) > self.first.count(index):
                    self.state.refuse(path, "changes one of its inputs in place, and another input shares its memory")
                guard.outdated(one, path)
            elif _memory(copy) in of_outputs:
                guard.shared(one, path)
                guard.shared(of_outputs[_memory(copy)], path)

    def differentiate(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Backward: return the gradient of each input tensor, and leave those of the parameters with the ledger."""
        state, unit = self.state, self.unit
        state.progress("backward", unit)
        if self.graph is None:
            self.graph = self._compute_again()
        inputs, outputs = self.graph
        self.graph = None
        differentiable = [output for output in outputs if output.requires_grad]
        pairs = [(output, grad) for output, grad in zip(differentiable, gradients, strict=True) if grad is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        state.settle(unit)
        if self.in_memory:
            state.weights.drop(unit)
        by_leaf = [None if start is None else start.grad for start in inputs]
        return [gradient for leaf, gradient in zip(self.leaves, by_leaf, strict=True) if isinstance(leaf, Tensor)]

    def _compute_again(self) -> tuple[list[Tensor | None], list[Tensor]]:
        state, unit = self.state, self.unit
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if _version(leaf) != version:
                state.refuse(unit.path, "gets an input that is changed in place after the call")
        state.weights.bring(unit)
        self.in_memory = True
        mode = state.tracer.recomputation(unit.block, self.first_addition, state.listeners.recomputation)
        try:
            with mode, state.outside_tensors:
                inputs, passed, result = self._compute()
        except (IsolationError, PropcheckError):
            raise
        except Exception as error:  # noqa: BLE001 - the first time it went well
            what = str(error).partition("\n")[0]
            state.refuse(unit.path, f"fails when it is computed again for the backward pass ({type(error).__name__}: {what})")
        as_it_came = {id(one) for index, one in enumerate(passed) if self._is_as_it_came(index, one)}
        outputs = _tensors(leaf for leaf in flattened(result)[0] if id(leaf) not in as_it_came)
        if mode.additions_met != self.last_addition or [output.shape for output in outputs] != self.shapes:
            state.refuse(unit.path, f"computed again {ANOTHER}")
        self._check_sources(inputs, outputs)
        again = [_bit_sum(output) for output in outputs]
        state.changed += [(unit.path, new != old) for new, old in zip(again, self.sums, strict=True)]
        return inputs, outputs

    def _check_sources(self, inputs: list[Tensor | None], outputs: list[Tensor]) -> None:
        """Refuse a graph that leads beyond the call: to the output of another unit, or to what is within another call.

        What comes from another unit by a shared dict, a cache or an attribute would get no gradient across the cut, or one of
        the wrong pass, and nobody would notice.
        """
        known = {id(start) for start in inputs}
        for source in sources(outputs, is_segment):
            if id(source) not in known and (is_segment(source) or self.state.is_foreign(source, self.unit)):
                self.state.refuse(
                    self.unit.path,
                    "uses a tensor that has a gradient and is neither one of its arguments nor a parameter (a shared dict, a "
                    "cache, an attribute of another module)",
                )


class _Segment(torch.autograd.Function):
    """Puts a call into the outer graph. The anchor makes the outputs differentiable when only parameters are."""

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: list[Tensor], _anchor: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.path = call.unit.path, call.state
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        path, state = ctx.path
        if call is None or not state.in_backward or torch.is_grad_enabled():
            state.refuse(path, "is differentiated by the model itself (torch.autograd.grad)")
        return (None, None, None, *call.differentiate(gradients))


def is_segment(node: Any) -> bool:
    """Whether a node of an autograd graph stands for the call of a unit."""
    return isinstance(node, _Segment._backward_cls)  # noqa: SLF001


def isolated_forward(state: PassState, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``unit.module.forward``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if state.in_backward:
            state.refuse(unit.path, "is called in the backward pass (a custom autograd function that computes again)")
        if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
            state.refuse(unit.path, "is called within a transform of torch.func")
        if not torch.is_grad_enabled():
            return _without_gradient(state, unit, forward, args, kwargs)
        return Call(state, unit, forward, args, kwargs).run(flattened((args, kwargs))[0])

    return call


def _without_gradient(state: PassState, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call under ``torch.no_grad``: there is no graph to cut."""
    state.progress("forward", unit)
    with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be observed
        state.weights.bring(unit)
        with (
            state.tracer.segment(unit.block, state.listeners.forward_without_graph),
            state.runs(unit),
            seeded("forward", state.seed, state.next_call()),
        ):
            result = forward(*args, **kwargs)
        if unit.path not in state.resident:
            state.weights.drop(unit)
    return result


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of ``tree`` and its structure."""
    return tree_flatten(tree, is_leaf=lambda one: isinstance(one, torch.Size))  # which would come back as a tuple


def _tensors(leaves: Iterator[Any]) -> list[Tensor]:
    """Return the tensors among ``leaves``, each once."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def _version(value: Any) -> int:
    """Return how often a tensor was changed in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0  # noqa: SLF001


def _memory(value: Any) -> int | None:
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return value.untyped_storage()._cdata if strided else None  # noqa: SLF001


def _bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers: equal for equal values, NaN included."""
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.resolve_neg().contiguous()
    if flat.is_floating_point():
        flat = as_integers(flat)
    return flat.sum(dtype=torch.int64)
