"""Run a model's own constructor without its memory, and keep the record of how each parameter came to be.

The constructor runs under ``FakeTensorMode``, so nothing is allocated, and under a dispatch mode that logs every
operation. ``Recording`` holds the model (with fake parameters) and the log; ``replay`` turns the log into values.
"""

from __future__ import annotations

import math
import random
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from propcheck.deferred_init.fake_patches import recordable
from propcheck.deferred_init.recording_mode import Recorder, Unrecordable
from propcheck.deferred_init.uncompile import uncompiled
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from propcheck.deferred_init.op_log import RecordedOperation, TensorRef


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
    def numel(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Memory of its value."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Recording:
    """A model whose tensors are fake, the operations that made them, and its parameters and buffers in order.

    Attributes
    ----------
    model
        With fake tensors.
    log
        The operations.
    constants
        What tensors that came from outside of the log held, by number.
    entries
        The model's parameters and buffers.
    known
        Tells where in the log another tensor that the constructor made is (an input, an element of a list); None where the
        log does not have it.
    tensors
        The model's own, by the names of the entries.
    recorded
        Whether they are fake. Else nothing was recorded: the log is empty, and they are in memory with their values.
    """

    model: nn.Module
    log: tuple[RecordedOperation, ...]
    constants: dict[int, Tensor]
    entries: tuple[Entry, ...]
    known: Callable[[Tensor], TensorRef | None]
    tensors: dict[str, Tensor]
    recorded: bool


class NotRecordedError(PropcheckError):
    """The code that builds the model does what cannot be recorded; ``reason`` says where and what."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; it runs on shapes of tensors, without their values")
        self.reason = reason


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
    NotRecordedError
        If ``factory`` decides on values of random tensors, which have none here, or asks for their memory.
    PropcheckError
        If it returns no module.
    """
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake_mode)
    try:
        with own_random_state(0), fake_mode, recorder, recordable():
            model = factory()
        if isinstance(model, nn.Module):
            model = uncompiled(model)
            register_plain_tensors(model)
        entries = entries_of(model, recorder.ref) if isinstance(model, nn.Module) else ()
    except Exception as error:
        reason = _unrecordable(error)
        if reason is None:
            raise
        raise NotRecordedError(f"{_place(error)}: the code that builds the model {reason}") from error
    require_module(model)
    tensors = tensors_of(model, entries)
    return Recording(model, tuple(recorder.log), recorder.constants, entries, recorder.known, tensors, recorded=True)


def require_module(model: object) -> None:
    """Refuse what is no module."""
    if not isinstance(model, nn.Module):
        raise PropcheckError(f"the target must build a torch.nn.Module, it built a {type(model).__name__}")


def register_plain_tensors(model: nn.Module) -> None:
    """Make tensors that are plain attributes (``self.mask = torch.ones(...)``) buffers, so that they are known and get a value.

    An attribute that has a graph, as ``nn.utils.weight_norm`` sets before each forward, stays as it is.
    """
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and value.is_leaf and not hasattr(type(module), name):
                del vars(module)[name]
                module.register_buffer(name, value, persistent=False)


def entries_of(model: nn.Module, ref: Callable[[Tensor], TensorRef]) -> tuple[Entry, ...]:
    """Return the parameters and buffers of ``model`` in order, each once; ``ref`` says where its value comes from."""
    named: dict[int, tuple[str, Tensor, list[str]]] = {}
    tensors = [
        *(("parameter", name, tensor) for name, tensor in model.named_parameters(remove_duplicate=False)),
        *(("buffer", name, tensor) for name, tensor in model.named_buffers(remove_duplicate=False)),
    ]
    for kind, name, tensor in tensors:
        named.setdefault(id(tensor), (kind, tensor, []))[2].append(name)
    return tuple(
        Entry(names[0], tuple(names), ref(tensor), kind, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for kind, tensor, names in named.values()
    )


def tensors_of(model: nn.Module, entries: Iterable[Entry]) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by the names of ``entries``."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {entry.name: named[entry.name] for entry in entries}


@contextmanager
def own_random_state(seed: int) -> Iterator[None]:
    """Give a constructor the same state of ``random`` and numpy each time, and leave all generators as they were."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the global one is meant
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])  # noqa: NPY002
        torch.set_rng_state(saved[2])


# What is said where somebody asks a fake tensor for its memory. Should an error of the code's own say it, then the code will
# raise it again where the model is built for real.
_FAKE_FRAGMENTS = (
    "for tensor subclasses", "data is not allocated", "FakeTensor", "Meta tensors", "'meta' device", "SparseTensorImpl",
    "SparseCsrTensorImpl", "WeakValueDictionary.__init__",
)  # fmt: skip


def _unrecordable(error: Exception) -> str | None:
    """Say what code did that cannot be recorded; None if the error is the code's own."""
    if isinstance(error, Unrecordable):
        return str(error)
    fake = (fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException)
    usual = (RuntimeError, TypeError, AttributeError)  # NotImplementedError is a RuntimeError
    text = str(error)
    if isinstance(error, fake) or (isinstance(error, usual) and any(part in text for part in _FAKE_FRAGMENTS)):
        return f"does what cannot be recorded ({' '.join(text.partition(chr(10))[0].split()).rstrip('.')})"
    return None


def _place(error: Exception) -> str:
    """Return file and line of the code, outside of torch and of this module, that was running."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "the target"
