"""Run a model's own constructor without its memory, and keep the record of how each parameter came to be.

The constructor runs under ``FakeTensorMode``, so nothing is allocated, and under a dispatch mode that logs every
operation. ``Recording`` holds the model (with fake parameters) and the log; ``replay`` turns the log into values.
"""

from __future__ import annotations

import random
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from propcheck.build.log import (
    Operation,
    TensorRef,
    arguments,
    overwrites,
    returns_geometry_of_input,
    writes_parts,
)
from propcheck.build.recordable import recordable
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Recorder(TorchDispatchMode):
    """Logs every operation on fake tensors. Tensors and storages are numbered; storages are kept alive, so numbers are unique."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.log: list[Operation] = []
        self.constants: dict[int, Tensor] = {}  # what real tensors held when they entered from outside, by number
        self._fake_mode = fake_mode
        self._fakes: dict[int, tuple[Tensor, FakeTensor]] = {}  # real tensors by id, and what stands for them
        self._storages: dict[int, tuple[Any, int]] = {}  # by address
        self._refs: dict[tuple[Any, ...], TensorRef] = {}  # by storage and geometry

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return the number of ``tensor``; tensors that show the same memory in the same way have the same."""
        if not isinstance(tensor, FakeTensor):
            return self.ref(self._fake(tensor))
        storage = tensor.untyped_storage()
        _, number = self._storages.setdefault(storage._cdata, (storage, len(self._storages)))  # noqa: SLF001
        shape, stride = tuple(tensor.shape), tensor.stride()
        geometry = (number, tensor.dtype, shape, stride, tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        found = self._refs.get(geometry)
        if found is None:
            found = self._refs[geometry] = TensorRef(len(self._refs), number, shape, stride, tensor.dtype)
        return found

    def _fake(self, real: Tensor) -> FakeTensor:
        """Return the fake tensor that stands for one that was made outside, and keep what it held."""
        known = self._fakes.get(id(real))
        if known is not None:
            return known[1]
        if real.is_meta:
            raise _Unrecordable("reads a file of weights (torch.load) or makes a tensor that has no values")
        fake = self._fake_mode.from_tensor(real)
        self._fakes[id(real)] = real, fake
        with _disable_current_modes():
            self.constants[self.ref(fake).tensor] = real.detach().clone()
        return fake

    def _constant(self, value: Tensor) -> TensorRef:
        """Number the literal values of ``torch.tensor`` or ``torch.from_numpy``."""
        ref = TensorRef(len(self._refs), -1, tuple(value.shape), value.stride(), value.dtype)
        self._refs["literal", ref.tensor] = ref
        with _disable_current_modes():
            self.constants[ref.tensor] = value.detach().clone()  # an array may be filled anew for the next parameter
        return ref

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        literal = func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], FakeTensor)
        if literal:  # fake mode wants it real: .item() of such a tensor works
            refs = [self._constant(args[0])]
        else:
            leaves = [
                self._fake(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) else leaf for leaf in leaves
            ]
            refs = [self.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, structure)
        recorded_args, recorded_kwargs = tree_unflatten(refs, structure)
        # Before the call, which may resize what it writes.
        covered = all(map(_covers_storage, _tensors(value for value, written in arguments(func, args, kwargs) if written)))
        result = func(*args, **kwargs)
        outputs = tuple(self.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.log.append(_operation(func, recorded_args, recorded_kwargs, outputs, covered=covered))
        return result


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[TensorRef, ...], *, covered: bool
) -> Operation:
    """Work out what a call reads and writes; ``covered`` says whether what it writes are whole storages."""
    inputs: list[TensorRef] = []
    written: list[TensorRef] = []
    read: list[TensorRef] = []  # those that it does not write
    for value, is_written in arguments(func, args, kwargs):
        refs = [leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorRef)]
        inputs += refs
        if is_written:
            written += refs
        elif not returns_geometry_of_input(func):
            read += refs
    fresh = overwrites(func)
    for key, value in (("device", torch.device("cpu")), ("pin_memory", False)):
        if key in kwargs:
            kwargs = {**kwargs, key: value}
    return Operation(
        function=func,
        args=args,
        kwargs=kwargs,
        inputs=tuple(inputs),
        reads=tuple(read if fresh and covered else read + written),
        written=tuple(written),
        outputs=outputs,
        gives_value=writes_parts(func) or (not read and (fresh or not written)),
        default_dtype=torch.get_default_dtype(),
    )


def _tensors(values: Iterator[Any]) -> Iterator[Tensor]:
    return (leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


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
        Constructs and initialises a model, like any training code would. Numbers that it draws from ``random`` or numpy
        are the same each time; those that it draws from torch are drawn at replay.

    Returns
    -------
    Recording
        The model with fake parameters, and how to compute each of them.

    Raises
    ------
    PropcheckError
        If ``factory`` returns no module, or decides on values of tensors, which have none here.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake_mode)
    try:
        with _own_random_state(), fake_mode, recorder, recordable():
            model = factory()
            if not isinstance(model, nn.Module):
                raise PropcheckError(f"the target must build a torch.nn.Module, it built a {type(model).__name__}")
        entries = _entries(model, recorder)
    except Exception as error:
        reason = _unrecordable(error)
        if reason is None:
            raise
        raise PropcheckError(
            f"{_place(error)}: the code that builds the model {reason}; it runs with the shapes of tensors, without their values"
        ) from error
    return Recording(model, tuple(recorder.log), recorder.constants, entries)


def _entries(model: nn.Module, recorder: Recorder) -> tuple[Entry, ...]:
    named: dict[int, tuple[str, Tensor, list[str]]] = {}
    tensors = [
        *(("parameter", name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False)),
        *(("buffer", name, tensor) for name, tensor in model.named_buffers(remove_duplicate=False)),
    ]
    for kind, name, tensor in tensors:
        named.setdefault(id(tensor), (kind, tensor, []))[2].append(name)
    return tuple(
        Entry(names[0], tuple(names), recorder.ref(tensor), kind, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for kind, tensor, names in named.values()
    )


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Give the constructor the same state of every global generator each time, and leave theirs as they were."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global one is meant
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
        torch.set_rng_state(saved[2])


class _Unrecordable(Exception):  # noqa: N818 - its text completes a sentence
    pass


# What torch says where it asks a fake tensor for its memory.
_FAKE_FRAGMENTS = ("for tensor subclasses", "data is not allocated", "FakeTensor", "Meta tensors", "SparseTensorImpl")


def _unrecordable(error: Exception) -> str | None:
    """Say what code did that cannot be recorded; None if the error is the code's own."""
    if isinstance(error, _Unrecordable):
        return str(error)
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return "reads the value of a tensor (.item(), .tolist(), float(), a comparison in an if)"
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return "makes a tensor whose shape depends on values (nonzero, a mask as index)"
    first_line = str(error).partition("\n")[0].strip().rstrip(".")
    fake = (fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException)
    if isinstance(error, fake) or (isinstance(error, RuntimeError) and any(part in first_line for part in _FAKE_FRAGMENTS)):
        return f"does what cannot be recorded ({first_line})"
    return None


def _place(error: Exception) -> str:
    """Return file and line of the code, outside of torch and of this module, that was running."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the target"
