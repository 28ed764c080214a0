"""Optimizers' keys and the table `optimizers`. No torch, for the driver."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, TypeAlias, get_origin, get_type_hints

import msgspec

from juggler.runtime.wrong_value import CheckedKeys, WrongValue, converted, points_of

#: A number, or a schedule: (step, value) pairs by rising step, of steps trained on.
Scheduled: TypeAlias = float | list[tuple[float, float]]


@dataclass(kw_only=True)
class OptimizerConfig(CheckedKeys):
    """Keys that each optimizer may override."""

    lr: Scheduled = 5e-4
    """Learning rate: a number, or a schedule, pairs of [environment steps trained on, value],
    linear between them."""

    optimizer: Literal["adam", "rmsprop"] = "adam"
    """Rule by which gradients change parameters."""

    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decays of Adam's means of the gradient and its square."""

    rmsprop_decay: float = 0.99
    """Decay of RMSProp's mean of the squared gradient."""

    optimizer_epsilon: float = 1e-5
    """Number added to the root of the mean square before dividing by it."""

    grad_clip: float | None = 40.0
    """Maximum norm of a module's gradient, or of what grad_clip_by says; none: no limit."""

    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """What grad_clip limits: the norm of an optimizer's whole gradient, the norm of each
    parameter's gradient, or the size of each number."""

    def validate_optimizer(self) -> None:
        """Raise ValueError for the first key that is out of range."""
        self.check_schedule("lr", above_0=True)
        self.check_above("optimizer_epsilon", 0)
        self.check_within("rmsprop_decay", self.rmsprop_decay, 0, 1, below=True)
        for beta in self.adam_betas:
            self.check_within("adam_betas", beta, 0, 1, below=True)
        self.check_one_of("optimizer", ("adam", "rmsprop"))
        self.check_one_of("grad_clip_by", ("global_norm", "norm", "value"))
        self.check_above("grad_clip", 0)

    def check_share(self, key: str) -> None:
        """Check that a key, or its schedule, is from 0 to 1."""
        self.check_schedule(key)
        value = getattr(self, key)
        for _, share in value if isinstance(value, list) else [(0, value)]:
            self.check_within(key, share, 0, 1)

    def check_schedule(self, key: str, *, above_0: bool = False) -> None:
        """Check that a key, or its schedule, is not negative.

        With `above_0`, a plain number must not be 0.
        """
        value = getattr(self, key)
        if isinstance(value, (int, float)):
            (self.check_above if above_0 else self.check_at_least)(key, 0)
            return
        try:
            points = points_of(value)
        except ValueError as error:
            raise WrongValue(key, f"{key} = {value}: {error}") from None
        # A fraction shows that steps and values were confused.
        if fractions := [step for step, _ in points if step % 1]:
            raise WrongValue(
                key,
                f"{key} = {value}: the step {fractions[0]:g} of a schedule must be a whole number; "
                "it has a step, a value, a step, a value and so on, and a constant is one number",
            )
        if not all(0 <= each < math.inf for _, each in value):
            raise WrongValue(key, f"{key} = {value}: values must be at least 0 and finite")


#: Keys that an optimizer may override; otherwise the run's keys apply.
OWN_KEYS = tuple(key.name for key in fields(OptimizerConfig))


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer, and the parameters that it trains.

    Attributes:
        name: its name in the configuration, and after "lr_" in metrics; "": the main optimizer.
        patterns: patterns of its parameters' names; the main optimizer has none.
        config: the run's config, with the optimizer's own values.
        lr_key: key of its learning rate in metrics; "lr" without its own learning rate.
        lr_scale: factor of that learning rate.
        training_only: whether it has the parameters that acting does not need and no pattern names.
    """

    name: str
    patterns: tuple[str, ...]
    config: OptimizerConfig
    lr_key: str
    lr_scale: float = 1.0
    training_only: bool = False


def parse_optimizers(
    config: OptimizerConfig, tables: Mapping[str, Mapping[str, Any]]
) -> list[OptimizerSpec]:
    """Parse the table `optimizers` of a configuration.

    Args:
        config: defaults of the tables' keys.
        tables: tables by the optimizers' names.

    Raises:
        ValueError: a table is invalid; names the key, and the nearest valid one.
    """
    groups = []
    for name, table in tables.items():
        where = f"optimizers.{name}"
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ValueError(f"{where}: a name is made of a-z, 0-9 and _")
        if not isinstance(table, Mapping):
            raise ValueError(f"{where} = {table!r}: expected a table with the key 'parameters'")
        # `validate_optimizer` checks choices, because its error suggests the nearest one.
        hints = {
            key: str if get_origin(hint) is Literal else hint
            for key, hint in get_type_hints(OptimizerConfig).items()
        }
        plain = {key: each for key, each in table.items() if (key, each) != ("grad_clip", "none")}
        given = converted(plain, {"parameters": Any, **hints}, where)
        if len(plain) < len(table):  # TOML has no null
            given["grad_clip"] = None
        patterns = _patterns(where, given.pop("parameters", None))
        # Keys that the table leaves out are the run's.
        own = replace(config, **given)
        try:
            own.validate_optimizer()
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from error
        lr_key = f"lr_{name}" if "lr" in table else "lr"
        groups.append(OptimizerSpec(name, patterns, own, lr_key))
    return groups


def _patterns(where: str, patterns: object) -> tuple[str, ...]:
    try:
        return tuple(msgspec.convert(patterns, Annotated[list[str], msgspec.Meta(min_length=1)]))
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{where} needs parameters = [...]: patterns of the names of its parameters, such as "
            f"'value_*', not {patterns!r}"
        ) from error
