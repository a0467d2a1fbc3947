"""Build a model as any program would, where its construction cannot be recorded: every tensor in memory, none replayed.

How large the model will be is not known beforehand: what failed under fake tensors mostly fails on the meta device too, and
a part of a recording says little of the rest. So the construction is watched, and ended when it would leave the budget.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from propcheck.deferred_init.op_log import TensorRef, only_allocates
from propcheck.deferred_init.record import (
    Recording,
    entries_of,
    own_random_state,
    register_plain_tensors,
    require_module,
    tensors_of,
)
from propcheck.deferred_init.uncompile import uncompiled
from propcheck.errors import PropcheckError
from propcheck.seeding import generator_for

if TYPE_CHECKING:
    from collections.abc import Callable


def build_ordinarily(
    factory: Callable[[], nn.Module],
    first_use: Callable[[nn.Module], object],
    *,
    seed: int,
    budget: int,
    in_use: Callable[[], int],
    reason: str,
) -> Recording:
    """Run ``factory`` for real.

    Parameters
    ----------
    factory
        Constructs and initialises a model.
    first_use
        Calls the model once, for modules that get their shapes only then (``nn.LazyLinear``).
    seed
        The values are a function of it: torch, numpy and ``random`` start from it.
    budget, in_use
        Bytes that the process may use, and a function that says how many it uses.
    reason
        Why it was not recorded, as a sentence.

    Returns
    -------
    Recording
        The model with its tensors as they are, and an empty log.

    Raises
    ------
    PropcheckError
        If the model would not fit, or is no module.
    """
    start = generator_for("ordinary", seed).initial_seed()
    with own_random_state(start % (1 << 32)), _Watched(budget, in_use, reason):
        torch.manual_seed(start)
        model = factory()
        require_module(model)
        model = uncompiled(model)
        if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
            with torch.no_grad():
                first_use(model)
        register_plain_tensors(model)
    return _taken(model)


def _taken(model: nn.Module) -> Recording:
    """Return a model that exists, with the values that it has, in the form of a recording."""
    numbers: dict[int, int] = {}

    def ref(tensor: Tensor) -> TensorRef:
        number = numbers.setdefault(id(tensor), len(numbers))
        return TensorRef(number, number, tuple(tensor.shape), (), tensor.dtype)

    entries = entries_of(model, ref)
    return Recording(model, (), {}, entries, lambda _: None, tensors_of(model, entries), recorded=False)


# Tensors below this size, in bytes, are not worth a look at the process's memory.
_WORTH_A_LOOK = 1 << 20


class _Watched(TorchDispatchMode):
    """Ends a construction before it takes more memory than it may.

    Memory that a call only allocates counts at once: nothing wrote it yet, so for the machine it is not in use.
    """

    def __init__(self, budget: int, in_use: Callable[[], int], reason: str) -> None:
        super().__init__()
        self._budget, self._in_use, self._reason = budget, in_use, reason

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [
            math.prod(leaf.shape) * leaf.itemsize
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
        ]
        if sum(sizes) >= _WORTH_A_LOOK and self._in_use() + sum(sizes) * only_allocates(func) > self._budget:
            raise PropcheckError(
                f"{self._reason}; so it is built as a whole, and does not fit the memory budget of "
                f"{self._budget / 2**30:.3g} GiB; raise --memory, or change that line"
            )
        return result
