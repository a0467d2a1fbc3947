"""The calls that gave a parameter its value, in readable form."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.deferred_init.op_log import RecordedOperation

_LONGEST = 16  # calls; more are cut in the middle
_LONGEST_CYCLE = 8


def readable(operations: Sequence[RecordedOperation], *, from_outside: bool) -> str | None:
    """Write ``operations`` as Python does, tensors left out: ``uniform_(0.01, 16), log_()``.

    Parameters
    ----------
    operations
        Those whose values a parameter's value depends on, in order.
    from_outside
        Whether a tensor that they did not make, or the literal numbers of ``torch.tensor``, are part of it.

    Returns
    -------
    str or None
        None if none of them gives a value: they allocate memory, and copy or compute with what lay there.
    """
    calls = [operation for operation in operations if not operation.moves_only]
    if not from_outside and not any(operation.gives_value for operation in calls):
        return None
    texts = [_call(operation) for operation in calls]
    if from_outside and "constant" not in texts:
        texts.insert(0, "constant")
    texts = _fold(texts)
    if len(texts) > _LONGEST:
        half = _LONGEST // 2
        texts = [*texts[:half], f"... {len(texts) - 2 * half} more ...", *texts[-half:]]
    return ", ".join(texts)


def _call(operation: RecordedOperation) -> str:
    if operation.name == "_to_copy":
        return f"to({str(operation.outputs[0].dtype).removeprefix('torch.')})"
    if operation.name == "lift_fresh":
        return "constant"
    shown = [_number(argument) for argument in operation.args if _is_number(argument)]
    shown += [f"{key}={_number(value)}" for key, value in operation.kwargs.items() if _is_number(value)]
    return f"{operation.name}({', '.join(shown)})"


def _is_number(argument: object) -> bool:
    return isinstance(argument, int | float) and not isinstance(argument, bool)


def _number(argument: object) -> str:
    return f"{argument:.6g}" if isinstance(argument, float) else str(argument)


def _fold(texts: list[str]) -> list[str]:
    """Write repetitions, of one call or of a short sequence, once with their number."""
    folded: list[str] = []
    start = 0
    while start < len(texts):
        length, times = max(
            ((length, _repetitions(texts, start, length)) for length in range(1, _LONGEST_CYCLE + 1)),
            key=lambda found: (found[1] > 1, found[0] * found[1], -found[0]),
        )
        cycle = texts[start : start + (length if times > 1 else 1)]
        text = ", ".join(cycle)
        if times > 1:
            text = f"{text} x {times}" if len(cycle) == 1 else f"({text}) x {times}"
        folded.append(text)
        start += len(cycle) * times
    return folded


def _repetitions(texts: list[str], start: int, length: int) -> int:
    cycle = texts[start : start + length]
    times = 1
    while len(cycle) == length and texts[start + times * length : start + (times + 1) * length] == cycle:
        times += 1
    return times
