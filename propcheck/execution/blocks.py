"""Find the blocks of a model: the longest runs of modules of one family, or those that the target names."""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# These hold modules and cannot be called.
LISTS = (nn.ModuleList, nn.ModuleDict)
# A family with less than this share of the largest one's parameters is no run of blocks: heads, position encodings.
_LEAST_SHARE = 0.25

Named = tuple[str, nn.Module]


@dataclass(frozen=True, slots=True)
class _Run:
    """The members of one container that are mostly of one class; of a mixed one ``kind`` is ``nn.Module``."""

    path: str
    members: tuple[Named, ...]
    kind: type[nn.Module]

    @property
    def typical(self) -> list[nn.Module]:
        """Its members of that class."""
        return [member for _, member in self.members if isinstance(member, self.kind)]

    @property
    def size(self) -> int:
        """Elements of their parameters."""
        return sum(_numel(member) for member in self.typical)

    def holds(self, other: _Run) -> bool:
        """Whether ``other`` lies within one of its members."""
        return any(other.path == path or other.path.startswith(f"{path}.") for path, _ in self.members)


def named_blocks(model: nn.Module, names: str | Sequence[str]) -> list[Named]:
    """Return the modules that ``names`` says; of a container by itself, or one that cannot be called, its members.

    Raises
    ------
    PropcheckError
        If a name is none of a module, or of one within another.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks: list[Named] = []
    for name in [names] if isinstance(names, str) else names:
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=1, cutoff=0.4)
            hint = f"; do you mean {near[0]!r}?" if near else ""
            raise PropcheckError(f"blocks: {type(model).__name__} has no module {name!r}{hint}")
        module = modules[name]
        if isinstance(module, LISTS if not isinstance(names, str) else _CONTAINERS):
            blocks += [(f"{name}.{key}".lstrip("."), child) for key, child in module.named_children()]
        else:
            blocks.append((name, module))
    if any(not path for path, _ in blocks):
        raise PropcheckError("blocks: the model itself is no block of it")
    for path, _ in blocks:
        for other, _ in blocks:
            if path.startswith(f"{other}."):
                raise PropcheckError(f"blocks: {path!r} lies within {other!r}; name one of the two")
    if len({path for path, _ in blocks}) < len(blocks):
        raise PropcheckError("blocks: a module is named twice")
    return blocks


def find_blocks(model: nn.Module) -> list[Named]:
    """Return the blocks of ``model``, in order of its modules.

    A run is a container with members mostly of one class, or a list of different ones that is in no other run; within the
    members of a run, smaller ones (experts, heads, the layers of an MLP) are parts of its blocks. Exceptions are the stages of
    a hierarchical model, and towers: members that consist mostly of a run of blocks themselves, which is longer, or differs
    from one stage to the next and has next to nothing beside it. Blocks are told from experts by their norms. A family of runs
    with few parameters is left out, and one whose members have a single matrix each (patch embeddings, the convolutions before
    a speech model) where others have more.
    """
    runs = [run for path, module in model.named_modules() if (run := _run(path, module)) is not None]
    composed = [run for run in runs if not _is_leaf(run)]
    if not composed:  # a plain chain of layers
        return list(max(runs, key=lambda run: run.size).members) if runs else []
    chosen: list[_Run] = []
    pending = _outermost(composed)
    while pending:
        run = pending.pop(0)
        within = [one for one in composed if run.holds(one) and (one.kind is not nn.Module or len(run.members) == 1)]
        inner = [one for one in _outermost(within) if _has_norms(one)]
        if inner and _consists_of(run, inner):
            pending = inner + pending
        else:
            chosen.append(run)
    if any(_is_composed(run) for run in chosen):
        chosen = [run for run in chosen if _is_composed(run)]
    families: defaultdict[object, int] = defaultdict(int)
    for run in chosen:
        families[_family(run)] += run.size
    largest = max(families.values())
    return [member for run in chosen if families[_family(run)] >= _LEAST_SHARE * largest for member in run.members]


def _family(run: _Run) -> object:
    return run.path if run.kind is nn.Module else run.kind


def _run(path: str, module: nn.Module) -> _Run | None:
    if not isinstance(module, _CONTAINERS) or not len(module):
        return None
    members = tuple((f"{path}.{name}".lstrip("."), child) for name, child in module.named_children())
    if not members:
        return None
    kind, count = Counter(type(child) for _, child in members).most_common(1)[0]
    # Two kinds that take turns are a run too.
    mostly = 2 * count > len(members) or (count > 1 and 2 * count == len(members))
    if not mostly:
        composed = all(_numel(child) and any(True for _ in child.children()) for _, child in members)
        if not isinstance(module, nn.ModuleList) or not composed:
            return None
        kind = nn.Module
    run = _Run(path, members, kind)
    return run if run.size else None


def _outermost(runs: list[_Run]) -> list[_Run]:
    return [run for run in runs if not any(other.holds(run) for other in runs if other is not run)]


def _is_leaf(run: _Run) -> bool:
    """Whether a run is one of single layers of torch."""
    return type(run.typical[0]).__module__.startswith("torch.nn.") and not any(True for _ in run.typical[0].children())


def _is_composed(run: _Run) -> bool:
    """Whether the members of a run have more than one matrix."""
    return any(sum(_is_matrix(one) for one in member.parameters()) > 1 for member in run.typical)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _consists_of(run: _Run, inner: list[_Run]) -> bool:
    """Whether the members of ``run`` are stages or towers, made of the runs ``inner``."""
    within = sum(_numel(member) for one in inner for _, member in one.members)
    if 2 * within < run.size:
        return False
    longest = max(len(one.members) for one in inner)
    if longest > len(run.members) or len(run.members) == 1:
        return True
    alike = len({tuple(tuple(parameter.shape) for parameter in member.parameters()) for _, member in run.members}) == 1
    return not alike and _matrices_beside(run, inner) <= len(run.members)


def _matrices_beside(run: _Run, inner: list[_Run]) -> int:
    parts = {id(parameter) for one in inner for _, member in one.members for parameter in member.parameters()}
    every = {id(parameter): parameter for _, member in run.members for parameter in member.parameters()}
    return sum(_is_matrix(one) for key, one in every.items() if key not in parts)


def _has_norms(run: _Run) -> bool:
    return all(any("norm" in type(part).__name__.lower() for part in member.modules()) for member in run.typical)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
