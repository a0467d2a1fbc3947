"""Groups of modules whose parameters all break a rule, and the hit of such a group: PC304 and PC501."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import path, pattern, subject
from propcheck.formatting import count, places
from propcheck.records import Place
from propcheck.rules.rule import Hit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.records import ParameterRecord

# Modules of one name pattern, by path, each with the affected parameters in it.
ModuleGroup = dict[str, list["ParameterRecord"]]


def module_groups(parameters: Sequence[ParameterRecord], affected: set[str]) -> list[ModuleGroup]:
    """Group affected parameters by the highest module in which every parameter is affected.

    Modules with the same name pattern (``layers.*.mlp``) are one group. A parameter in a module that also has unaffected ones
    stands for itself. A tied parameter counts in each of its places.

    Parameters
    ----------
    parameters
        All parameters that count.
    affected
        Names of the affected ones.
    """
    total: dict[str, int] = {}
    affected_in: dict[str, int] = {}
    for parameter in parameters:
        for name in parameter.name.split(" = "):
            for module in _enclosing(name):
                total[module] = total.get(module, 0) + 1
                affected_in[module] = affected_in.get(module, 0) + (parameter.name in affected)
    groups: dict[str, ModuleGroup] = {}
    for parameter in parameters:
        if parameter.name in affected:
            highest = next(module for module in _enclosing(path(parameter)) if total[module] == affected_in[module])
            groups.setdefault(pattern(highest), {}).setdefault(highest, []).append(parameter)
    return list(groups.values())


def parameters_of(group: ModuleGroup) -> list[ParameterRecord]:
    """List the affected parameters of a group."""
    return [parameter for members in group.values() for parameter in members]


def group_subject(group: ModuleGroup) -> str:
    """Write ``The parameter a.b``, ``The module a`` or ``The 4 modules layers.*.a (blocks 0 to 3)``."""
    if _is_parameter(group):
        return subject(parameters_of(group))
    first = next(iter(group))
    if len(group) == 1:
        return f"The module {first}"
    blocks = [parameter.block for parameter in parameters_of(group) if parameter.block is not None]
    where = f" ({places('block', blocks)})" if blocks else ""
    return f"The {count(len(group), 'module')} {pattern(first)}{where}"


def group_hit(group: ModuleGroup, *, metric: str, value: float | str, expected: float | str, message: str) -> Hit:
    """Return a hit at the first module of a group, or at its parameter."""
    module, first = next(iter(group)), parameters_of(group)[0]
    place = Place(
        block=first.block,
        sublayer=first.sublayer,
        module=module.rpartition(".")[0] if module == path(first) else module,
        parameter=first.name if _is_parameter(group) else None,
    )
    return Hit((), place if module else Place(), metric, value, expected, message)


def _enclosing(name: str) -> list[str]:
    """List the modules around a parameter, from the whole model ("") down, and the parameter itself."""
    parts = name.split(".")
    return ["", *(".".join(parts[:length]) for length in range(1, len(parts) + 1))]


def _is_parameter(group: ModuleGroup) -> bool:
    return all(len(members) == 1 for members in group.values())
