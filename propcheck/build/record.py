"""Run a model's own constructor without its memory, and keep the record of how each parameter came to be.

The constructor runs under ``FakeTensorMode``, so nothing is allocated, and under a dispatch mode that logs every
operation. ``Recording`` holds the model (with fake parameters) and the log; ``replay`` turns the log into values.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for one tensor of the record: its number, and the number of the storage that it views."""

    tensor: int
    storage: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One call: the operator, its arguments (tensors as ``TensorRef``), what it returned and what it wrote in place."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorRef, ...]
    written: tuple[TensorRef, ...]
    overwrites: bool  # the whole storage of what it wrote, without reading it

    @property
    def inputs(self) -> list[TensorRef]:
        """The tensors among its arguments."""
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, TensorRef)]

    @property
    def random(self) -> bool:
        """Whether its result depends on a random generator."""
        return torch.Tag.nondeterministic_seeded in self.function.tags or self.name == "trunc_normal_"

    @property
    def name(self) -> str:
        """The operator's name without namespace and overload, ``normal_``."""
        return str(self.function._schema.name.split("::")[1])  # noqa: SLF001


# In-place calls whose result does not depend on what was there before.
_OVERWRITING = {
    "normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "random_", "log_normal_", "cauchy_", "geometric_",
    "bernoulli_", "trunc_normal_",
}  # fmt: skip


@torch.library.custom_op("propcheck::trunc_normal_", mutates_args={"tensor"})
def _trunc_normal_(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    raise NotImplementedError("only recorded, and replayed by propcheck.build.replay")


_trunc_normal_.register_fake(lambda tensor, mean, std, a, b: None)  # noqa: ARG005


class Recorder(TorchDispatchMode):
    """Logs every operation on fake tensors. Tensors and storages are numbered, and kept alive so that numbers stay unique."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Operation] = []
        self.constants: dict[int, Tensor] = {}  # real tensors that entered from outside, by number
        self._tensors: dict[int, tuple[Tensor, TensorRef]] = {}  # by id of the Python object
        self._storages: dict[int, tuple[Any, int]] = {}  # by address of the storage
        self._geometry: dict[tuple[Any, ...], TensorRef] = {}
        self._count = 0

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return the number of ``tensor``: of its Python object, or after ``x.data = y`` of the tensor that it now equals."""
        storage = self._storage(tensor)
        known = self._tensors.get(id(tensor))
        if known is not None and known[1].storage == storage:
            return known[1]
        geometry = (storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        found = self._geometry.get(geometry)
        if found is None:
            self._count += 1
            found = self._geometry[geometry] = TensorRef(self._count, storage)
            if not isinstance(tensor, FakeTensor):
                self.constants[found.tensor] = tensor
        self._tensors[id(tensor)] = (tensor, found)
        return found

    def _storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        known = self._storages.setdefault(storage._cdata, (storage, len(self._storages)))  # noqa: SLF001
        return known[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        recorded_args, recorded_kwargs = tree_map(
            lambda leaf: self.ref(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        written = _written(func, args, kwargs)
        name = func._schema.name.split("::")[1]  # noqa: SLF001
        overwrites = name in _OVERWRITING and len(written) == 1 and _covers_storage(written[0])
        if "dtype" in recorded_kwargs or any(argument.name == "dtype" for argument in func._schema.arguments):  # noqa: SLF001
            # The default dtype may be another one at replay.
            recorded_kwargs = {**recorded_kwargs, "dtype": outputs[0].dtype} if outputs else recorded_kwargs
        self.log.append(
            Operation(
                func,
                tuple(recorded_args),
                recorded_kwargs,
                tuple(map(self.ref, outputs)),
                tuple(map(self.ref, written)),
                overwrites,
            )
        )
        return result


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that the operator's schema says it changes."""
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return written


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter or buffer of the model: its first name, every name that it goes by, and where its value comes from."""

    name: str
    names: tuple[str, ...]
    ref: TensorRef
    kind: str  # parameter | buffer
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Memory of its value."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Recording:
    """A model whose tensors are fake, the operations that made them, and its parameters and buffers in order."""

    model: nn.Module
    log: tuple[Operation, ...]
    constants: dict[int, Tensor]
    entries: tuple[Entry, ...]


def record(factory: Callable[[], nn.Module]) -> Recording:
    """Run ``factory`` without allocating its tensors.

    Parameters
    ----------
    factory
        Constructs and initialises a model, like any training code would.

    Returns
    -------
    Recording
        The model with fake parameters, and how to compute each of them.

    Raises
    ------
    PropcheckError
        If ``factory`` returns no module.
    """
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, _recordable_init():
        model = factory()
        if not isinstance(model, nn.Module):
            raise PropcheckError(f"the target must build a torch.nn.Module, it built a {type(model).__name__}")
    named: dict[int, tuple[str, Tensor, list[str]]] = {}
    tensors = [
        *(("parameter", name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False)),
        *(("buffer", name, tensor) for name, tensor in model.named_buffers(remove_duplicate=False)),
    ]
    for kind, name, tensor in tensors:
        named.setdefault(id(tensor), (kind, tensor, []))[2].append(name)
    entries = tuple(
        Entry(names[0], tuple(names), recorder.ref(tensor), kind, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for kind, tensor, names in named.values()
    )
    return Recording(model, tuple(recorder.log), recorder.constants, entries)


@contextmanager
def _recordable_init() -> Iterator[None]:
    """Replace, while recording, the few pieces of torch that fake tensors cannot run.

    ``nn.init.trunc_normal_`` loops until no value is out of bounds, which depends on data; it becomes one recorded call.
    ``Module._apply`` (behind ``.to``, ``.half``, ``.bfloat16``) swaps fake tensors in a way that fails when anything
    else refers to them; assigning ``.data`` is what it does for real tensors.
    """

    def trunc_normal_(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        del generator
        with torch.no_grad():
            torch.ops.propcheck.trunc_normal_(tensor, float(mean), float(std), float(a), float(b))
        return tensor

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter is None:
                    continue
                parameter.data = fn(parameter.data)
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        return self

    saved_init, saved_apply = nn.init._no_grad_trunc_normal_, nn.Module._apply  # type: ignore[attr-defined]  # noqa: SLF001
    nn.init._no_grad_trunc_normal_, nn.Module._apply = trunc_normal_, apply  # type: ignore[attr-defined,method-assign,assignment]  # noqa: SLF001
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_, nn.Module._apply = saved_init, saved_apply  # type: ignore[attr-defined,method-assign]  # noqa: SLF001
