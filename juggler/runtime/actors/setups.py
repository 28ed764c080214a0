"""What a worker is set up with, as JSON on its way from the driver."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


def to_json(setup: DataclassInstance) -> str:
    """
    Raises:
        TypeError, ValueError: JSON cannot hold something in it.
    """
    return json.dumps(asdict(setup))


def from_json(text: str, kind: type[S]) -> S:
    """
    Raises:
        ValueError: a field is missing, or of another type.
    """
    try:
        return msgspec.convert(json.loads(text), kind)  # msgspec's own JSON has no infinity
    except msgspec.ValidationError as error:
        raise ValueError(f"the driver sent an invalid {kind.__name__}: {error}") from None
