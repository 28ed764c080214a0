"""Finds builders by name, from this package and from users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, Final, get_args, get_type_hints

import msgspec

from juggler.driver.league.alphastar import AlphaStar
from juggler.driver.league.builder import LeagueBuilder
from juggler.driver.league.rllib import Rllib
from juggler.driver.league.self_play import Fictitious, SelfPlay, SelfPlayWindow
from juggler.runtime.annotations import typed_by
from juggler.runtime.modules.import_by_name import NamedClasses
from juggler.runtime.near_matches import nearest
from juggler.runtime.wrong_value import misfit

#: The builder that begins with learning players, and changes nothing.
NO_BUILDER: Final = "none"

#: The builders that ship.
BUILDERS: Final[dict[str, type[LeagueBuilder]]] = {
    "alphastar": AlphaStar,
    "fictitious": Fictitious,
    NO_BUILDER: LeagueBuilder,
    "rllib": Rllib,
    "self_play": SelfPlay,
    "self_play_window": SelfPlayWindow,
}

#: Types of keys whose values are checked: a user's builder may have keys of other types.
_PLAIN: Final = (int, float, str, bool, int | None, float | None, str | None, bool | None)


def _checked(name: str, kind: object) -> type[LeagueBuilder]:
    """Check that this is a builder class with types for its keys."""
    if not (isinstance(kind, type) and issubclass(kind, LeagueBuilder)):
        raise ValueError(
            f"builder {name!r} must be a class derived from juggler.LeagueBuilder, not {kind!r}"
        )
    own = [key for key in typed_by(kind) if not key.startswith("_")]
    if own and "__dataclass_fields__" not in vars(kind):
        raise ValueError(
            f"builder {name!r} has its own keys, such as {own[0]!r}: write "
            "@dataclass(kw_only=True) above the class"
        )
    assert is_dataclass(kind)
    return kind


_classes = NamedClasses("builder", BUILDERS, _checked, "league={{'builder': {}, ...}}")
find_builder = _classes.find
register_builder = _classes.register


def make_builder(name: object, options: Mapping[str, Any]) -> LeagueBuilder:
    """
    Args:
        name: as `find_builder` takes it.
        options: the builder's keys.

    Raises:
        ValueError: there is no such builder, or it has no such key, or a value is wrong.
    """
    kind = find_builder(name)
    must_be_keys(options, kind, "options")
    try:
        hints = get_type_hints(kind)
    except NameError:  # the types are imported only for a type checker
        hints = {}
    try:
        values = {
            key: of_type(key, value, hints[key]) if hints.get(key) in _PLAIN else value
            for key, value in options.items()
        }
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"options: {error}") from None


def must_be_keys(table: Mapping[str, Any], kind: type[Any], name: str) -> None:
    """Check that a dataclass has all keys of a table.

    Raises:
        ValueError: the table has an unknown key; names the nearest one.
    """
    known = [each.name for each in fields(kind)]
    for key in table:
        if key not in known:
            raise ValueError(f"{name} has no key {key!r}{nearest(key, known)}")


def of_type(key: str, value: object, hint: Any) -> Any:
    """Convert a key's value from a file or a script.

    Raises:
        ValueError: it has another type than its key.
    """
    if NoneType in get_args(hint) and isinstance(value, str) and value == "none":
        value = None  # TOML has no None
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        raise ValueError(f"{key}: {misfit(hint, value)}") from None
    return value
