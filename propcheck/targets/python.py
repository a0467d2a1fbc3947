"""The user's own code as a target: ``package.module:callable``, ``path/to/file.py:callable``, or an object in this process."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import importlib.util
import sys
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from propcheck.errors import PropcheckError
from propcheck.targets.inputs import token_ids
from propcheck.targets.precision import PRESETS
from propcheck.targets.target import Target, Task, names_of
from propcheck.targets.user_errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    import torch

    from propcheck.config.probe import InputsConfig, Probe
    from propcheck.targets.target import Batch


def python_task(probe: Probe, what: object = None, args: Mapping[str, Any] | None = None) -> Task:
    """Return the target that code builds.

    Parameters
    ----------
    probe
        Its ``[python]`` section names the code, unless ``what`` is given.
    what
        A callable that builds, or a module or ``Target`` that is built already; that one's values are taken as they are, and
        it is not changed.
    args
        Keyword arguments of the callable; default: those of the probe.

    Raises
    ------
    PropcheckError
        No such module or attribute, something that cannot be called, or arguments that it does not take.
    """
    name = shown(probe.python.target)
    chosen = what if what is not None else _find(probe.python.target)
    args = dict(probe.python.args if args is None else args)
    own = probe.precision.preset
    precision = PRESETS[own] if own is not None else None
    built = isinstance(chosen, nn.Module | Target)
    if built:
        if args:
            raise PropcheckError(f"{name}: it is built already and takes no arguments ({', '.join(args)})")
    elif not callable(chosen):
        raise PropcheckError(f"{name}: must be a callable that returns the model; it is of type {type(chosen).__name__}")
    else:
        _check_arguments(chosen, args, name)

    def build() -> Target:
        result = chosen if built else chosen(**args)  # type: ignore[operator] # checked above
        target = result if isinstance(result, Target) else Target(result)  # type: ignore[arg-type] # what record refuses
        if not isinstance(target.model, nn.Module):
            raise PropcheckError(
                f"{name}: must return a torch.nn.Module or a propcheck.Target; it returned something of type "
                f"{type(target.model).__name__}"
            )
        model = _with_own_places(target.model) if built else target.model
        if precision is not None and built:
            _cast(model, precision.parameters)
        elif precision is not None:
            model = model.to(precision.parameters)
        batch = target.batch if precision is None else _in_dtype(target.batch, precision.parameters)
        return Target(model.train(probe.scan.mode == "train"), batch, target.loss, target.blocks)

    return Task(
        build=build,
        batch=lambda model, seed: _token_batch(model, probe.inputs, seed),
        autocast=precision.autocast if precision is not None else None,
        loss_scale=precision.loss_scale if precision is not None else 1.0,
        precision=own,
        source=probe.inputs.source,
    )


def _in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch, or the function that makes it, with its floating-point tensors in the model's dtype."""
    if not callable(batch):
        return tree_map_only(Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, batch)

    @functools.wraps(batch)
    def made(*args: Any) -> Any:
        return _in_dtype(batch(*args), dtype)

    return made


def _find(target: str) -> object:
    """Import what ``target`` names."""
    place, _, name = target.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [one for one, value in vars(module).items() if not one.startswith("_") and callable(value)]
        near = difflib.get_close_matches(name, names, n=1)
        own = [one for one in names if getattr(vars(module)[one], "__module__", None) == module.__name__]
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(own) or 'nothing that can be called'}"
        raise PropcheckError(f"{shown(place)} has no {name}; {hint}") from None


def _import(name: str) -> ModuleType:
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # One that the module itself imports is its own error.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise PropcheckError(
            f"{name}: no module named {error.name}, neither installed nor in the working directory {Path.cwd()}"
        ) from None
    except TypeError as error:  # ".name", which is relative to nothing
        raise PropcheckError(f"{name}: {error}") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PropcheckError(f"{shown(str(path))}: no such file")
    _importable(Path.cwd())
    _importable(path.parent)
    path = path.resolve()
    # Under its own name, so that what it imports finds it, unless that one is somebody else's.
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"propcheck_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _importable(folder: Path) -> None:
    """Put ``folder`` first on the path, as ``python -m`` does with the working directory."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)


def _check_arguments(function: Callable[..., Any], args: Mapping[str, Any], name: str) -> None:
    try:
        takes = signature(function)
    except ValueError:  # written in C: it has to say it itself
        return
    try:
        takes.bind(**args)
    except TypeError as error:
        named = [
            key for key, one in takes.parameters.items() if one.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        ]
        unknown = next((key for key in args if key not in named), None)
        near = difflib.get_close_matches(unknown, named, n=1) if unknown else []
        hint = f"; did you mean {near[0]}?" if near else ""
        raise PropcheckError(f"{name} takes ({names_of(function)}): {error}{hint}; --arg KEY=VALUE gives one") from None


def _with_own_places(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` for the scan to change: its parameters share memory, and have gradients of their own."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in (*model.buffers(), *plain):
        memo.setdefault(id(tensor), tensor.detach().clone())  # a forward pass may count or average in them
    return copy.deepcopy(model, memo)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Do as ``model.to(dtype)``, with new parameters in the places of those of another dtype, which may be shared."""
    cast: dict[int, Any] = {}

    def of(tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in cast:
            value = tensor.detach().to(dtype)
            cast[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return cast[id(tensor)]

    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, of(tensor))


def _token_batch(model: nn.Module, inputs: InputsConfig, seed: int) -> Batch:
    """Return token ids ``[batch, tokens]``, with the next token of each if ``model.forward`` takes targets or labels."""
    vocabulary = inputs.vocabulary or _vocabulary(model)
    names = list(signature(model.forward).parameters)
    filled = next((name for name in ("targets", "labels") if name in names[1:]), None)
    if filled is None or (filled == "labels" and _shifts_labels(model)):
        return token_ids(inputs, vocabulary, seed)
    ids = token_ids(inputs.model_copy(update={"tokens": inputs.tokens + 1}), vocabulary, seed)
    return {names[0]: ids[:, :-1].contiguous(), filled: ids[:, 1:].contiguous()}


def _shifts_labels(model: nn.Module) -> bool:
    """Whether ``model`` comes from transformers, whose models shift ``labels`` by one token themselves."""
    return any(base.__module__.partition(".")[0] == "transformers" for base in type(model).__mro__)


def _vocabulary(model: nn.Module) -> int:
    rows = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if rows is None:
        raise PropcheckError(
            f"{type(model).__name__} has no nn.Embedding, so token ids are no guess at what it takes; return "
            "propcheck.Target(model, batch=...), or give --set inputs.vocabulary=N"
        )
    return rows
