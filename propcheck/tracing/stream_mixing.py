"""Products that only mix several streams with each other, or repeat one: their result still carries the streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from propcheck.tracing.graph import is_stream

if TYPE_CHECKING:
    from propcheck.tracing.events import FunctionCall
    from propcheck.tracing.graph import Trace

    Signals = tuple[tuple[Tensor, Trace], ...]

# Streams that are mixed with each other are few compared with the width.
_STREAMS_PER_WIDTH = 1 / 8


def mixed_streams(call: FunctionCall, signals: Signals) -> Signals:
    """Return the stream operand of a product that mixes several streams with each other, element by element.

    That is [..., n, n] @ [..., n, width] or [..., width, n] @ [..., n, n] with a tensor that carries a stream, not a projection
    of it; or attention over copies of streams with a learned query, in which the keys are the values.
    """
    if call.name == "scaled_dot_product_attention":
        return _mixed_by_attention(call, signals)
    if call.name == "einsum":
        return _mixed_by_einsum(call, signals)
    if call.name in ("matmul", "bmm", "__matmul__"):
        return _mixed_by_matmul(call, signals)
    return ()


def _mixed_by_attention(call: FunctionCall, signals: Signals) -> Signals:
    if len(call.args) < 3:
        return ()
    query, key, value = (_signal(operand, signals) for operand in call.args[:3])
    same = query is None and key is not None and value is not None and key[1].node is value[1].node
    return (value,) if same and value is not None else ()


def _mixed_by_matmul(call: FunctionCall, signals: Signals) -> Signals:
    operands = call.args[:2]
    if len(operands) < 2 or not all(isinstance(operand, Tensor) for operand in operands):
        return ()
    left, right = operands
    height = left.shape[-2] if left.dim() > 1 else 0
    for matrix, operand, width in ((left, right, right.shape[-1]), (right, left, height)):
        mixed = _signal(operand, signals)
        square = matrix.dim() > 2 and matrix.shape[-1] == matrix.shape[-2] <= width * _STREAMS_PER_WIDTH
        if square and mixed is not None and is_stream(mixed[1].node):
            return (mixed,)
    return ()


def _signal(operand: object, signals: Signals) -> tuple[Tensor, Trace] | None:
    return next((signal for signal in signals if signal[0] is operand), None)


def spread_by_einsum(call: FunctionCall, signals: Signals) -> Signals:
    """Return the operand that an einsum without a sum repeats, with a weight for each place: b n d, b n s -> b n s d."""
    labels, output, operands = _einsum(call)
    if not labels or set("".join(labels)) - set(output):
        return ()
    wide = [operand for label, operand in zip(labels, operands, strict=True) if label[-1:] == output[-1:]]
    return tuple(signal for signal in signals if any(signal[0] is operand for operand in wide))


def _mixed_by_einsum(call: FunctionCall, signals: Signals) -> Signals:
    """Return the stream that an einsum sums over a small dimension that is not its width, with weights for each position."""
    labels, output, operands = _einsum(call)
    if not labels:
        return ()
    for label, other, tensor in ((labels[0], labels[1], operands[0]), (labels[1], labels[0], operands[1])):
        stream = _signal(tensor, signals)
        width = label[-1:]
        if stream is None or not is_stream(stream[1].node) or width not in output or width in other or "." in label.lstrip("."):
            continue
        letters = label.lstrip(".")  # of the last dimensions, behind an ellipsis
        sizes = dict(zip(letters, tensor.shape[-len(letters) :], strict=True))
        summed = [letter for letter in letters if letter in other and letter not in output]
        if summed and all(sizes[letter] <= sizes[width] * _STREAMS_PER_WIDTH for letter in summed):
            return (stream,)
    return ()


def _einsum(call: FunctionCall) -> tuple[list[str], str, tuple[Tensor, ...]]:
    """Return the input labels, the output label and the operands of an einsum of two operands; empty for any other call."""
    args = call.args
    if call.name != "einsum" or not args or not isinstance(args[0], str) or "->" not in args[0]:
        return [], "", ()
    inputs, output = args[0].replace(" ", "").split("->")
    operands = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    labels = inputs.split(",")
    if len(labels) != 2 or len(operands) != 2:
        return [], "", ()
    return labels, output, tuple(operands)
