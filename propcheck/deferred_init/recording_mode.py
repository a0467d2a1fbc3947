"""The mode that logs a construction, call by call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from propcheck.deferred_init.dependencies import Slicer
from propcheck.deferred_init.op_log import (
    RecordedOperation,
    TensorRef,
    arguments,
    overwrites,
    returns_geometry_of_input,
    writes_parts,
)
from propcheck.deferred_init.run_ops import compute

if TYPE_CHECKING:
    from collections.abc import Iterator


# Storage number of the literal values of ``torch.tensor``: nothing in the log writes them.
_LITERAL = -1


class Unrecordable(Exception):  # noqa: N818
    """What the recorded code did that cannot be recorded, as the end of a sentence about it."""


class Recorder(TorchDispatchMode):
    """Logs every operation on fake tensors.

    Tensors and storages are numbered. Storages are kept alive, so that an address is never used for another one.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.log: list[RecordedOperation] = []
        self.constants: dict[int, Tensor] = {}  # what real tensors held when they entered from outside, by number
        self._fake_mode = fake_mode
        self._fakes: dict[int, tuple[Tensor, FakeTensor]] = {}  # real tensors by id, and what stands for them
        self._storages: dict[int, tuple[Any, int]] = {}  # by address
        self._refs: dict[tuple[Any, ...], TensorRef] = {}  # by storage and geometry
        self._count = 0

    def ref(self, tensor: Tensor) -> TensorRef:
        """Return the number of ``tensor``; tensors that show the same memory in the same way have the same."""
        if not isinstance(tensor, FakeTensor):
            return self.ref(self._fake(tensor))
        storage = tensor.untyped_storage()
        _, number = self._storages.setdefault(storage._cdata, (storage, len(self._storages)))  # noqa: SLF001
        geometry = _geometry(number, tensor)
        found = self._refs.get(geometry)
        if found is None:
            self._count += 1
            found = self._refs[geometry] = TensorRef(self._count, number, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        return found

    def known(self, tensor: Tensor) -> TensorRef | None:
        """Return the number of a tensor of the log, None for others."""
        if not isinstance(tensor, FakeTensor):
            return None
        _, number = self._storages.get(tensor.untyped_storage()._cdata, (None, -1))  # noqa: SLF001
        return self._refs.get(_geometry(number, tensor))

    def _fake(self, real: Tensor) -> FakeTensor:
        """Return the fake tensor that stands for one that was made outside, and keep what it held."""
        known = self._fakes.get(id(real))
        if known is not None:
            return known[1]
        fake = self._fake_mode.from_tensor(real)
        self._fakes[id(real)] = real, fake
        ref = self.ref(fake)
        if real.is_meta:  # such as torch.tensor gives for the meta device: memory without a value
            allocation = torch.ops.aten.empty_strided.default
            self.log.append(_operation(allocation, (ref.shape, ref.stride), {}, (ref,), covered=True))
        else:
            with _disable_current_modes():
                self.constants[ref.tensor] = real.detach().clone()
        return fake

    def _constant(self, value: Tensor) -> TensorRef:
        """Keep the literal values of ``torch.tensor`` or ``torch.from_numpy``."""
        self._count += 1
        ref = TensorRef(self._count, _LITERAL, tuple(value.shape), value.stride(), value.dtype)
        with _disable_current_modes():
            self.constants[ref.tensor] = value.detach().clone()  # an array may be filled anew for the next parameter
        return ref

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give code the value that it asks for, if no random number and no memory that was never written is part of it.

        ``[x.item() for x in torch.linspace(0, rate, depth)]`` is how many vision models set their drop rates.
        """
        slicer = Slicer(self.log)

        def value(leaf: Any) -> Any:
            if not isinstance(leaf, TensorRef):
                return leaf
            piece = slicer.slice(leaf)
            if any(self.log[index].random or self.log[index].empty for index in piece.valued):
                raise Unrecordable(_reads(func, "a tensor that is random or was never written"))
            return compute(self.log, self.constants, piece)

        if any(written for _, written in arguments(func, args, kwargs)):
            raise Unrecordable(_reads(func, "a tensor while it changes another"))
        with _disable_current_modes():
            args, kwargs = tree_map(value, (args, kwargs))
            result = func(*args, **kwargs)
        return tree_map(lambda leaf: self._fake(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.UntypedStorage) for leaf in leaves):
            raise Unrecordable("reads a file of weights (torch.load)")
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
        try:
            result = func(*args, **kwargs)
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException):
            return self._for_real(func, recorded_args, recorded_kwargs)
        outputs = tuple(self.ref(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.log.append(_operation(func, recorded_args, recorded_kwargs, outputs, covered=covered))
        return result


def _geometry(storage: int, tensor: Tensor) -> tuple[Any, ...]:
    shape, offset = tuple(tensor.shape), tensor.storage_offset()
    return storage, tensor.dtype, shape, tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()


def _operation(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: tuple[TensorRef, ...], *, covered: bool
) -> RecordedOperation:
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
    literal = func is torch.ops.aten.lift_fresh.default and args[0].storage == _LITERAL
    for key, value in (("device", torch.device("cpu")), ("pin_memory", False)):
        if key in kwargs:
            kwargs = {**kwargs, key: value}
    return RecordedOperation(
        function=func,
        args=args,
        kwargs=kwargs,
        inputs=tuple(inputs),
        reads=tuple(read if fresh and covered else read + written),
        written=tuple(written),
        outputs=outputs,
        gives_value=literal or writes_parts(func) or (not read and (fresh or not written)),
        default_dtype=torch.get_default_dtype(),
    )


def _tensors(values: Iterator[Any]) -> Iterator[Tensor]:
    return (leaf for value in values for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _reads(function: Any, what: str) -> str:
    if torch.Tag.dynamic_output_shape in function.tags:
        return f"makes a tensor whose shape depends on the values of {what} (nonzero, a mask as index)"
    return f"reads a value of {what} (.item(), .tolist(), float(), a comparison in an if)"
