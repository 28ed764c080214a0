"""The table `optimizers` of a configuration. No torch here: the driver reads this too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_origin, get_type_hints

import msgspec

from juggler.runtime.nearest import nearest

if TYPE_CHECKING:
    from juggler.learner.config import LearnerConfig

#: What an optimizer may have of its own. It takes the rest from the run's keys of these names.
OWN_KEYS = (
    "lr",
    "optimizer",
    "adam_betas",
    "rmsprop_decay",
    "optimizer_epsilon",
    "grad_clip",
    "grad_clip_by",
)


@dataclass(frozen=True)
class OptimizerGroup:
    """Parameters that have an optimizer of their own.

    Attributes:
        name: in the configuration, and behind "lr_" in metrics; "" is the one for the rest.
        patterns: of the names of its parameters; those of the rest have none.
        config: the run's, with the group's own values in it.
        lr_key: of its learning rate in metrics: "lr" where it has none of its own.
        lr_scale: what that is multiplied by.
        of_values: it has what no pattern names and acting does without: the value function's own.
    """

    name: str
    patterns: tuple[str, ...]
    config: LearnerConfig
    lr_key: str
    lr_scale: float = 1.0
    of_values: bool = False


def optimizer_groups(config: LearnerConfig) -> list[OptimizerGroup]:
    """The one for the rest, that of the value function if it is another, and those in the table.

    Raises:
        ValueError: the table is none of optimizers; names the key, and the nearest right one.
    """
    groups = [OptimizerGroup("", (), config, "lr")]
    if config.value_lr_scale != 1:
        groups.append(OptimizerGroup("", (), config, "lr", config.value_lr_scale, of_values=True))
    for name, table in config.optimizers.items():
        where = f"optimizers.{name}"
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(f"{where}: a name is made of a-z, 0-9 and _")
        if not isinstance(table, Mapping):
            raise ValueError(f"{where} = {table!r}: expected a table with the key 'parameters'")
        for key in table:
            if key not in ("parameters", *OWN_KEYS):
                close = nearest(key, ("parameters", *OWN_KEYS))
                raise ValueError(f"{where} has no key {key!r}{close}")
        own = replace(config, optimizers={}, **_converted(where, table, type(config)))
        try:
            own.validate_optimizer()
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from error
        lr_key = f"lr_{name}" if "lr" in table else "lr"
        groups.append(OptimizerGroup(name, _patterns(where, table), own, lr_key))
    return groups


def _patterns(where: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    patterns = table.get("parameters")
    try:
        return tuple(msgspec.convert(patterns, Annotated[list[str], msgspec.Meta(min_length=1)]))
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{where} needs parameters = [...]: patterns of the names of its parameters, such as "
            f"'value_*', not {patterns!r}"
        ) from error


def _converted(where: str, table: Mapping[str, Any], kind: type[LearnerConfig]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    values = {}
    for key in table.keys() - {"parameters"}:
        # TOML has no word for None; only grad_clip may be it.
        value = None if key == "grad_clip" and table[key] == "none" else table[key]
        # A choice is checked with the values' ranges, where the nearest right one is named.
        hint = str if get_origin(hints[key]) is Literal else hints[key]
        try:
            values[key] = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            raise ValueError(f"{where}.{key} = {value!r}: {error}") from error
    return values
