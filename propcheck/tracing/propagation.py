"""How what is known of tensors travels through torch's functions: the result's trace from the operands' traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from propcheck.measure.attention import attention_of
from propcheck.measure.norms import Norms
from propcheck.measure.rotary_precision import Angles
from propcheck.measure.statistics import is_narrow
from propcheck.tracing.graph import (
    Node,
    Trace,
    carried_since_addition,
    is_drawn,
    is_stream,
    is_transformed,
    mark,
    mark_drawn,
    signal_of,
    trace_of,
)
from propcheck.tracing.op_names import (
    ADDITIONS,
    AS,
    ATTENTIONS,
    CASTS,
    COLLECTIONS,
    CONVOLUTIONS,
    COPIES,
    DIFFERENCES,
    DRAWS,
    EXPONENTIALS,
    GATES,
    NORMS,
    POOLS,
    PRODUCTS,
    REDUCTIONS,
    ROOTS,
    ROUTERS,
    SCALINGS,
    SCANS,
    SEQUENTIAL,
    SOFTMAXES,
    SUMS,
    TRANSFORMS,
    UNBIASED,
    VIEWS,
)
from propcheck.tracing.stream_mixing import mixed_streams, spread_by_einsum

if TYPE_CHECKING:
    from collections.abc import Mapping

_DIVISIONS = {"div", "divide", "true_divide"}


class Propagation:
    """Marks the results of functions, and keeps count of what was met on the way.

    Parameters
    ----------
    names
        The name of each parameter and buffer, by ``id``.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.roles: dict[str, str] = {}
        self.products = 0
        self.module: str | None = None  # the innermost one that runs
        self.norms = Norms(names)
        self.coarse: dict[str, torch.dtype] = {}  # parameters and buffers of half precision that were met
        self.angles = Angles(self.coarse, names)
        self.step_biases: set[str] = set()  # vectors that were added before a softplus
        self.steps = 0
        self._names = names

    def step(self, **what: Any) -> Trace:
        """Return a new step of a copy of a known node."""
        self.steps += 1
        return Trace("signal", self.steps, **what)

    def begin(
        self,
        kind: Literal["root", "product", "sum", "merge"],
        *,
        carries: tuple[Node, ...] = (),
        factors: tuple[Trace, ...] = (),
        **what: Any,
    ) -> Trace:
        """Return the first step of a new node."""
        self.steps += 1
        return Trace("signal", self.steps, Node(self.steps, kind, carries, factors=factors), **what)

    def looked_up(self, result: Tensor, weight: Any) -> None:
        """Mark the result of an embedding."""
        name = self._names.get(id(weight))
        if name is not None:
            self.roles.setdefault(name, "embedding")
        mark(result, self.begin("root", parameters=frozenset({name} if name else ())))

    def follow(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Mark what the function ``name`` returned, or wrote into its first argument."""
        if name == "__setitem__":
            result = args[0]
        if not isinstance(result, Tensor | tuple | list) or isinstance(result, torch.Size):
            return
        operands = tensors_in(args[:1] if name in AS else (*args, *kwargs.values()))
        if (name in DRAWS or any(map(is_drawn, operands))) and not any(map(trace_of, operands)):
            for value in tensors_in((result,)):
                mark_drawn(value)
        # What each operand brings of parameters: itself, or those that it was computed from.
        brought: list[tuple[Tensor, frozenset[str]]] = []
        signals: list[tuple[Tensor, Trace]] = []
        factors: list[Trace] = []
        unknown = False  # an operand that was made of nothing that is followed: positions, noise, a time
        for operand in operands:
            trace = trace_of(operand)
            parameter = self._names.get(id(operand))
            if parameter is not None:
                brought.append((operand, frozenset({parameter})))
                if is_narrow(operand.dtype):
                    self.coarse[parameter] = operand.dtype
            elif trace is None:
                unknown = True
            elif trace.kind != "signal":
                brought.append((operand, trace.parameters))
                if trace.kind == "factor":
                    factors.append(trace)
                elif _is_activation(name, operand, args):
                    # A learned query: computed from parameters alone, and about to be treated like any activation.
                    mark(operand, self.begin("root", parameters=trace.parameters))
                    signals.append((operand, signal_of(operand)))  # type: ignore[arg-type]
                    brought.pop()
            else:
                signals.append((operand, trace))
        weights = frozenset().union(*(names for _, names in brought))
        if signals:
            trace = self._of_signals(name, args, kwargs, signals, factors, brought, weights, result)
        elif factors:
            trace = self._of_factors(name, args, factors, brought, weights)
        elif weights and unknown and name in PRODUCTS and any(isinstance(one, nn.Parameter) for one, _ in brought):
            begun = self.begin("root")  # zeros to start from, noise, positions
            made = [one for one in operands if trace_of(one) is None and id(one) not in self._names]
            for one in made:
                mark(one, begun)
            trace = self._product(name, [(one, begun) for one in made[:1]], weights, parents=(begun,))
        elif weights:
            trace = Trace("weight", 0, parameters=weights)
        else:
            return
        if name in ATTENTIONS | SOFTMAXES and trace.kind == "signal" and not any(map(is_transformed, operands)):
            trace = replace(trace, attention=attention_of(name, args, kwargs, result, self.norms.masks))
        if any(is_drawn(one) for one in operands):
            trace = replace(trace, features=trace.features | {"drawn"})
        for value in tensors_in((result,)):
            channels = _channels(name, [tensor for tensor, _ in signals], value)
            mark(value, trace if channels == trace.channels else replace(trace, channels=channels))

    def _of_factors(
        self,
        name: str,
        args: tuple[Any, ...],
        factors: list[Trace],
        brought: list[tuple[Tensor, frozenset[str]]],
        weights: frozenset[str],
    ) -> Trace:
        """Return what is known of a factor on its way: eps added, a root taken, a gain multiplied in."""
        first = factors[0]
        rooted = first.rooted or name in ROOTS or (name == "pow" and _is_root(args[-1]))
        added = next((one for one in args if isinstance(one, int | float)), None) if name in ADDITIONS else None
        # What a gain is divided by is no gain.
        apart = args[-1] if name.strip("_") in _DIVISIONS else None
        gains = [tensor for tensor, _ in brought if name in SCALINGS and tensor is not apart and not _is_factor(tensor)]
        return self._factor(
            tuple(factors),
            weights,
            rooted=rooted,
            reduced=first.reduced,
            of=first.of,
            eps=first.eps if added is None or first.rooted else float(added),
            gain=gains[0] if gains else first.gain,
        )

    def unknown(self, result: Tensor, read: list[Tensor], parameters: list[nn.Parameter]) -> Trace | None:
        """Mark what a module computed by a way that cannot be followed (a kernel of its own) as a product of all it has."""
        signals = [(tensor, trace) for tensor in read if (trace := signal_of(tensor)) is not None]
        if not signals:
            return None
        own = frozenset(name for parameter in parameters if (name := self._names.get(id(parameter))) is not None)
        mark(result, self._product("", signals[:1], own, parents=tuple(trace for _, trace in signals)))
        return trace_of(result)

    def _of_signals(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        signals: list[tuple[Tensor, Trace]],
        factors: list[Trace],
        brought: list[tuple[Tensor, frozenset[str]]],
        weights: frozenset[str],
        result: Any,
    ) -> Trace:
        parents = (*(trace for _, trace in signals), *factors)
        for _, one in signals:  # what is used after an addition that seemed to enclose it lives on beside that
            if one.node is not None and one.node.addition is not None:
                one.node.addition.touched = True
        # Indices and masks say where, not what.
        signals = [one for one in signals if one[0].is_floating_point()] or signals
        normalises = name in NORMS or (name in SCALINGS and any(factor.rooted for factor in factors))
        ungained = any(trace.ungained for _, trace in signals)
        for tensor, names in brought:
            for parameter in names:
                self.roles.setdefault(parameter, _role(name, kwargs, tensor, normalises=normalises, ungained=ungained))
        spread = spread_by_einsum(name, args, signals)
        if spread:
            signals = spread
        elif name in PRODUCTS:
            streams = mixed_streams(name, args, signals)
            if not streams:
                kernel = kwargs.get("weight", args[1] if len(args) > 1 else None)
                pointwise = name in CONVOLUTIONS and isinstance(kernel, Tensor) and kernel.shape[2:].numel() == 1
                return self._product(name, signals, weights, parents=parents, pointwise=pointwise)
            return self._merged("stack", args, streams, parents, weights, frozenset())
        stepped = name in SCALINGS and len(signals) > 1 and any(one.step_size for _, one in signals)
        if name in SCALINGS and len(signals) > 1:
            # A gate or a weight for each token scales what it is multiplied with.
            signals = [one for one in signals if one[0].dim() and one[0].shape[-1] != 1] or signals
        operand, trace = max(signals, key=lambda one: one[1].product)
        if name in SCANS and is_stream(trace.node) and not trace.step_size:  # it mixes the tokens of the stream itself
            return self._product(name, signals, weights, parents=parents)
        features = _features(name, trace) | ({"stepped"} if stepped else set())
        if name in EXPONENTIALS and trace.step_size:
            features |= {"decayed"}
        if name in SCALINGS and any(_sums_exponentials(factor, trace) for factor in factors):
            features |= {"softmax"}
        if name == "__setitem__" and trace.product and _writes_one(args[1]):
            features |= {"scanned"}  # one token after the other
        if len({id(one.node) for _, one in signals}) > 1:
            return self._merged(name, args, signals, parents, weights, features)
        if name in REDUCTIONS and not factors and _reduces_width(name, args, kwargs, operand):
            node = trace.node
            if name == "sum" and node is not None and node.kind == "merge" and node.order == trace.order and not node.carries:
                return self._product(name, [*signals, *signals], weights, parents=parents)  # an inner product
            made = result[0] if isinstance(result, tuple | list) else result
            return self._factor(parents, weights, rooted=name in ROOTS, reduced=(name, made.dtype), of=trace.node, eps=None)
        softplus = name in ("softplus", "logaddexp") or (name in ("log", "log1p") and trace.exponential)
        what: dict[str, Any] = {
            "node": trace.node,
            "parents": parents,
            "parameters": weights,
            "features": features,
            "norm": next((one.norm for _, one in signals if one.norm is not None), None),
            "scalings": trace.scalings,
            "ungained": ungained,
            "product": trace.product,
            "module": trace.module,
            "routed": trace.routed or name in ROUTERS,
            "gate": trace.gate or name in GATES,
            "exponential": name in EXPONENTIALS or (trace.exponential and name in ADDITIONS),
            "step_size": softplus or (trace.step_size and name not in EXPONENTIALS),
            "same_as": trace.value if name in COPIES else None,
            "promoted": self._promoted(name, args, kwargs, operand, trace.promoted, result),
        }
        if softplus:
            self.step_biases |= self._biases(trace)
        if normalises:
            norm = self.norms.meet(name, args, kwargs, operand, trace.node, factors, result, self.module)
            if trace.node is not None:
                trace.node.normed = trace.node.read = True
            what |= {"norm": norm, "ungained": not weights}
        elif name in SCALINGS:
            what["scalings"] += any(_is_number(value) for value in args if value is not operand)
            what["ungained"] = ungained and not weights
            if ungained and weights and isinstance(result, Tensor) and what["norm"] is not None:
                self.norms.gain(what["norm"], brought, result)
        return self.step(**what)

    def _biases(self, trace: Trace) -> frozenset[str]:
        """Return the biases that were added last, since the node or in the product that made it."""
        while True:
            found = frozenset(name for name in trace.parameters if self.roles.get(name) == "bias")
            own = [parent for parent in trace.parents if parent.node is trace.node and trace.node is not None]
            if found or not own:
                return found
            trace = own[0]

    def _promoted(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operand: Tensor, before: str | None, result: Any
    ) -> str | None:
        """Say what gave a copy a wider dtype, if an operand of elementwise arithmetic did."""
        if not isinstance(result, Tensor):
            return None
        if name in CASTS:
            return before if result is operand else None  # a cast to the dtype that it has is none
        if name not in SCALINGS | ADDITIONS | DIFFERENCES or not is_narrow(operand.dtype) or is_narrow(result.dtype):
            return before
        other = next((one for one in tensors_in((*args, *kwargs.values())) if one.dtype == result.dtype), None)
        if other is None:
            return before
        trace = trace_of(other)
        of = ", ".join(sorted(trace.parameters)) if trace is not None and trace.kind == "weight" else ""
        what = self._names.get(id(other)) or of or "a tensor"
        return f"{name.strip('_')} with {what} ({str(other.dtype).removeprefix('torch.')})"

    def _factor(self, parents: tuple[Trace, ...], weights: frozenset[str], **what: Any) -> Trace:
        self.steps += 1
        return Trace("factor", self.steps, parents=parents, parameters=weights, **what)

    def _merged(
        self,
        name: str,
        args: tuple[Any, ...],
        signals: list[tuple[Tensor, Trace]],
        parents: tuple[Trace, ...],
        weights: frozenset[str],
        features: frozenset[str],
    ) -> Trace:
        """Return what is known of several nodes together: their sum or collection carries them, their product does not."""
        traces = [trace for _, trace in signals]
        if name in DIFFERENCES:  # the subtrahend is taken away, not carried
            minuend = args[0] if name not in ("rsub", "__rsub__") else args[1]
            kept = [trace for tensor, trace in signals if tensor is minuend]
        else:
            kept = traces if name in ADDITIONS | COLLECTIONS else []
        if name in SUMS and not all(is_stream(trace.node) for trace in traces):
            # Beside what was computed from it, a normed copy of the stream is read, not handed on.
            kept = [trace for trace in kept if trace.norm is None]
        # A gate is not what wrote the branch.
        last = max([trace for trace in traces if not trace.gate] or traces, key=lambda trace: trace.product)
        return self.begin(
            "merge",
            carries=tuple({id(trace.node): trace.node for trace in kept if trace.node is not None}.values()),
            factors=tuple(traces) if name in SCALINGS else (),
            parents=parents,
            parameters=weights,
            features=features,
            product=last.product,
            module=last.module,
            routed=name not in SUMS and any(trace.routed for trace in traces),
        )

    def _product(
        self,
        name: str,
        signals: list[tuple[Tensor, Trace]],
        weights: frozenset[str],
        *,
        parents: tuple[Trace, ...] = (),
        pointwise: bool = False,
    ) -> Trace:
        self.products += 1
        for _, trace in signals:
            for node in _read(trace):
                node.read = True
                node.weighed |= bool(weights)
        features = {"product"}
        if weights:
            features.add("weighed")
        if name in CONVOLUTIONS | TRANSFORMS | POOLS and not pointwise:
            features.add("convolved" if name in SEQUENTIAL else "spread")
        if name in SCANS:
            features.add("scanned")
        elif name in ATTENTIONS:
            features |= {"softmax", "mixed"}
        elif len(signals) > 1:
            # Tokens are sent to their experts, not mixed, by a product with a choice that was made.
            features.add("routed" if any(trace.routed for _, trace in signals) else "mixed")
        made = self.begin(
            "product",
            parents=parents,
            parameters=weights,
            features=frozenset(features),
            product=self.products,
            module=self.module,
        )
        if made.node is not None:
            made.node.mixed = "mixed" in features
        return made


def _channels(name: str, operands: list[Tensor], result: Tensor) -> int | None:
    """Return which dimension of ``result`` holds the channels, None for the last."""
    if name in CONVOLUTIONS | POOLS:
        return max(0, result.dim() - (int(name.rstrip("d")[-1]) + 1))  # before one, two or three of space
    known = [(tensor, trace.channels) for tensor in operands if (trace := signal_of(tensor)) is not None and tensor.dim()]
    if name in PRODUCTS or not known:
        return None
    operand, given = max(known, key=lambda one: one[0].numel())
    if given is None and name not in VIEWS:
        return None
    channels = operand.dim() - 1 if given is None or given >= operand.dim() else given
    size = operand.shape[channels]
    if result.shape == operand.shape and name not in VIEWS:
        return channels
    like = [dim for dim in range(result.dim()) if result.shape[dim] == size]
    if name in VIEWS and size > 1:  # a dimension keeps its stride wherever it is moved to
        same = [dim for dim in like if result.stride(dim) == operand.stride(channels)]
        like = same or like
    found = channels if channels in like else next(reversed(like), None)
    return None if found is None or found == result.dim() - 1 else found


def _writes_one(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, int) and not isinstance(part, bool) for part in parts)


def _is_factor(tensor: Tensor) -> bool:
    known = trace_of(tensor)
    return known is not None and known.kind == "factor"


def _sums_exponentials(factor: Trace, trace: Trace) -> bool:
    """Whether exponentials of products of activations are divided by their sum."""
    node = trace.node
    summed = factor.reduced is not None and factor.reduced[0] == "sum" and not factor.rooted
    return summed and trace.exponential and node is not None and node.mixed and factor.of is node


def _features(name: str, trace: Trace) -> frozenset[str]:
    if not trace.product:
        return frozenset()
    found = {"softmax"} if name in SOFTMAXES else {"scanned"} if name in SCANS else {"routed"} if name in ROUTERS else set()
    return frozenset(found)


def _read(trace: Trace) -> list[Node]:
    """Return the nodes that a product reads: its operand's, what that collects, and what it is an elementwise product of."""
    found: list[Node] = []
    pending = [trace]
    while pending:
        one = pending.pop()
        if one.node is None or one.node in found:
            continue
        found += [node for node in carried_since_addition(one.node) if node not in found]
        if one.node.kind == "merge":
            pending += one.node.factors
    return found


def _is_activation(name: str, operand: Tensor, args: tuple[Any, ...]) -> bool:
    """Whether something computed from parameters is what a layer is applied to, [batch, tokens, width]."""
    return operand.dim() > 2 and bool(args) and operand is args[0] and (name == "linear" or name in NORMS)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors among ``values``, one level of nesting deep."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [inner for inner in value if isinstance(inner, Tensor)]
        elif isinstance(value, dict):
            found += [inner for inner in value.values() if isinstance(inner, Tensor)]
    return found


def _is_number(value: Any) -> bool:
    """Whether a factor is one number, in whatever form."""
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, int | float) and value != 1


def _is_root(exponent: Any) -> bool:
    return isinstance(exponent, float) and exponent in (-0.5, 0.5)


def _reduces_width(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], operand: Tensor) -> bool:
    position = REDUCTIONS[name]
    dims = kwargs.get("dim", args[position] if len(args) > position else None)
    if dims is None or isinstance(dims, bool):
        return True
    return any(dim in (-1, operand.dim() - 1) for dim in (dims if isinstance(dims, tuple | list) else (dims,)))


def _role(name: str, kwargs: Mapping[str, Any], tensor: Tensor, *, normalises: bool, ungained: bool) -> str:
    """Return the role of a parameter from the function in which it, or what was computed from it, met a signal."""
    if name in ADDITIONS or kwargs.get("bias") is tensor:
        return "bias"
    if normalises or (name in SCALINGS and ungained):
        return "norm"
    if name in PRODUCTS:
        is_bias = tensor.dim() == 1 and name not in UNBIASED
        return "bias" if is_bias else "convolution" if name in CONVOLUTIONS else "linear"
    return "scale" if name in SCALINGS else "other"
