"""Reads tables of a configuration that have a dataclass of their own. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

import msgspec

from juggler.runtime.kinds import expected, shown
from juggler.runtime.nearest import nearest

T = TypeVar("T")


def from_table(kind: type[T], name: str, table: Mapping[str, Any]) -> T:
    """A dataclass of a table with its fields.

    Args:
        kind: the dataclass.
        name: of the table, for errors.
        table: values by key.

    Raises:
        ValueError: a key is unknown, or a value has another type; names both.
    """
    hints = get_type_hints(kind)
    known = [key.name for key in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}{nearest(key, known)}")
        try:
            values[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            said = f"{name}.{key}: expected {expected(hints[key])}, not {shown(value)}"
            raise ValueError(said) from error
    return kind(**values)
