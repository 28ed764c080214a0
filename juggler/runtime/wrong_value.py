"""Values of a configuration that are wrong by themselves: all of them are told at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
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
            if (key := keys.pop(error.key, None)) is None:  # what is wrong is no given value
                return [*found, error]
            value = getattr(rest, key.name)
            is_table = isinstance(value, Mapping)
            check = partial(_must_be_right, rest, key.name)
            found += errors_in(value, check) if is_table else [error]
            made = key.default_factory
            setattr(rest, key.name, key.default if made is MISSING else made())
        except ValueError as error:
            return found or [error]
        else:
            return found


def errors_in(table: Mapping[str, Any], check: Callable[[Any], object]) -> list[ValueError]:
    """List all errors in a table.

    After each error, the entry at fault is removed, and the rest is checked again.

    Args:
        table: a table of a configuration.
        check: raises a ValueError for the first error in a table.
    """
    found: list[ValueError] = []
    error = _first_error(table, check)
    while error is not None:
        tried = ((*each, _first_error(each[0], check)) for each in _without_one(table))
        at_fault = (each for each in tried if str(each[2]) != str(error))
        rest, is_table, later = next(at_fault, (table, True, None))
        # An error that only the removal of a whole table mends may follow from an entry that was
        # removed from that table.
        if not found or not is_table:
            found.append(error)
        table, error = rest, later
    return found


def _must_be_right(config: Validated, key: str, value: Any) -> None:
    """
    Raises:
        WrongValue: the value of this key is wrong by itself.
    """
    changed = copy.copy(config)
    setattr(changed, key, value)
    try:
        changed.validate()
    except WrongValue as error:
        if error.key == key:
            raise
    except ValueError:
        pass  # an error about several values together


def _first_error(table: Mapping[str, Any], check: Callable[[Any], object]) -> ValueError | None:
    try:
        check(table)
    except ValueError as error:
        return error
    return None


def _without_one(table: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the table without each entry; true if that was a table.

    Entries of nested tables come first.
    """
    for key, value in table.items():
        is_table = isinstance(value, Mapping)
        if is_table:
            yield from (({**table, key: rest}, inner) for rest, inner in _without_one(value))
        yield {each: table[each] for each in table if each != key}, is_table
