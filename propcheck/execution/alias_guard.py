"""Watches the functions that a model calls for what a cut would change without a trace.

A unit gets copies of its inputs. Code that changes an input in place changes the caller's tensor too, and an output may share
the input's memory; of both nothing would be left across the cut. So after such a call the tensors concerned must not be used
(or changed) again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from propcheck.execution.outside_tensors import VALUE_ATTRIBUTES, attribute_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class AliasGuard(TorchFunctionMode):
    """Tells when a tensor that must not be is used.

    Parameters
    ----------
    refuse
        Called with a unit's path and what it did; raises.
    names
        The name of each parameter and buffer, by ``id``.
    on_use
        Told of each parameter that is read through an attribute (``weight.T``), and which.
    """

    def __init__(
        self, refuse: Callable[[str, str], object], names: Mapping[int, str], on_use: Callable[[str, str], None]
    ) -> None:
        super().__init__()
        self._refuse, self._names, self._on_use = refuse, names, on_use
        # By address of a storage that, while a weak reference to it exists, is no other's: the unit.
        self._outdated: dict[int, tuple[StorageWeakRef, str]] = {}
        self._shared: dict[int, tuple[StorageWeakRef, str]] = {}

    def outdated(self, tensor: Tensor, path: str) -> None:
        """Note that the unit ``path`` changed its copy of ``tensor`` in place."""
        _add(self._outdated, tensor, path)

    def shared(self, tensor: Tensor, path: str) -> None:
        """Note that in plain code an output of the unit ``path`` and its input ``tensor``, either of them, are one memory."""
        _add(self._shared, tensor, path)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        attribute = attribute_of(func)
        if attribute in VALUE_ATTRIBUTES and (name := self._names.get(id(args[0]))) is not None:
            self._on_use(name, attribute)
        if attribute is None and self._outdated:
            for path in _found(self._outdated, tree_leaves((args, kwargs))):
                self._refuse(path, "changes one of its inputs in place, and that is used again afterwards")
        if not self._shared or attribute is not None:
            return func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        watched = [(leaf, leaf._version, path) for leaf in leaves for path in _found(self._shared, [leaf])]  # noqa: SLF001
        result = func(*args, **kwargs)
        for leaf, version, path in watched:
            if leaf._version != version:  # noqa: SLF001
                self._refuse(path, "returns a view of an input, and one of the two is changed in place afterwards")
        return result


def _add(places: dict[int, tuple[StorageWeakRef, str]], tensor: Tensor, path: str) -> None:
    reference = StorageWeakRef(tensor.untyped_storage())
    places[reference.cdata] = reference, path


def _found(places: dict[int, tuple[StorageWeakRef, str]], values: list[Any]) -> list[str]:
    with torch._C.DisableTorchFunction():  # noqa: SLF001
        tensors = [value for value in values if isinstance(value, Tensor) and value.layout == torch.strided]
        storages = [value.untyped_storage()._cdata for value in tensors]  # noqa: SLF001
    return [places[storage][1] for storage in storages if storage in places]
