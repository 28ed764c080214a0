"""The space of a sweep: keys and their values."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from juggler.driver.config import ConfigError, RunConfig, plain

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_NUMBER: Final = r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE: Final = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})(?::(.*))?")
_WHOLE: Final = re.compile(r"[-+]?[\d_]+")

Value = bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Axis:
    """A key that varies, over several values or between two bounds."""

    key: str  # of the configuration; keys of tables have dots: "model.hidden_sizes"
    values: tuple[Value, ...] = ()  # at least two; (): a range
    low: float = 0.0  # the lower bound
    high: float = 0.0  # the upper bound, reached in steps from the lower one
    log: bool = False  # equal ratios are equally likely, instead of equal differences
    step: float | None = None  # between two values; None: any number
    whole: bool = False  # only integers

    def distribution(self) -> BaseDistribution:
        """Return Optuna's distribution of values."""
        from optuna import distributions as of

        if self.values:
            return of.CategoricalDistribution(self.names())
        if self.whole:
            step = int(self.step or 1)
            return of.IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return of.FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def names(self) -> Sequence[Any]:
        """Return listable values as Optuna stores them; lists are JSON."""
        if self.values:
            return [_name(value) for value in self.values]
        return range(int(self.low), int(self.high) + 1, int(self.step or 1))

    def meant(self, name: Any) -> Value:
        """Return the value of a name that Optuna stores."""
        value: Value = dict(zip(map(_name, self.values), self.values, strict=True)).get(name, name)
        return value

    def extremes(self) -> Sequence[Value]:
        """Return the values that the configuration has to accept."""
        if self.values:
            return self.values
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    @property
    def count(self) -> float:
        """Number of values; infinite if they are not whole."""
        return len(self.names()) if self.values or self.whole else math.inf


def parse_space(given: Mapping[str, str | Sequence[Value]], run: Mapping[str, Any]) -> list[Axis]:
    """Parse a space, and check that the configuration accepts it.

    Raises:
        ConfigError: a key is not in the configuration, a value is wrong for its key, or a range is
            empty.
    """
    first = dict(run)
    if "algorithm" in given:
        algorithms = _with_each_algorithm([_axis("algorithm", given["algorithm"], run)], run)
        _must_suit_all(algorithms)
        first = algorithms[0]
    axes = [_axis(key, value, first) for key, value in given.items()]
    for _ in configurations(axes, run):
        pass  # each is checked
    return axes


def settings_in(axes: Sequence[Axis]) -> float:
    """Return the number of settings in a space, which may be infinite."""
    return math.prod(axis.count for axis in axes)


def configurations(axes: Sequence[Axis], run: Mapping[str, Any]) -> Iterator[RunConfig]:
    """Make configurations at the edges of a space, for each algorithm."""
    for axis in axes:
        for around in _with_each_algorithm(axes, run):
            for value in axis.extremes():
                yield RunConfig.from_flat(placed(around, {axis.key: value}), where="space")


def _with_each_algorithm(axes: Sequence[Axis], run: Mapping[str, Any]) -> list[dict[str, Any]]:
    chosen = [value for axis in axes if axis.key == "algorithm" for value in axis.extremes()]
    return [placed(run, {"algorithm": value}) for value in chosen] or [dict(run)]


def _must_suit_all(algorithms: Sequence[Mapping[str, Any]]) -> None:
    """Check that the configuration is valid for each of these algorithms."""
    for run in algorithms:
        RunConfig.from_flat({"algorithm": run["algorithm"]}, where="space")
    try:
        for run in algorithms:
            RunConfig.from_flat(dict(run))
    except ConfigError as error:
        raise ConfigError(
            f"space algorithm: {error}. The configuration is for one algorithm: to compare "
            "several, name only the environment, as in env = 'CartPole-v1'"
        ) from error


def placed(run: Mapping[str, Any], values: Mapping[str, Value]) -> dict[str, Any]:
    """Return a flat configuration with other values, also nested ones."""
    found = json.loads(json.dumps(run)) if any("." in key for key in values) else dict(run)
    for key, value in values.items():
        *tables, last = key.split(".")
        table = found
        for name in tables:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"space {key}: {name} is not a table, so it has no keys")
        table[last] = value
    return found


def _axis(key: str, given: str | Sequence[Value], run: Mapping[str, Any]) -> Axis:
    """Parse the values of one key."""
    key = key.strip().replace("-", "_")
    where = f"space {key}={given if isinstance(given, str) else list(given)}"
    if isinstance(given, str) and (match := _RANGE.fullmatch(given.strip())):
        return _range(key, match, where, run)
    values = _values(given) if isinstance(given, str) else plain(list(given))
    unique = {_name(value): value for value in values}
    if len(unique) < 2:
        raise ConfigError(
            f"{where}: give several values, such as {key}=A,B, or a range, such as {key}=LOW..HIGH"
        )
    return Axis(key, tuple(unique.values()))


def _range(key: str, match: re.Match[str], where: str, run: Mapping[str, Any]) -> Axis:
    low, high = float(match[1]), float(match[2])
    how = (match[3] or "").strip()
    if not low < high:
        raise ConfigError(f"{where}: the first bound has to be below the second")
    # In decimals: 0.1..0.3:0.1 reaches 0.3, which binary numbers miss.
    log, step = how == "log", None
    if how and not log:
        first, span = Decimal(match[1]), Decimal(match[2]) - Decimal(match[1])
        if not re.fullmatch(_NUMBER, how) or not 0 < Decimal(how) <= span:
            raise ConfigError(
                f"{where}: after the colon, give log or a step between two values, not {how!r}"
            )
        step = float(how)
        high = float(first + span // Decimal(how) * Decimal(how))
    if log and low <= 0:
        raise ConfigError(f"{where}: with :log, both bounds have to be above 0")
    whole = _is_whole(key, match, run)
    if whole and not all(each.is_integer() for each in (low, high, step or 1.0)):
        raise ConfigError(f"{where}: {key} only takes integers")
    return Axis(key, (), low, high, log, step, whole)


def _is_whole(key: str, match: re.Match[str], run: Mapping[str, Any]) -> bool:
    """Return whether a key accepts only integers.

    It does if it rejects numbers just above the lower bound; in tables without types, if the
    bounds are written as integers.
    """
    low = float(match[1])
    bound = int(low) if low.is_integer() else low
    RunConfig.from_flat(placed(run, {key: bound}), where="space")
    try:
        RunConfig.from_flat(placed(run, {key: math.floor(low) + 0.5}))
    except ConfigError:
        return True
    return "." in key and all(_WHOLE.fullmatch(match[i]) for i in (1, 2))


def _values(text: str) -> list[Value]:
    """Read values between commas as TOML; words need no quotes."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:  # words without quotes
        words = text.split(",")
        return [text.strip()] if len(words) == 1 else [*chain.from_iterable(map(_values, words))]


def _name(value: Value) -> str | int | float | bool:
    """Return a value as Optuna stores it."""
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)
