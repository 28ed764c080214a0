"""Values of a configuration that are wrong by themselves: all of them are told at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Any, ClassVar, Protocol


class WrongValue(ValueError):
    """The value of a key is wrong, whatever the other keys are.

    Attributes:
        key: whose value it is.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key = key

    def __str__(self) -> str:
        return str(self.args[1])


class Validated(Protocol):
    """A dataclass of configuration keys, each with a default."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """
        Raises:
            WrongValue: a value is wrong, whatever the others are.
            ValueError: values do not go together.
        """


@contextmanager
def wrong_where(key: str) -> Iterator[None]:
    """Any ValueError raised within is about the value of this key alone."""
    try:
        yield
    except ValueError as error:
        raise WrongValue(key, str(error)) from error


def errors_of(config: Validated) -> list[ValueError]:
    """All that `validate` says of a configuration: every value that is wrong by itself, or, if
    there is none, the first error about values that do not go together."""
    keys = {each.name: each for each in fields(config)}
    found: list[ValueError] = []
    rest = copy.copy(config)
    while True:
        try:
            rest.validate()
        except WrongValue as error:
            found.append(error)
            if (key := keys.pop(error.key, None)) is None:  # what is wrong is no given value
                return found
            made = key.default_factory
            setattr(rest, key.name, key.default if made is MISSING else made())
        except ValueError as error:
            return found or [error]
        else:
            return found
