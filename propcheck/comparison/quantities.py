"""The quantities that two runs are compared by: names for people, direction of travel, and the gate check they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from propcheck.records import ParameterRecord, SiteRecord
from propcheck.records.columns import columns_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from propcheck.config.tolerances import Quantity

Direction = Literal["forward", "backward"]
Noun = Literal["site", "parameter", "loss"]

FORWARD: tuple[Quantity, ...] = ("stream_rms", "update_rms")
BACKWARD: tuple[Quantity, ...] = ("grad_stream_norm", "grad_update_norm", "param_grad_norm")


@dataclass(frozen=True, slots=True)
class ComparedQuantity:
    """One quantity of a comparison.

    Attributes
    ----------
    label, phrase
        Its name in table headings and in sentences, as in :class:`propcheck.records.columns.Column`.
    noun
        What has a value of it.
    check
        Check of the gate that it fails.
    direction
        Pass in which a change of it spreads: initial values and activations forward, gradients backward. None for the loss, and
        for the ratio of update and stream, which follows from the two.
    """

    label: str
    phrase: str
    noun: Noun
    check: str
    direction: Direction | None


def _of_column(record_type: type, name: Quantity, check: str, direction: Direction | None) -> ComparedQuantity:
    column = columns_of(record_type)[name]
    return ComparedQuantity(column.label, column.phrase, "site" if record_type is SiteRecord else "parameter", check, direction)


# In the order of the tables.
QUANTITIES: Mapping[Quantity, ComparedQuantity] = {
    **{name: _of_column(SiteRecord, name, "gate-stream", "forward") for name in FORWARD},
    "update_ratio": _of_column(SiteRecord, "update_ratio", "gate-stream", None),
    **{name: _of_column(SiteRecord, name, "gate-gradient", "backward") for name in BACKWARD},
    "parameter_rms": ComparedQuantity("parameter RMS", "RMS of a parameter", "parameter", "gate-init", "forward"),
    "grad_norm": _of_column(ParameterRecord, "grad_norm", "gate-gradient", "backward"),
    "loss": ComparedQuantity("first loss", "first loss", "loss", "gate-loss", None),
}
