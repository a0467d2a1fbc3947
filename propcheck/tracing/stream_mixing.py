"""Products that only mix several streams with each other, or repeat one: they carry streams on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from propcheck.tracing.graph import is_stream

if TYPE_CHECKING:
    from propcheck.tracing.graph import Trace

# Streams that are mixed with each other are few beside the width.
_STREAMS_PER_WIDTH = 1 / 8


def mixed_streams(name: str, args: tuple[Any, ...], signals: list[tuple[Tensor, Trace]]) -> list[tuple[Tensor, Trace]]:
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


def spread_by_einsum(name: str, args: tuple[Any, ...], signals: list[tuple[Tensor, Trace]]) -> list[tuple[Tensor, Trace]]:
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
