"""The user's own code as a target: a callable that builds a model, or a model that is built already."""

from __future__ import annotations

import copy
import functools
from inspect import signature
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from propcheck.errors import PropcheckError
from propcheck.targets.importing import check_arguments, import_target
from propcheck.targets.inputs import token_ids
from propcheck.targets.precision import PRESETS
from propcheck.targets.target import Target, Task
from propcheck.targets.user_errors import display_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from propcheck.config.probe import InputsConfig, Probe
    from propcheck.targets.target import Batch


def python_task(probe: Probe, model_or_builder: object = None, args: Mapping[str, Any] | None = None) -> Task:
    """Return the task of the user's own code.

    Parameters
    ----------
    probe
        Its ``[python]`` section names the code, unless ``model_or_builder`` is given.
    model_or_builder
        A callable that builds the model; or a built module or ``Target``, whose values are used as they are and which is not
        changed.
    args
        Keyword arguments of the callable; default: those in the probe.

    Raises
    ------
    PropcheckError
        If there is no such module or attribute, it is not callable, or it does not take the arguments.
    """
    name = display_path(probe.python.target)
    code = model_or_builder if model_or_builder is not None else import_target(probe.python.target)
    args = dict(probe.python.args if args is None else args)
    is_built = isinstance(code, nn.Module | Target)
    if is_built and args:
        raise PropcheckError(f"{name}: the model is built already and takes no arguments ({', '.join(args)})")
    if not is_built:
        if not callable(code):
            raise PropcheckError(
                f"{name}: must be a callable that returns the model, not an object of type {type(code).__name__}"
            )
        check_arguments(code, args, name)
    precision = PRESETS[probe.precision.preset] if probe.precision.preset is not None else None

    def build() -> Target:
        result = code if is_built else code(**args)  # type: ignore[operator] # checked above
        target = result if isinstance(result, Target) else Target(result)  # type: ignore[arg-type] # checked below
        if not isinstance(target.model, nn.Module):
            raise PropcheckError(
                f"{name}: must return a torch.nn.Module or a propcheck.Target, but returned an object of type "
                f"{type(target.model).__name__}"
            )
        model, batch = _copy(target.model) if is_built else target.model, target.batch
        if precision is not None:
            dtype = precision.parameters
            model, batch = _cast_copy(model, dtype) if is_built else model.to(dtype), _cast_batch(batch, dtype)
        return Target(model.train(probe.scan.mode == "train"), batch, target.loss, target.blocks)

    return Task(
        build=build,
        batch=lambda model, seed: _token_batch(model, probe.inputs, seed),
        autocast=precision.autocast if precision is not None else None,
        loss_scale=precision.loss_scale if precision is not None else 1.0,
        precision=probe.precision.preset,
        source=probe.inputs.source,
    )


def _cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch, or the function that makes it, with its floating-point tensors cast to ``dtype``."""
    if not callable(batch):
        return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)

    @functools.wraps(batch)
    def cast(*args: Any) -> Any:
        return _cast_batch(batch(*args), dtype)

    return cast


def _copy(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that the scan may change: parameters share memory but have their own gradients."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        vars(memo[id(parameter)]).update(vars(parameter))
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    for tensor in (*model.buffers(), *attributes):
        memo.setdefault(id(tensor), tensor.detach().clone())  # a forward pass may write to them
    return copy.deepcopy(model, memo)


def _cast_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast as ``model.to(dtype)`` does, but with new parameters: those of the copy share memory with the user's model."""
    casts: dict[int, Any] = {}

    def cast(tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or tensor.dtype == dtype:
            return tensor
        if id(tensor) not in casts:
            value = tensor.detach().to(dtype)
            casts[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        return casts[id(tensor)]

    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            setattr(module, name, cast(tensor))
    return model


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
            f"{type(model).__name__} has no nn.Embedding, so it is unlikely to take token ids; return "
            "propcheck.Target(model, batch=...), or use --set inputs.vocabulary=N"
        )
    return rows
