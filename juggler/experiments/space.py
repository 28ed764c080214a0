"""The space of a sweep: which keys of a configuration vary, and over what."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.config_keys import plain

if TYPE_CHECKING:
    from optuna import Trial

_NUMBER = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})(?::(.*))?")
_WHOLE = re.compile(r"[-+]?[\d_]+")

Value = bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Choices:
    """A key that takes one of several values.

    Attributes:
        key: of the configuration; of a table's key with dots: "model.hidden_sizes".
        values: at least two.
    """

    key: str
    values: tuple[Value, ...]

    def suggest(self, trial: Trial) -> Value:
        """The value that a trial is to have."""
        return self.meant(trial.suggest_categorical(self.key, self.names()))

    def names(self) -> list[bool | int | float | str]:
        """The values as Optuna stores them: lists and tables are JSON."""
        return [_name(value) for value in self.values]

    def meant(self, name: Any) -> Value:
        """The value that Optuna stores like this."""
        return dict(zip(self.names(), self.values, strict=True))[name]

    def extremes(self) -> Sequence[Value]:
        """The values that the configuration has to accept."""
        return self.values

    @property
    def count(self) -> float:
        """How many values it takes."""
        return len(self.values)


@dataclass(frozen=True, slots=True)
class Range:
    """A key that takes numbers between two bounds, and these.

    Attributes:
        key: as of `Choices`.
        low: the lower bound.
        high: the upper one.
        log: equal ratios are equally likely, and not equal differences.
        step: between two values; None: there is none.
        whole: integers alone.
    """

    key: str
    low: float
    high: float
    log: bool
    step: float | None
    whole: bool

    def suggest(self, trial: Trial) -> Value:
        """The value that a trial is to have."""
        if self.whole:
            step = int(self.step or 1)
            return trial.suggest_int(
                self.key, int(self.low), int(self.high), step=step, log=self.log
            )
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def meant(self, name: Any) -> Value:
        """The value that Optuna stores like this."""
        value: Value = name
        return value

    def extremes(self) -> Sequence[Value]:
        """The values that the configuration has to accept."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def names(self) -> Sequence[int]:
        """The values, where they are whole."""
        return range(int(self.low), int(self.high) + 1, int(self.step or 1))

    @property
    def count(self) -> float:
        """How many values it takes; infinite: they are not whole."""
        return len(self.names()) if self.whole else math.inf


Axis = Choices | Range


def parse_space(given: Mapping[str, str | Sequence[Value]], run: Mapping[str, Any]) -> list[Axis]:
    """Parse a space, and check that the configuration accepts all of it.

    Args:
        given: by key, "1e-4..1e-2:log", "128..1024:128" or "0,0.01", or the values themselves.
        run: what the runs' configuration gives, flat.

    Raises:
        ConfigError: a key is not one of the configuration, a value is wrong for its key, or a range
            is none.
    """
    first = dict(run)
    if "algorithm" in given:
        algorithms = _with_each_algorithm([_axis("algorithm", given["algorithm"], run)], run)
        _must_suit_all(algorithms)
        first = algorithms[0]
    axes = [_axis(key, value, first) for key, value in given.items()]
    for _ in configurations(axes, run):
        pass  # each was checked
    return axes


def settings_in(axes: Sequence[Axis]) -> float:
    """How many different settings a space has; infinite: as many as there are numbers."""
    return math.prod(axis.count for axis in axes)


def configurations(axes: Sequence[Axis], run: Mapping[str, Any]) -> Iterator[RunConfig]:
    """The configurations at the edges of a space: of each algorithm in it, with each of the other
    keys at each of its extremes.

    Raises:
        ConfigError: a configuration does not accept a value.
    """
    for axis in axes:
        for around in _with_each_algorithm(axes, run):
            for value in axis.extremes():
                yield RunConfig.from_flat(placed(around, {axis.key: value}), where="--space")


def _with_each_algorithm(axes: Sequence[Axis], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What runs give with each algorithm of a space."""
    chosen = [value for axis in axes if axis.key == "algorithm" for value in axis.extremes()]
    return [placed(run, {"algorithm": value}) for value in chosen] or [dict(run)]


def _must_suit_all(algorithms: Sequence[Mapping[str, Any]]) -> None:
    """
    Args:
        algorithms: the configuration with each algorithm.

    Raises:
        ConfigError: there is no such algorithm, or the configuration has keys of another one.
    """
    for run in algorithms:
        RunConfig.from_flat({"algorithm": run["algorithm"]}, where="--space")
    try:
        for run in algorithms:
            RunConfig.from_flat(dict(run))
    except ConfigError as error:
        raise ConfigError(
            f"--space algorithm: {error}. The configuration is for one algorithm: to compare "
            "several, name the environment alone, as in --env CartPole-v1"
        ) from error


def placed(run: Mapping[str, Any], values: Mapping[str, Value]) -> dict[str, Any]:
    """What a run's configuration gives, with other values for some keys, nested ones among them.

    Raises:
        ConfigError: a key with a dot is not of a table.
    """
    found = json.loads(json.dumps(run)) if any("." in key for key in values) else dict(run)
    for key, value in values.items():
        *tables, last = key.split(".")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(
                    f"--space {key}: {name} is no table, so it has no keys of its own"
                )
        table[last] = value
    return found


def _axis(key: str, given: str | Sequence[Value], run: Mapping[str, Any]) -> Axis:
    """Parse the values of one key."""
    key = key.strip().replace("-", "_")
    where = f"--space {key}"
    if not isinstance(given, str):
        return _choices(key, plain(list(given)), f"{where}={list(given)}")
    if match := _RANGE.fullmatch(given.strip()):
        return _range(key, match, f"{where}={given}", run)
    return _choices(key, _values(given), f"{where}={given}")


def _choices(key: str, values: Sequence[Value], where: str) -> Choices:
    if len({_name(value) for value in values}) < 2:
        raise ConfigError(
            f"{where}: give several values, such as {key}=A,B, or a range, such as {key}=LOW..HIGH"
        )
    return Choices(key, tuple({_name(value): value for value in values}.values()))


def _range(key: str, match: re.Match[str], where: str, run: Mapping[str, Any]) -> Range:
    low, high = float(match[1]), float(match[2])
    how = (match[3] or "").strip()
    if not low < high:
        raise ConfigError(f"{where}: the first bound has to be below the second")
    log, step = how == "log", None
    if how and not log:
        if not re.fullmatch(_NUMBER, how) or not (
            0 < Decimal(how) <= Decimal(match[2]) - Decimal(match[1])
        ):
            raise ConfigError(
                f"{where}: after the colon stands log, or a step between two values, not {how!r}"
            )
        step = float(how)
        first = Decimal(match[1])
        last = first + (Decimal(match[2]) - first) // Decimal(how) * Decimal(how)
        high = float(last)  # which the steps from the lower bound reach
    if log and low <= 0:
        raise ConfigError(f"{where}: with :log, both bounds have to be above 0")
    whole = _is_whole(key, match, run)
    if whole and not all(each.is_integer() for each in (low, high, step or 1.0)):
        raise ConfigError(f"{where}: {key} takes integers alone")
    return Range(key, low, high, log, step, whole)


def _is_whole(key: str, match: re.Match[str], run: Mapping[str, Any]) -> bool:
    """Whether a key takes integers alone: it accepts the lower bound, and nothing just above. A
    key of a free table does if its bounds are written so."""
    low = float(match[1])
    bound = int(low) if low.is_integer() else low
    above = math.floor(low) + 0.5
    RunConfig.from_flat(placed(run, {key: bound}), where="--space")
    try:
        RunConfig.from_flat(placed(run, {key: above}))
    except ConfigError:
        return True
    return "." in key and all(_WHOLE.fullmatch(match[i]) for i in (1, 2))


def _values(text: str) -> list[Value]:
    """Values with commas between them: as in TOML, and words without quotes."""
    pieces, depth = [""], 0
    for each in text:
        depth += (each in "[{") - (each in "]}")
        if each == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += each
    return [_value(piece.strip()) for piece in pieces]


def _value(text: str) -> Value:
    try:
        value: Value = tomllib.loads(f"value = {text}")["value"]
        return value
    except tomllib.TOMLDecodeError:
        return text


def _name(value: Value) -> str | int | float | bool:
    """A value as Optuna stores it."""
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
