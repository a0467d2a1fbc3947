"""Tolerances of ``compare`` and ``gate``: the compared quantities, shares such as ``"5%"``, and which share applies where."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Columns of sublayers.parquet; for each parameter its ``grad_norm`` and its RMS, sqrt(mean^2 + std^2); and the first loss. The
# ratio of update and stream follows from these: ``compare`` shows it, ``gate`` does not check it.
Gated = Literal[
    "stream_rms",
    "update_rms",
    "grad_stream_norm",
    "grad_update_norm",
    "param_grad_norm",
    "parameter_rms",
    "grad_norm",
    "loss",
]
Quantity = Gated | Literal["update_ratio"]

# A gate that lets a factor of more than ten pass either way checks nothing.
_LARGEST_SHARE = 9.0


def parse_tolerance(value: Any) -> float:
    """Read ``"5%"``, ``"0.05"`` or 0.05 as the share by which a value may grow, or shrink by the same factor.

    Raises
    ------
    ValueError
        It is not a share, is negative or not finite, or is larger than 900 %.
    """
    text = value.strip() if isinstance(value, str) else value
    percent = isinstance(text, str) and text.endswith("%")
    if isinstance(value, bool) or not isinstance(text, str | int | float):
        raise ValueError('must be a share such as "5%" or 0.05')  # noqa: TRY004 - pydantic turns a ValueError into one line
    try:
        share = float(text.removesuffix("%")) / (100 if percent else 1) if isinstance(text, str) else float(text)
    except ValueError:
        raise ValueError('must be a share such as "5%" or 0.05') from None
    if not 0 <= share < math.inf:  # NaN too
        raise ValueError('must be finite and 0 or more, as in "5%"')
    if not percent and share >= 1:
        raise ValueError(f'is {100 * share:g} %; write "{share:g}%" or "{100 * share:g}%"')
    if share > _LARGEST_SHARE:
        raise ValueError(
            f'accepts a factor of {1 + share:g}, which checks nothing; the largest tolerance is "{100 * _LARGEST_SHARE:g}%"'
        )
    return share


@dataclass(frozen=True, slots=True)
class Tolerances:
    """By how much numbers may differ.

    Attributes
    ----------
    share
        0.05 accepts values that are up to 5 % larger, or smaller by the same factor.
    quantities
        Shares of single quantities, which override ``share``.
    modules
        Shares by glob over module paths and parameter names, which override both; the last matching glob applies.
    floor
        Values whose magnitude is at most this in both runs count as zero.
    """

    share: float = 0.05
    quantities: Mapping[Quantity, float] = field(default_factory=dict)
    modules: Mapping[str, float] = field(default_factory=dict)
    floor: float = 1e-12

    def of(self, quantity: Quantity, names: Iterable[str | None]) -> float:
        """Return the share for a quantity at a place that has these module and parameter names."""
        known = [name for name in names if name is not None]
        matching = [share for glob, share in self.modules.items() if any(fnmatchcase(name, glob) for name in known)]
        return matching[-1] if matching else self.quantities.get(quantity, self.share)
