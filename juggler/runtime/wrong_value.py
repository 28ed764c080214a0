"""Errors about values of configuration keys, for people."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from itertools import pairwise
from numbers import Real
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Protocol,
    Union,
    cast,
    get_args,
    get_origin,
)

import msgspec

from juggler.runtime.near_matches import all_of, nearest, one_of

_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a table",
    NoneType: '"none"',
}
#: Plurals, for elements of a list or a table.
_SEVERAL: Final[Mapping[Any, str]] = {
    int: "whole numbers",
    float: "numbers",
    str: "strings",
    dict: "tables",
}
_LONGEST_SHOWN: Final = 60


def misfit(hint: Any, value: object) -> str:
    """Describe a wrong type: "expected a number, not ...".

    Args:
        hint: the evaluated type.
        value: of the key.
    """
    if get_origin(hint) is Literal and isinstance(value, str):
        return f"{value!r} is not known{nearest(value, map(str, get_args(hint)))}"
    return f"expected {expected(hint) or 'another value'}, not {shown(value)}"


def expected(hint: Any) -> str:
    """Describe a type: "a number, or ...".

    Args:
        hint: the evaluated type. Without a description the result is "".
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Annotated:
        return expected(inner[0])
    if kind is Literal:
        return one_of(json.dumps(each) for each in inner)
    if kind in (Union, UnionType):
        words = [expected(each) for each in inner]
        return ", or ".join(words) if all(words) else ""
    if inner == (tuple[float, float],):
        return "a schedule: a list of [step, value] pairs"
    if kind is tuple and len({*inner}) == 1 and inner[0] in _SEVERAL:
        return f"a list of {len(inner)} {_SEVERAL[inner[0]]}"
    of = _several(inner[-1]) if kind in (list, Sequence, dict) and inner else ""
    return _WORDS.get(kind, "") + (f" of {of}" if of else "")


def _several(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        words = [_several(each) for each in inner]
        return one_of(words) if all(words) else ""
    return "lists" if kind is list else _SEVERAL.get(kind, "")


def shown(value: object) -> str:
    """Describe a value for an error; long values by their kind."""
    if value is None:
        return "none"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = ""
    if text and len(text) <= _LONGEST_SHOWN:
        return text
    if isinstance(value, list | tuple) and value and not text:
        return f"a list with {all_of(dict.fromkeys(map(shown, value)))}"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    return _WORDS.get(type(value), f"an object of type {type(value).__name__}")


class WrongValue(ValueError):
    """A key's value is wrong regardless of other keys.

    Attributes:
        key: the key with the wrong value.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(key, message)
        self.key = key

    def __str__(self) -> str:
        return str(self.args[1])


class CheckedKeys:
    """Checks of single keys, for `validate` of derived classes.

    Each raises a WrongValue. A key may be None if its type says so.

    Attributes:
        table: name of the table that has the keys; "": none.
    """

    table: ClassVar[str] = ""

    def check_one_of(self, key: str, choices: Sequence[str]) -> None:
        """Check that a key is one of these words."""
        if (value := getattr(self, key)) not in choices:
            raise self._wrong(key, f"{value!r} is not known{nearest(value, choices)}")

    def check_above(self, key: str, limit: float, *, or_inf: bool = False) -> None:
        """Check that a key is above a limit, or infinite if `or_inf`."""
        self._check(key, f"above {limit}", lambda value: value > limit, or_inf)

    def check_at_least(self, key: str, limit: float, *, or_inf: bool = False) -> None:
        """Check that a key reaches a limit, or is infinite if `or_inf`."""
        self._check(key, f"at least {limit}", lambda value: value >= limit, or_inf)

    def check_within(
        self, key: str, value: float, low: float, high: float, *, below: bool = False
    ) -> None:
        """Check that a value is in [low, high]; `below` excludes high."""
        if not (low <= value < high or (value == high and not below)):
            allowed = f"at least {low} and {'below' if below else 'at most'} {high}"
            raise self._wrong(key, f"{getattr(self, key)}: must be {allowed}")

    def check_finite(self, key: str) -> None:
        """Check that a key is a finite number."""
        self._check(key, "a number", math.isfinite)

    def _check(
        self, key: str, rule: str, holds: Callable[[float], bool], or_inf: bool = False
    ) -> None:
        value = getattr(self, key)
        # Annotations are texts here, and scripts may set any value.
        types = {each.name: str(each.type) for each in fields(cast("Any", self))}
        if value is None and "None" in types[key]:
            return
        is_number = isinstance(value, Real)
        if not (is_number and holds(value) and (or_inf or value < math.inf)):
            also = " and finite" if is_number and not (or_inf or math.isfinite(value)) else ""
            raise self._wrong(key, f"{value}: must be {rule}{also}")

    def _wrong(self, key: str, what: str) -> WrongValue:
        return WrongValue(key, f"{self.table}{'.' if self.table else ''}{key} = {what}")


def points_of(given: Any) -> list[tuple[float, float]]:
    """Return the (step, value) pairs of a schedule, or of a number.

    Between two pairs a schedule is linear, and constant before the first and after the last.

    Raises:
        ValueError: it is neither, or its steps do not rise from 0.
    """
    try:
        pairs = [(0, given)] if isinstance(given, (int, float)) else [*map(tuple, given)]
        points = [(float(step), float(value)) for step, value in pairs]
    except (TypeError, ValueError):
        points = []
    steps = [step for step, _ in points]
    rises = bool(steps) and steps[0] >= 0 and all(a < b for a, b in pairwise(steps))
    finite = all(math.isfinite(number) for point in points for number in point)
    if isinstance(given, bool) or not rises or not finite:
        raise ValueError("expected a number, or [step, value] pairs by rising step")
    return points


class Validated(Protocol):
    """A dataclass of configuration keys, each with a default."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """Check a configuration.

        Raises:
            WrongValue: a value is wrong for all other values.
            ValueError: values contradict each other.
        """


def converted(table: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert the values of a table to the types of its keys.

    Args:
        table: as in a file.
        hints: evaluated types by key.
        where: name of the table.

    Raises:
        ValueError: a key is unknown, or a value is not of its type; names both.
    """
    values = {}
    for key, value in table.items():
        if key not in hints:
            raise ValueError(f"{where} has no key {key!r}{nearest(key, hints)}")
        try:
            values[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            raise ValueError(f"{where}.{key}: {misfit(hints[key], value)}") from error
    return values


@contextmanager
def wrong_where(key: str) -> Iterator[None]:
    """Turn ValueErrors raised within into errors about this key's value."""
    try:
        yield
    except ValueError as error:
        raise WrongValue(key, str(error)) from error


def errors_of(config: Validated) -> list[ValueError]:
    """Return all errors that `validate` finds in a configuration.

    These are all values that are wrong by themselves, or else the first contradiction between
    values.
    """
    keys = {each.name: each for each in fields(config)}
    found: list[ValueError] = []
    rest = copy.copy(config)
    while True:
        try:
            rest.validate()
        except WrongValue as error:
            if (key := keys.pop(error.key, None)) is None:  # the wrong value was not given
                return [*found, error]
            # A table may have several wrong entries; of a value, one error is known.
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

    After each error, the wrong entry is removed, and the rest is checked again.

    Args:
        table: a table of a configuration.
        check: raises a ValueError for the first error in a table.
    """
    found: list[ValueError] = []
    error = _first_error(table, check)
    while error is not None:
        tried = [(*each, _first_error(each[0], check)) for each in _without_one(table)]
        at_fault = [each for each in tried if str(each[2]) != str(error)]
        # Without an entry that decides what others mean, other entries are wrong: an entry whose
        # removal leaves no error is rather at fault.
        at_fault.sort(key=lambda each: each[1] or each[2] is not None)
        rest, is_table, later = next(iter(at_fault), (table, True, None))
        # An error that only disappears with a whole table may be caused by an entry that was
        # removed from it.
        if not found or not is_table:
            found.append(error)
        table, error = rest, later
    return found


def _must_be_right(config: Validated, key: str, value: Any) -> None:
    """Raise WrongValue if a key's value is wrong by itself."""
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
