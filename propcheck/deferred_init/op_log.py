"""The log of a construction: every call that was made, and what torch's schemas say that it reads, writes and allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for one tensor of the log: its number, the number of the storage that it views, and its geometry."""

    tensor: int
    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RecordedOperation:
    """One call.

    Attributes
    ----------
    function, args, kwargs
        The operator and its arguments, tensors as ``TensorRef``, devices as the CPU.
    inputs
        The tensors among the arguments.
    reads
        Those of them whose values it needs; of the others only the memory or the geometry.
    written
        Those that it changes in place.
    outputs
        The tensors that it returned.
    gives_value
        Whether what it returns or writes has a value even if its inputs have none.
    default_dtype
        Torch's at the time; the results of ``torch.arange(4) / 4`` and ``torch.zeros(4)`` depend on it.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorRef, ...]
    reads: tuple[TensorRef, ...]
    written: tuple[TensorRef, ...]
    outputs: tuple[TensorRef, ...]
    gives_value: bool
    default_dtype: torch.dtype

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload, ``normal_``."""
        return operator_name(self.function)

    @property
    def random(self) -> bool:
        """Whether its result depends on a random generator."""
        return torch.Tag.nondeterministic_seeded in self.function.tags or self.name == "trunc_normal_"

    @property
    def allocates(self) -> bool:
        """Whether its results lie in memory of their own."""
        sources = {ref.storage for ref in self.inputs}
        return bool(self.outputs) and all(ref.storage not in sources for ref in self.outputs)

    @property
    def empty(self) -> bool:
        """Whether it only allocates: its results have no value yet."""
        return only_allocates(self.function)

    @property
    def moves_only(self) -> bool:
        """Whether it only allocates or gives another view of its input."""
        if torch.Tag.inplace_view in self.function.tags:
            return True
        return self.empty or (not self.written and not self.allocates)


def operator_name(function: Any) -> str:
    """Return the name of an operator without namespace and overload."""
    return str(function._schema.name.split("::")[1])  # noqa: SLF001


def only_allocates(function: Any) -> bool:
    """Whether what an operator returns has no value yet."""
    return operator_name(function) in _EMPTY


def returns_geometry_of_input(function: Any) -> bool:
    """Whether an operator reads only shape, strides and dtype of its input: ``zeros_like``, ``new_full`` ..."""
    name = operator_name(function)
    return name.endswith("_like") or name.startswith("new_")


def overwrites(function: Any) -> bool:
    """Whether what an operator leaves in the tensors that it writes does not depend on what was there before."""
    return operator_name(function) in _OVERWRITING or function._overloadname.endswith("out")  # noqa: SLF001


def writes_parts(function: Any) -> bool:
    """Whether an operator puts new values into some elements of the tensor that it writes, and leaves the others."""
    return operator_name(function) in _WRITING_PARTS


def arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each argument that was given, and whether the operator's schema says that it is written."""
    for index, argument in enumerate(function._schema.arguments):  # noqa: SLF001
        if index < len(args) or argument.name in kwargs:
            value = args[index] if index < len(args) else kwargs[argument.name]
            yield value, argument.alias_info is not None and argument.alias_info.is_write


_EMPTY = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}

_OVERWRITING = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "trunc_normal_",
}  # fmt: skip

_WRITING_PARTS = {
    "fill_diagonal_", "masked_fill_", "index_fill_", "index_put_", "scatter_", "put_", "masked_scatter_", "index_copy_",
    "tril_", "triu_",
}  # fmt: skip
