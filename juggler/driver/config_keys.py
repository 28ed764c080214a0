"""Keys of a configuration and their values, as people give them, and errors about them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from juggler.driver.agents_config import OWN_KEYS
from juggler.driver.driver_config import ConfigError, DriverConfig
from juggler.driver.league.builders import BUILDERS, NO_BUILDER
from juggler.envrunner.config import EnvRunnerConfig
from juggler.learner.algorithms.registry import algorithms_with, find_algorithm
from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import Scheduled
from juggler.runtime.checkpoints.checkpoint import RETIRED_KEYS
from juggler.runtime.connectors.built_in import BUILT_IN
from juggler.runtime.connectors.config import ConnectorsTable
from juggler.runtime.elsewhere import called_here
from juggler.runtime.kinds import misfit
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.modules.model_config import QNetworkConfig
from juggler.runtime.nearest import all_of, nearest
from juggler.runtime.wrong_value import WrongValue

#: Values of the keys whose default shows nothing of what can be in them, as in TOML.
_EXAMPLES: Final = {
    "agents": '{"*" = "default"}',
    "burn_in": "8",
    "connectors": '{learner = ["clip_rewards"]}',
    "env_kwargs": "{size = 8}",
    "env_wrappers": '["FlattenObservation"]',
    "from_parameters": '["encoder.*"]',
    "imitation": '{demonstrations = "demonstrations/cartpole"}',
    "intrinsic": '{kind = "rnd"}',
    "league": '{builder = "self_play"}',
    "model": "{hidden_sizes = [128]}",
    "modules": "{default = {lr = 1e-3}}",
    "num_learners": "2",
    "optimizers": '{value = {parameters = ["value_*"]}}',
    "shared": '{"encoder.*" = ["first", "second"]}',
}
#: Examples for all other keys, by type.
_BY_KIND: Final[Mapping[Any, str]] = {bool: "true", int: "100", float: "0.5", str: '"..."'}


def must_suit(key: str, algorithm: str, where: str) -> None:
    """
    Raises:
        ConfigError: only other algorithms have this key.
    """
    if others := _of_others(key, algorithm):
        raise ConfigError(f"{where}: {others}")


def _of_others(key: str, algorithm: str) -> str:
    """What is said of a key that only other algorithms have; "" of any other key."""
    having = algorithms_with(key)
    if not having or key in (each.name for each in fields(find_algorithm(algorithm).config)):
        return ""
    why = find_algorithm(algorithm).lacks.get(key, "")
    return f"{key!r} is a key of {all_of(having)}, and algorithm = {algorithm!r}" + (
        f": {why}" if why else ""
    )


def unknown_key(key: str, known: Iterable[str], algorithm: str, where: str) -> WrongValue:
    """The error about a key that a run or a module has not.

    Args:
        key: that was given.
        known: the keys that could have been.
        algorithm: of the run or the module.
        where: it was given.
    """
    if others := _of_others(key, algorithm):
        return WrongValue(key, f"{where}: {others}")
    keys_of = "" if algorithm == LearnerConfig.algorithm else f"--algorithm {algorithm} "
    near = nearest(key, known, listed_by=f"`juggler train {keys_of}--help`")
    return WrongValue(key, f"{where}: unknown key {key!r}{instead_of(key) or near}")


def wrong_keys(module_id: str, table: Mapping[str, Any], of_run: str) -> list[ValueError]:
    """An error for each key in a module's table that a module cannot have.

    Args:
        module_id: of the module.
        table: its keys.
        of_run: the algorithm of the run.

    Raises:
        ConfigError: there is no such algorithm.
    """
    where, algorithm = f"modules.{module_id}", table.get("algorithm", of_run)
    try:
        kinds = find_algorithm(algorithm).config, ModuleConfig, ConnectorsTable
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    known = [*OWN_KEYS, *(key.name for kind in kinds for key in fields(kind))]
    shared = {key.name for kind in (DriverConfig, EnvRunnerConfig) for key in fields(kind)}
    wrong: list[ValueError] = []
    for key in table:
        if key in shared and key not in OWN_KEYS:
            said = "is a key of the run as a whole, and the same for all modules"
            wrong.append(WrongValue(key, f"{where}: {key} {said}: set it outside of [{where}]"))
        elif key not in known:
            wrong.append(unknown_key(key, known, algorithm, where))
    return wrong


def tell(errors: Sequence[ValueError]) -> None:
    """
    Raises:
        ConfigError: of all these errors, if there are any, one in each line. Where values are wrong
            by themselves, the others may only follow from these, and are left out.
    """
    if told := [each for each in errors if isinstance(each, WrongValue)] or errors:
        raise ConfigError("\n".join(map(str, told))) from told[0]


def said_of(where: str, error: ConfigError) -> ConfigError:
    """An error each of whose lines begins with the table that it is about."""
    lines = str(error).splitlines()
    return ConfigError(
        "\n".join(each if each.startswith(where) else f"{where}: {each}" for each in lines)
    )


def without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Remove retired keys that have their old default."""
    return {
        key: value
        for key, value in values.items()
        if key not in RETIRED_KEYS or value not in (RETIRED_KEYS[key][0], "none")
    }


def instead_of(key: str) -> str:
    """How an error about a key ends that no run has, and that other libraries or models have; or
    ""."""
    if key in RETIRED_KEYS:
        return f": {RETIRED_KEYS[key][1]}"
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
    if answer := called_here(key):
        return answer
    if key in BUILT_IN:
        place = BUILT_IN[key].place
        return f": it is the connector {key}, as in connectors = {{{place} = [{key!r}]}}"
    if key in BUILDERS.keys() - {NO_BUILDER}:
        return f": it builds a league, as in league = {key!r}"
    return ""


def plain(value: Any) -> Any:
    """Convert NumPy numbers and paths to types of configuration files."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def converted(
    kind: type[Any], values: Mapping[str, Any], where: str
) -> tuple[Any, list[WrongValue]]:
    """A part of a configuration, and an error for each value of another type than its key's, which
    has its default there.

    Args:
        kind: its dataclass.
        values: by key, as a file or a script has them; others have their defaults.
        where: they were given.
    """
    hints = get_type_hints(kind)
    of_kind = {each.name: each for each in fields(kind)}
    made, wrong = {}, []
    # By field: of a class that it knows, msgspec keeps what cannot be pickled with the class.
    for key, value in values.items():
        try:
            made[key] = _value(of_kind[key], value, hints[key], where)
        except WrongValue as error:
            wrong.append(error)
    return kind(**made), wrong


def _value(of_kind: Field[Any], value: Any, hint: Any, where: str) -> Any:
    key = of_kind.name
    # A script may give arrays, which are no text, and have an == of their own.
    said = value if isinstance(value, str) and NoneType in get_args(hint) else ""
    if said == "none":  # TOML has no word for None
        value = None
    kinds = {hint, *get_args(hint)}
    if type(value) is float and value.is_integer() and int in kinds and float not in kinds:
        value = int(value)  # 1e6, which is a whole number, too
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        text = misfit(hint, value)
        if said == "auto":
            text += f': "auto" is "none" here, or {key} left out'
        elif hint == list[str] and isinstance(value, str):
            text = f"this is a list: {key} = {[value]}"
        elif get_origin(hint) is Literal and isinstance(value, str):
            pass  # all words that it takes, or the nearest one, are named
        elif example := _example(of_kind, value, hint):
            text += f", as in {key} = {example}"
        raise WrongValue(key, f"{where}: {key}: {text}") from error


def _example(key: Field[Any], given: Any, hint: Any) -> str:
    """A value of a key, as in TOML: its default, where that shows what a value looks like; "":
    none is known."""
    if hint == Scheduled and isinstance(given, list):
        return "[[0, 1e-3], [1000000, 1e-4]]"
    made = key.default_factory
    default = key.default if made is MISSING else made()
    if default and default is not MISSING and not isinstance(default, Mapping):
        return json.dumps(default)
    if key.name in _EXAMPLES:
        return _EXAMPLES[key.name]
    kinds = [get_origin(each) or each for each in (hint, *get_args(hint))]
    return next((_BY_KIND[each] for each in kinds if each in _BY_KIND), "")
