"""How what is known of tensors travels through torch's functions: the result's trace from the operands' traces."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from propcheck.observe.functions import (
    ADDITIONS,
    AS,
    ATTENTIONS,
    COLLECTIONS,
    CONVOLUTIONS,
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
from propcheck.observe.padding import real_positions
from propcheck.observe.statistics import moments
from propcheck.observe.trace import (
    Node,
    Norm,
    Trace,
    carried_since_addition,
    is_drawn,
    is_stream,
    mark,
    mark_drawn,
    signal_of,
    trace_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        self.masks: tuple[Tensor, ...] = ()  # where positions are padding
        self._norms = 0
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
            trace = self._of_signals(name, args, kwargs, signals, factors, brought, weights)
        elif factors:  # eps added, a root taken
            rooted = factors[0].rooted or name in ROOTS or (name == "pow" and _is_root(args[-1]))
            trace = self._factor(tuple(factors), weights, rooted=rooted)
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
        if any(is_drawn(one) for one in operands):
            trace = replace(trace, features=trace.features | {"drawn"})
        for value in tensors_in((result,)):
            channels = _channels(name, [tensor for tensor, _ in signals], value)
            mark(value, trace if channels == trace.channels else replace(trace, channels=channels))

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
        spread = _spread_by_einsum(name, args, signals)
        if spread:
            signals = spread
        elif name in PRODUCTS:
            streams = _mixed_streams(name, args, signals)
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
        if name == "__setitem__" and trace.product and _writes_one(args[1]):
            features |= {"scanned"}  # one token after the other
        if len({id(one.node) for _, one in signals}) > 1:
            return self._merged(name, args, signals, parents, weights, features)
        if name in REDUCTIONS and not factors and _reduces_width(name, args, kwargs, operand):
            node = trace.node
            if name == "sum" and node is not None and node.kind == "merge" and node.order == trace.order and not node.carries:
                return self._product(name, [*signals, *signals], weights, parents=parents)  # an inner product
            return self._factor(parents, weights, rooted=name in ROOTS)
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
            "step_size": name == "softplus" or (trace.step_size and name not in EXPONENTIALS),
        }
        if normalises:
            what |= {"norm": self._normalised(trace, operand), "ungained": not weights}
        elif name in SCALINGS:
            what["scalings"] += any(_is_number(value) for value in args if value is not operand)
            what["ungained"] = ungained and not weights
        return self.step(**what)

    def _factor(self, parents: tuple[Trace, ...], weights: frozenset[str], *, rooted: bool) -> Trace:
        self.steps += 1
        return Trace("factor", self.steps, parents=parents, parameters=weights, rooted=rooted)

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
        return self.begin(
            "product",
            parents=parents,
            parameters=weights,
            features=frozenset(features),
            product=self.products,
            module=self.module,
        )

    def _normalised(self, trace: Trace, operand: Tensor) -> Norm:
        """Note what a norm reads."""
        self._norms += 1
        if trace.node is not None:
            trace.node.normed = trace.node.read = True
        with torch.no_grad():
            return Norm(self._norms, moments(real_positions(operand, self.masks)).mean_square)


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


# Streams that are mixed with each other are few beside the width.
_STREAMS_PER_WIDTH = 1 / 8


def _mixed_streams(name: str, args: tuple[Any, ...], signals: list[tuple[Tensor, Trace]]) -> list[tuple[Tensor, Trace]]:
    """Return the streams, if a product only mixes several streams with each other, each element by itself.

    That is, [..., n, n] @ [..., n, width] or [..., width, n] @ [..., n, n] with what carries a stream, not a projection of it;
    or attention over copies of streams with a learned query, in which the keys are the values.
    """
    by_id = {id(tensor): (tensor, trace) for tensor, trace in signals}
    found = [by_id.get(id(value)) for value in args[:3]]
    if name == "scaled_dot_product_attention":
        keys, values = (found[1], found[2]) if len(found) == 3 else (None, None)
        if found[0] is None and keys is not None and values is not None and keys[1].node is values[1].node:
            return [values]
        return []
    if name == "einsum":
        return _mixed_by_einsum(args, signals)
    if name not in ("matmul", "bmm", "__matmul__") or len(found) < 2 or not all(isinstance(one, Tensor) for one in args[:2]):
        return []
    left, right = args[:2]
    for matrix, mixed, width in ((left, found[1], right.shape[-1]), (right, found[0], left.shape[-2] if left.dim() > 1 else 0)):
        square = matrix.dim() > 2 and matrix.shape[-1] == matrix.shape[-2] <= width * _STREAMS_PER_WIDTH
        if square and mixed is not None and is_stream(mixed[1].node):
            return [mixed]
    return []


def _spread_by_einsum(name: str, args: tuple[Any, ...], signals: list[tuple[Tensor, Trace]]) -> list[tuple[Tensor, Trace]]:
    """Return what an einsum that sums over nothing repeats with a weight for each place: b n d, b n s -> b n s d."""
    if name != "einsum" or not args or not isinstance(args[0], str) or "->" not in args[0]:
        return []
    inputs, output = args[0].replace(" ", "").split("->")
    labels = inputs.split(",")
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(labels) != 2 or len(operands) != 2 or set(inputs) - {","} - set(output):
        return []
    wide = [operand for own, operand in zip(labels, operands, strict=True) if own[-1:] == output[-1:]]
    return [one for one in signals if any(one[0] is operand for operand in wide)]


def _mixed_by_einsum(args: tuple[Any, ...], signals: list[tuple[Tensor, Trace]]) -> list[tuple[Tensor, Trace]]:
    """Return the stream, if an einsum sums it over a small dimension that is not its width, with weights for each position."""
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if not args or not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0]:
        return []
    inputs, output = args[0].replace(" ", "").split("->")
    labels = inputs.split(",")
    for own, other, tensor in ((labels[0], labels[1], operands[0]), (labels[1], labels[0], operands[1])):
        found = next((one for one in signals if one[0] is tensor), None)
        width = own[-1:]
        if found is None or not is_stream(found[1].node) or width not in output or width in other or "." in own.lstrip("."):
            continue
        letters = own.lstrip(".")  # of the last dimensions, behind an ellipsis
        sizes = dict(zip(letters, tensor.shape[-len(letters) :], strict=True))
        summed = [label for label in letters if label in other and label not in output]
        if summed and all(sizes[label] <= sizes[width] * _STREAMS_PER_WIDTH for label in summed):
            return [found]
    return []


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
