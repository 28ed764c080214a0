"""How values of options are read, and what is said of those that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import tyro

from juggler.learner.optim.config import Scheduled
from juggler.runtime.kinds import misfit

T = TypeVar("T")


def registry_of_values(*, checked: bool = True) -> tyro.constructors.ConstructorRegistry:
    """Of the kinds of values that tyro reads otherwise, or of whose errors it says less.

    Args:
        checked: a wrong value is an error; False: it is read as None.
    """
    registry = tyro.constructors.ConstructorRegistry()

    def reading(read: Callable[[list[str]], Any]) -> Callable[[list[str]], Any]:
        def leniently(given: list[str]) -> Any:
            with suppress(ValueError):
                return read(given)

        return read if checked else leniently

    @registry.primitive_rule
    def word(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """One of several words, of which the nearest is named where another is given."""
        words = get_args(info.type)
        if get_origin(info.type) is not Literal:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=f"{{{','.join(words)}}}",
            instance_from_str=reading(lambda given: _word(given[0], info.type)),
            is_instance=lambda value: value in words or not checked,
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def table(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """A free-form table is JSON on the command line."""
        if info.type is not dict and get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=reading(_from_json),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    @registry.primitive_rule
    def number_or_table(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """A number, or JSON for a table of numbers."""
        kinds = set(get_args(info.type)) - {NoneType}
        if kinds != {float, dict[str, float]}:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="FLOAT|JSON",
            instance_from_str=reading(_number_or_table),
            is_instance=lambda value: value is None or isinstance(value, float | int | dict),
            str_from_instance=lambda value: [
                "none"
                if value is None
                else json.dumps(value)
                if type(value) is dict
                else str(value)
            ],
        )

    @registry.primitive_rule
    def text_or_number(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """As in files, "none" is the word for None; and for no text, which is shown so too."""
        kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
        optional = len(kinds) == 1 and NoneType in get_args(info.type)
        kind = kinds[0] if optional else info.type
        if kind not in ((str, int, float) if optional else (str,)):
            return None
        nothing = None if optional else ""
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=reading(
                lambda given: nothing if given[0] == "none" else _number(given[0], kind)
            ),
            is_instance=lambda value: value == nothing or isinstance(value, kind),
            str_from_instance=lambda value: ["none" if value == nothing else str(value)],
        )

    @registry.primitive_rule
    def number(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """A number, whose error says what is expected."""
        kind = info.type
        if kind not in (int, float):
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=kind.__name__.upper(),
            instance_from_str=reading(lambda given: _number(given[0], kind)),
            is_instance=lambda value: type(value) is kind or (kind is float and type(value) is int),
            str_from_instance=lambda value: [str(value)],
        )

    @registry.primitive_rule
    def schedule(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        """A number, or the pairs of a schedule, one after the other."""
        if info.type != Scheduled:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs="*",
            metavar="FLOAT|STEP FLOAT STEP FLOAT ...",
            instance_from_str=reading(_schedule),
            is_instance=lambda value: isinstance(value, float | int | list),
            str_from_instance=lambda value: (
                [str(each) for pair in value for each in pair]
                if isinstance(value, list)
                else [str(value)]
            ),
        )

    return registry


def _word(given: str, kind: Any) -> str:
    if given not in get_args(kind):
        raise ValueError(misfit(kind, given))
    return given


def _number(given: str, kind: type[T]) -> T:
    with suppress(ValueError):
        return kind(given)  # type: ignore[call-arg]
    try:
        if not float(given).is_integer():  # 1e6 is a whole number, too
            raise ValueError
        return kind(float(given))  # type: ignore[call-arg]
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise ValueError(f"expected {expected}, not {given!r}") from None


def _schedule(given: list[str]) -> float | list[tuple[float, float]]:
    if len(given) == 1:
        try:
            return float(given[0])
        except ValueError:
            pass
    try:
        numbers = [float(each) for each in given]
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    except ValueError:
        hint = "; what else the command takes goes before the options" if len(given) > 1 else ""
        raise ValueError(
            "expected a number, or a step and a value again and again, as in 0 1e-3 1000000 1e-4, "
            f"not {' '.join(given)!r}{hint}"
        ) from None


def _number_or_table(arguments: list[str]) -> float | dict[str, Any] | None:
    if arguments[0] == "none":
        return None
    if not arguments[0].lstrip().startswith("{"):
        return _number(arguments[0], float)
    table = _from_json(arguments)
    for name, value in table.items():
        if type(value) not in (int, float):
            raise ValueError(f"{name}: expected a number, not {value!r}")
    return {name: float(value) for name, value in table.items()}


def _from_json(arguments: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(arguments[0])
    except json.JSONDecodeError as error:
        told = f"expected a JSON object, as in '{{\"key\": 1}}', not {arguments[0]!r} ({error})"
        raise ValueError(told) from error
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object, as in '{\"key\": 1}'")
    return value
