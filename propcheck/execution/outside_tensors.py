"""Give values to tensors that the user's code made beside the model while it was built: inputs, targets of a loss, lists.

While the constructor is recorded they are fake, like the parameters. A batch is known and gets its values before the model
is called; any other one, in the closure of a loss function say, gets them when a function is given it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import MappingKey, SequenceKey, tree_leaves, tree_map, tree_map_with_path

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from propcheck.deferred_init.materialize import Materializer

# Attributes of a tensor that are tensors with its values.
VALUE_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class OutsideTensors(TorchFunctionMode):
    """Replaces fake arguments of functions by their values.

    Parameters
    ----------
    materializer, seed
        Where values come from.
    device
        Where they go.
    """

    def __init__(self, materializer: Materializer, seed: int, device: torch.device) -> None:
        super().__init__()
        self._materializer, self._seed, self._device = materializer, seed, device
        self._values: dict[int, tuple[Tensor, Tensor]] = {}  # by id, the fake one and its value
        self._own: dict[int, Tensor] = {}

    def stand_in(self, own: dict[int, Tensor]) -> None:
        """Say what the model's own fake tensors, by ``id``, became: code may hold one in a list or a closure."""
        self._own = own

    def named(self, tree: Any, name: str) -> Any:
        """Return ``tree`` on the device, with values in place of fake tensors: ``name.0``, ``name.pixel_values`` ..."""

        def real(path: tuple[Any, ...], leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return self._value(leaf, ".".join([name, *map(_text, path)]))
            return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf

        return tree_map_with_path(real, tree)

    def _value(self, fake: Tensor, name: str | None = None) -> Tensor:
        if id(fake) in self._own:
            return self._own[id(fake)]
        if id(fake) not in self._values:
            value = self._materializer.value(fake, name or f"tensor.{len(self._values)}", self._seed)
            if value is None:
                raise PropcheckError(
                    f"a tensor {list(fake.shape)} that was made from another one of the model's construction has no value "
                    "here; make it in the batch or loss function itself"
                )
            with torch._C.DisableTorchFunction():  # noqa: SLF001 - not the model's doing
                value = value.to(self._device) if not value.requires_grad else value.detach().to(self._device).requires_grad_()
            self._values[id(fake)] = fake, value
        return self._values[id(fake)][1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if attribute_of(func) in (None, *VALUE_ATTRIBUTES) and any(
            isinstance(leaf, FakeTensor) for leaf in _flat(args, kwargs)
        ):
            args, kwargs = tree_map(lambda leaf: self._value(leaf) if isinstance(leaf, FakeTensor) else leaf, (args, kwargs))
        return func(*args, **kwargs)


def attribute_of(function: Any) -> str | None:
    """Return the attribute that ``function`` reads or sets, ``T`` or ``shape``; None if it is no access to one."""
    if getattr(function, "__name__", "") not in ("__get__", "__set__"):
        return None
    return str(getattr(function.__self__, "__name__", ""))


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    values = [*args, *kwargs.values()]
    return tree_leaves(values) if any(isinstance(value, list | tuple | dict) for value in values) else values


def _text(key: Any) -> str:
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key.key) if isinstance(key, MappingKey) else str(key)
