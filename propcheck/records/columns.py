"""Column metadata of the record types: description, unit, names for people and Arrow type, each stated once.

A field of a record (:class:`~propcheck.records.SiteRecord`, ...) is annotated with :func:`about`. Parquet schemas, the page
of columns, table headings, plot labels and messages all read :func:`columns_of`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

Unit = Literal["RMS", "norm", "mean", "fraction", "ratio", "count", "elements", "nats"]

_ARROW_TYPES = {int: "int64", float: "double", bool: "bool", str: "string"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a Parquet file, and one field of a record.

    Attributes
    ----------
    name
        Name of the column and of the field.
    description
        One sentence for the documentation and the Parquet metadata.
    unit
        What the number is; None for names, indices and flags.
    label
        Short name, for table headings and plot axes: ``stream RMS``.
    phrase
        Long name without an article, for sentences: ``RMS of the stream``.
    value_type
        ``int``, ``float``, ``bool``, ``str``, or ``tuple`` for a list of integers.
    nullable
        Whether the value may be None.
    """

    name: str
    description: str
    unit: Unit | None
    label: str
    phrase: str
    value_type: type
    nullable: bool

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the column."""
        import pyarrow as pa

        return pa.list_(pa.int64()) if self.value_type is tuple else pa.type_for_alias(_ARROW_TYPES[self.value_type])


@dataclass(frozen=True, slots=True)
class _About:
    description: str
    unit: Unit | None
    label: str | None
    phrase: str | None


def about(description: str, *, unit: Unit | None = None, label: str | None = None, phrase: str | None = None) -> _About:
    """Describe a field of a record: ``stream_rms: Annotated[float | None, about("...", unit="RMS")] = None``.

    Parameters
    ----------
    description, unit, label, phrase
        See :class:`Column`. ``label`` defaults to the name of the field in words, ``phrase`` to ``label``.
    """
    return _About(description, unit, label, phrase)


@functools.cache
def columns_of(record_type: type) -> Mapping[str, Column]:
    """Return the columns of a record type by name, in the order of its fields.

    Parameters
    ----------
    record_type
        A dataclass whose fields are all annotated with :func:`about`, in a module that does not postpone annotations: the
        type of a column is the type of its field.
    """
    columns = {}
    for field in dataclasses.fields(record_type):
        annotation, about_field = typing.get_args(field.type)
        value_type, nullable = _value_type(annotation)
        label = about_field.label or field.name.replace("_", " ")
        columns[field.name] = Column(
            name=field.name,
            description=about_field.description,
            unit=about_field.unit,
            label=label,
            phrase=about_field.phrase or label,
            value_type=value_type,
            nullable=nullable,
        )
    return types.MappingProxyType(columns)


def _value_type(annotation: Any) -> tuple[type, bool]:
    """Return the type of an annotation's values, and whether it allows None."""
    arguments = typing.get_args(annotation)
    nullable = type(None) in arguments
    if nullable:
        (annotation,) = (argument for argument in arguments if argument is not type(None))
    origin = typing.get_origin(annotation)
    return str if origin is Literal else origin or annotation, nullable


def float_columns(record_type: type) -> tuple[str, ...]:
    """Return the names of the columns that hold real numbers."""
    return tuple(name for name, column in columns_of(record_type).items() if column.value_type is float)
