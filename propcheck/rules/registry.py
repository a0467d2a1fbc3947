"""The list of all rules, and their selection by id, name or family."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from propcheck.errors import PropcheckError
from propcheck.rules import coverage, gradient, head, parameters, stream

if TYPE_CHECKING:
    from collections.abc import Collection

    from propcheck.rules.rule import Rule

# By the first characters of the ids: what the rules of a family judge.
FAMILIES = {
    "PC1": "Parameters",
    "PC2": "Stream and branches",
    "PC3": "Gradient",
    "PC4": "Head and loss",
    "PC5": "Coverage",
}

# One list of rules per family folder.
_FAMILIES = (parameters, stream, gradient, head, coverage)

ALL: tuple[Rule, ...] = tuple(sorted((rule for family in _FAMILIES for rule in family.RULES), key=lambda rule: rule.id))


def find(name: str) -> Rule:
    """Find a rule by its id or its name.

    Raises
    ------
    PropcheckError
        If there is no such rule. The message suggests the nearest.
    """
    for rule in ALL:
        if name.lower() in (rule.id.lower(), rule.name):
            return rule
    names = [text for rule in ALL for text in (rule.id, rule.name)]
    near = difflib.get_close_matches(name.upper() if name[:2].upper() == "PC" else name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else f"; the rules are {', '.join(rule.id for rule in ALL)}"
    raise PropcheckError(f"unknown rule {name}{hint}")


def chosen(select: Collection[str] = (), ignore: Collection[str] = ()) -> list[Rule]:
    """List the rules to judge by.

    Parameters
    ----------
    select
        Ids, names or families (``PC1``) of the rules to use; empty means all.
    ignore
        Ids, names or families of the rules to leave out of them.

    Raises
    ------
    PropcheckError
        If a rule is unknown.
    """
    selected = {id_ for name in select for id_ in _ids(name)} or {rule.id for rule in ALL}
    ignored = {id_ for name in ignore for id_ in _ids(name)}
    return [rule for rule in ALL if rule.id in selected - ignored]


def _ids(name: str) -> set[str]:
    """Expand a family to the ids of its rules, and a name to its id."""
    family = name.upper() if re.fullmatch(r"pc\d\d?", name, re.IGNORECASE) else None
    members = {rule.id for rule in ALL if family and rule.id.startswith(family)}
    return members or {find(name).id}
