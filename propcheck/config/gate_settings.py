"""What a gate lets pass: the ``[gate]`` section, and what was given beside it."""

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


def read_tolerances(keys: Mapping[str, object], given: Sequence[str] = (), option: str = "--tolerance") -> Tolerances:
    """Put what was given over the keys of ``[gate]``.

    Parameters
    ----------
    keys
        The section of a probe, or of a stored run's settings.
    given
        Each ``SHARE``, ``QUANTITY=SHARE`` or ``GLOB=SHARE``, as in ``5%``, ``loss=1%``, ``layers.0.*=20%``.
    option
        What a message calls them.

    Raises
    ------
    PropcheckError
        A share is none, or what it is for is neither a quantity nor a glob.
    """
    try:
        section = GateConfig.model_validate(dict(keys))
    except ValidationError as error:
        raise PropcheckError(f"[gate]: {explain(error, GateConfig)[1]}") from error
    allowed = section.tolerances
    share, quantities, modules = allowed.share, dict(allowed.quantities), dict(allowed.modules)
    for one in given:
        what, equals, value = one.rpartition("=")
        try:
            parsed = parse_tolerance(value)
        except ValueError as error:
            raise PropcheckError(f"{option} {one}: {error}") from None
        if not equals:
            share = parsed
        elif what in typing.get_args(Gated):
            quantities[what] = parsed  # type: ignore[index]
        elif any(sign in what for sign in "*?[."):
            modules[what] = parsed
        else:
            known = ", ".join(typing.get_args(Gated))
            raise PropcheckError(f"{option} {one}: {what!r} is no quantity ({known}) and no glob, as in 'layers.0.*=20%'")
    return Tolerances(share, quantities, modules, allowed.floor)
