"""One call of one unit, cut out of the autograd graph, so that its parameters need not outlive it.

Forward: the unit runs on detached inputs. Backward: its own small graph is differentiated, either the one that the forward
pass kept (resident) or one that is computed again (streamed). Both ways run the same kernels on the same values and cut the
graph at the same places, so they give the same bits.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from propcheck.build.random import generator_for
from propcheck.errors import PropcheckError
from propcheck.observe.statistics import as_integers
from propcheck.observe.trace import mark, trace_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from propcheck.build.record import Entry
    from propcheck.engine.units import Unit
    from propcheck.engine.weights import Weights
    from propcheck.observe.follow import Follower


@dataclass(slots=True)
class Conductor:
    """What the calls of one pass share."""

    follower: Follower
    weights: Weights
    seed: int
    resident: frozenset[str]
    progress: Callable[[str, Unit], None]
    entries: dict[str, Entry]
    calls: int = 0
    running: Unit | None = None
    only_lookups: bool = True  # of the unit that runs, so far
    outside: dict[str, Entry] = field(default_factory=dict)  # used while their unit was not running
    pending: dict[str, int] = field(default_factory=dict)  # by parameter: calls whose backward is still to come
    changed: list[tuple[str, Tensor]] = field(default_factory=list)  # units, and whether they gave another output again

    def use(self, name: str, function: str) -> None:
        """Before a parameter is used: one that is not of the unit that runs stays in memory from now on."""
        self.only_lookups &= function == "embedding"
        if name in self.outside or (self.running is not None and name in self.running.names):
            return
        self.outside[name] = self.entries[name]
        self.weights.bring_permanently([self.entries[name]])

    def check(self) -> None:
        """After the backward pass: refuse a run in which a unit did not compute again what it had computed before."""
        for path, flag in self.changed:
            if flag:
                raise PropcheckError(
                    f"{path}: computed again for the backward pass it gave another output, so it reads something that changed "
                    "(a cache, a counter, a random source of its own); run it resident (a larger --memory)"
                )

    def settle(self, unit: Unit) -> None:
        """After the backward of a call: measure the parameters that no other call will add to."""
        done = {}
        for entry in unit.entries:
            self.pending[entry.name] -= 1
            if not self.pending[entry.name] and entry.name not in self.outside:
                done[entry.name] = self.weights.tensors[entry.name]
        self.follower.ledger.settle(done)  # type: ignore[arg-type]


class Call:
    """One call of a unit: what it was given, and how its backward is obtained."""

    def __init__(self, conductor: Conductor, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.conductor, self.unit, self.forward_function = conductor, unit, forward
        leaves, self.spec = tree_flatten((args, kwargs))
        self.leaves: list[Any] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.traces = [trace_of(leaf) for leaf in leaves]
        self.inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.needs_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self.versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]  # noqa: SLF001
        self.first_site = conductor.follower.next_site
        self.last_site = self.first_site
        self.number = conductor.calls
        conductor.calls += 1
        for entry in unit.entries:
            conductor.pending[entry.name] = conductor.pending.get(entry.name, 0) + 1
        self.in_memory = False
        self.graph: tuple[list[Tensor | None], list[Tensor]] | None = None  # inputs and outputs of the kept graph
        device = next((leaf.device.type for leaf in self.inputs), "cpu")
        self.autocast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
        self.sums: list[Tensor] = []  # of the outputs' bits, where they will be computed again
        self.output_spec: Any = None
        self.output_leaves: list[Any] = []

    def run(self) -> list[Tensor]:
        """Forward: return the output's tensors, detached."""
        conductor, unit = self.conductor, self.unit
        conductor.progress("forward", unit)
        conductor.weights.bring(unit)
        kept = unit.path in conductor.resident
        follower = conductor.follower
        with follower.segment(unit.block, None, measure=True, differentiate=kept):
            graph = self._compute()
        self.last_site = follower.next_site
        self._check_sources(*graph)
        # A look-up needs no weight in its backward: its graph is as good as free.
        if kept or (conductor.only_lookups and self.last_site == self.first_site):
            self.graph = graph
        self.in_memory = kept
        if not kept:
            conductor.weights.drop(unit)
        if self.graph is None:
            self.sums = [_bit_sum(output) for output in graph[1]]
        return [output.detach() for output in graph[1]]

    def _compute(self) -> tuple[list[Tensor | None], list[Tensor]]:
        """Run the unit on its inputs with a graph; return the graph's inputs and outputs."""
        inputs: list[Tensor | None] = []
        leaves: list[Any] = []
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.autocast[0], dtype=self.autocast[1]))
            stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
            torch.manual_seed(generator_for("forward", self.conductor.seed, self.number).initial_seed())
            for leaf, trace, needs_grad in zip(self.leaves, self.traces, self.needs_grad, strict=True):
                if not needs_grad:
                    inputs.append(None)
                    leaves.append(leaf)
                    if trace is not None:
                        mark(leaf, trace)
                    continue
                start = leaf.detach().requires_grad_()
                inputs.append(start)
                own = start.clone()  # code may change its input in place
                mark(own, trace)
                leaves.append(own)
            args, kwargs = tree_unflatten(leaves, self.spec)
            stack.callback(setattr, self.conductor, "running", self.conductor.running)
            self.conductor.running, self.conductor.only_lookups = self.unit, True
            result = self.forward_function(*args, **kwargs)
        self.output_leaves, self.output_spec = tree_flatten(result)
        return inputs, [leaf for leaf in self.output_leaves if isinstance(leaf, Tensor)]

    def differentiate(self, gradients: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Backward: return the gradient of each input tensor, and leave those of the parameters with the ledger."""
        conductor, unit = self.conductor, self.unit
        conductor.progress("backward", unit)
        if self.graph is None:
            self._check_inputs()
            conductor.weights.bring(unit)
            self.in_memory = True
            follower = conductor.follower
            with follower, follower.segment(unit.block, self.first_site, measure=False, differentiate=True):
                self.graph = self._compute()
                if follower.next_site != self.last_site:
                    raise PropcheckError(
                        f"{unit.path}: computed again it made {follower.next_site - self.first_site} residual additions, "
                        f"not {self.last_site - self.first_site}; run it resident (--memory)"
                    )
            again = [_bit_sum(output) for output in self.graph[1]]
            changed = [new != old for new, old in zip(again, self.sums, strict=True)]
            conductor.changed += [(unit.path, flag) for flag in changed]
        inputs, outputs = self.graph
        self.graph = None
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        conductor.settle(unit)
        if self.in_memory:
            conductor.weights.drop(unit)
        by_leaf = [None if start is None else start.grad for start in inputs]
        return [gradient for leaf, gradient in zip(self.leaves, by_leaf, strict=True) if isinstance(leaf, Tensor)]

    def _check_sources(self, inputs: list[Tensor | None], outputs: list[Tensor]) -> None:
        """Refuse a unit whose graph begins elsewhere than at its arguments and the model's parameters.

        What comes from another unit by a shared dict, a cache or an attribute would get no gradient across the cut, or one of
        the wrong pass, and nobody would notice.
        """
        known = {id(start) for start in inputs} | {id(tensor) for tensor in self.conductor.weights.tensors.values()}
        pending = [output.grad_fn for output in outputs]
        seen: set[Any] = set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            foreign = isinstance(node, _Segment._backward_cls)  # noqa: SLF001 - the output of another unit
            leaf = getattr(node, "variable", None)
            if foreign or (leaf is not None and id(leaf) not in known):
                raise PropcheckError(
                    f"{self.unit.path}: it uses a tensor that has a gradient and is neither one of its arguments nor a "
                    "parameter (a shared dict, a cache, an attribute of another module); pass it as an argument"
                )
            pending += [following for following, _ in node.next_functions]

    def _check_inputs(self) -> None:
        for leaf, version in zip(self.leaves, self.versions, strict=True):
            if isinstance(leaf, Tensor) and leaf._version != version:  # noqa: SLF001
                raise PropcheckError(
                    f"{self.unit.path}: one of its inputs was changed in place after the call, so it cannot be computed "
                    "again; run it resident (a larger --memory)"
                )


class _Segment(torch.autograd.Function):
    """Puts a call into the outer graph. The anchor makes the outputs differentiable when only parameters are."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: Tensor, *_inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run()
        ctx.call = call
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        return (None, None, *call.differentiate(gradients))


def segmented(conductor: Conductor, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for ``unit.module.forward``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        one = Call(conductor, unit, forward, args, kwargs)
        anchor = torch.zeros((), requires_grad=True)
        outputs = iter(_Segment.apply(one, anchor, *one.inputs))
        leaves = []
        for leaf in one.output_leaves:
            if isinstance(leaf, Tensor):
                output = next(outputs)
                mark(output, trace_of(leaf))
                leaves.append(output)
            else:
                leaves.append(leaf)
        one.output_leaves = []
        one.inputs = []
        return tree_unflatten(leaves, one.output_spec)

    return call


def _bit_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as integers: equal for equal values, NaN included."""
    flat = tensor.detach().contiguous()
    if flat.is_floating_point():
        flat = as_integers(flat)
    return flat.sum(dtype=None if flat.is_complex() else torch.int64)
