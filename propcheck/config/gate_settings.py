"""Tolerances from the ``[gate]`` section of a probe, with those of ``--tolerance`` on top."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

from pydantic import ValidationError

from propcheck.config.probe import GateConfig
from propcheck.config.schema_docs import explain
from propcheck.config.tolerances import Gated, Tolerances, parse_tolerance
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def read_tolerances(keys: Mapping[str, object], overrides: Sequence[str] = (), option: str = "--tolerance") -> Tolerances:
    """Read the ``[gate]`` section and apply overrides.

    Parameters
    ----------
    keys
        The section of a probe, or of a stored run's settings.
    overrides
        Each ``SHARE``, ``QUANTITY=SHARE`` or ``GLOB=SHARE``, as in ``5%``, ``loss=1%``, ``layers.0.*=20%``.
    option
        Name of the overrides in error messages.

    Raises
    ------
    PropcheckError
        A share is wrong, or its name is neither a quantity nor a glob.
    """
    try:
        section = GateConfig.model_validate(dict(keys))
    except ValidationError as error:
        raise PropcheckError(f"[gate]: {explain(error, GateConfig)[1]}") from error
    tolerances = section.tolerances
    share, quantities, modules = tolerances.share, dict(tolerances.quantities), dict(tolerances.modules)
    for override in overrides:
        name, equals, value = override.rpartition("=")
        try:
            parsed = parse_tolerance(value)
        except ValueError as error:
            raise PropcheckError(f"{option} {override}: {error}") from None
        if not equals:
            share = parsed
        elif name in typing.get_args(Gated):
            quantities[name] = parsed  # type: ignore[index]
        elif any(sign in name for sign in "*?[."):
            modules[name] = parsed
        else:
            names = ", ".join(typing.get_args(Gated))
            raise PropcheckError(
                f"{option} {override}: {name!r} is neither a quantity ({names}) nor a glob such as 'layers.0.*'"
            )
    return Tolerances(share, quantities, modules, tolerances.floor)
