"""What can be the value of a key, in words for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from juggler.runtime.nearest import all_of, nearest, one_of

_WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a table",
    NoneType: '"none"',
}
#: Of those that are in a list or a table.
_SEVERAL: Final[Mapping[Any, str]] = {
    int: "whole numbers",
    float: "numbers",
    str: "strings",
    dict: "tables",
}
_LONGEST_SHOWN: Final = 60


def misfit(hint: Any, value: object) -> str:
    """What is wrong with a value that is not of its key's type, such as "expected a number, not
    "fast"".

    Args:
        hint: the type, as it is evaluated.
        value: of the key.
    """
    if get_origin(hint) is Literal and isinstance(value, str):
        return f"{value!r} is not known{nearest(value, map(str, get_args(hint)))}"
    return f"expected {expected(hint) or 'another value'}, not {shown(value)}"


def expected(hint: Any) -> str:
    """What a value of a type is, such as "a number, or "none"".

    Args:
        hint: the type, as it is evaluated; "" where there are no words for it.
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
    of = _several(inner[-1]) if kind in (list, dict) and inner else ""
    return _WORDS.get(kind, "") + (f" of {of}" if of else "")


def _several(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        words = [_several(each) for each in inner]
        return one_of(words) if all(words) else ""
    return "lists" if kind is list else _SEVERAL.get(kind, "")


def shown(value: object) -> str:
    """A value for an error, as in a file; what is long or cannot be there, by its kind."""
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
