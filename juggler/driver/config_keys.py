"""Keys of a configuration and their values, as people give them, and errors about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec

from juggler.driver.driver_config import ConfigError
from juggler.learner.algorithms.registry import algorithms_with, find_algorithm
from juggler.runtime.elsewhere import called_here
from juggler.runtime.modules.model_config import QNetworkConfig
from juggler.runtime.nearest import nearest


def must_suit(key: str, algorithm: str, where: str) -> None:
    """
    Raises:
        ConfigError: only other algorithms have this key.
    """
    having = algorithms_with(key)
    if having and key not in (each.name for each in fields(find_algorithm(algorithm).config)):
        *others, last = having
        names = f"{', '.join(others)} and {last}" if others else last
        why = find_algorithm(algorithm).lacks.get(key, "")
        raise ConfigError(
            f"{where}: {key!r} is a key of {names}, and algorithm = {algorithm!r}"
            + (f": {why}" if why else "")
        )


def instead_of(key: str) -> str:
    """How an error about a key ends that no run has, and that other libraries or models have; or
    ""."""
    hidden = {"distribution", "critic_space"}
    own_keys = [each.name for each in fields(QNetworkConfig) if each.name not in hidden]
    if key == "population":
        return (
            ": a run has none; a script trains many learners of one algorithm together with "
            "juggler.Population, and docs/cores.md says how"
        )
    if "." in key:
        table, _, of_table = key.partition(".")
        option, alone = table.replace("_", "-"), of_table.replace("_", "-")
        return (
            ": names of options have no dots. A key of a table is given in JSON, as in "
            f"--{option} '{{\"{of_table}\": ...}}'; any other stands alone, as in --{alone}"
        )
    if key in own_keys:
        return f": it is a key of the table model, as in model = {{{key} = ...}}"
    return called_here(key)


def converted(kind: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """A part of a configuration.

    Args:
        kind: its dataclass.
        values: by key, as a file or a script has them; others have their defaults.
        where: they were given.

    Raises:
        ConfigError: a value has another type.
    """
    hints = get_type_hints(kind)
    # By field: of a class that it knows, msgspec keeps what cannot be pickled with the class.
    return kind(**{key: _value(key, value, hints[key], where) for key, value in values.items()})


def _value(key: str, value: Any, hint: Any, where: str) -> Any:
    # A script may give arrays, which are no text, and have an == of their own.
    said = value if isinstance(value, str) and NoneType in get_args(hint) else ""
    if said == "none":  # TOML has no word for None
        value = None
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        for word, in_toml in (("object", "table"), ("null", "none")):
            text = re.sub(rf"\b{word}\b", in_toml, text)
        if said == "auto":
            text += f': "auto" is "none" here, or {key} left out'
        if hint == list[str] and isinstance(value, str):
            text = f"this is a list: {key} = {[value]}"
        if text.startswith("Invalid enum value"):
            text = f"{value!r} is not known{nearest(value, map(str, get_args(hint)))}"
        raise ConfigError(f"{where}: {key}{place.rstrip('`')}: {text}") from error
