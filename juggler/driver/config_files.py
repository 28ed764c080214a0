"""Loads configurations from files, and shipped ones by name."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import gymnasium
import msgspec

from juggler.driver.config import ConfigError, RunConfig
from juggler.driver.defaults import may_be_chosen
from juggler.driver.driver_config import config_errors
from juggler.envrunner.environments.find_environment import is_name
from juggler.learner.algorithms.registry import find_algorithm, must_act_in
from juggler.runtime.near_matches import closest


def load_config_and_keys(
    name: str | Path | RunConfig | None, algorithm: str | None = None
) -> tuple[RunConfig, frozenset[str]]:
    """Load a configuration and the keys it sets; shipped ones set all.

    Args:
        name: a file, or the name of a shipped configuration; None: the defaults. "cartpole" with
            the algorithm "ppo" means cartpole-ppo, if that ships. A configuration sets all keys.
        algorithm: replaces the configuration's algorithm; None: keeps it.

    Raises:
        ConfigError: there is no such configuration, or it has an invalid key or value.
    """
    if isinstance(name, RunConfig):
        return name, frozenset(name.flat())
    keys = {} if algorithm is None else {"algorithm": algorithm}
    if name is None:
        return RunConfig.from_flat(keys), frozenset(keys)
    if not isinstance(name, str | Path):
        raise ConfigError(f"a configuration is a name, a file or a RunConfig, not {name!r}")
    path = Path(name)
    if path.suffix == ".toml" or path.exists():
        values = {**read_toml(path), **keys}
        return RunConfig.from_flat(values, where=str(path)), frozenset(values)
    # Shipped configurations set all keys, so nothing is chosen for them.
    shipped = shipped_configs()
    found = f"{name}-{algorithm}" if f"{name}-{algorithm}" in shipped else str(name)
    if found not in shipped:
        if is_name(str(name)):
            raise ConfigError(
                f"{name!r} is an environment: give it as `--env {name}`, or env={str(name)!r}"
            )
        near = closest(found, shipped)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ConfigError(
            f"there is no configuration {found!r}{hint}: give a .toml file, or one "
            f"of the shipped ones: {', '.join(shipped)}"
        )
    config = read_shipped(found).config
    # Values of a shipped configuration were found for its own algorithm.
    if algorithm not in (None, config.learner.algorithm):
        RunConfig.from_flat(keys)  # raises if the algorithm is unknown
        env = config.env_runner.env
        _must_act_in(env, algorithm)
        data = " --dataset DATASET" if find_algorithm(algorithm).offline else ""
        configs = {each: read_shipped(each).config for each in shipped}
        same = [each for each, other in configs.items() if other.env_runner.env == env]
        raise ConfigError(
            f"{found!r} has settings for algorithm = {config.learner.algorithm!r}, and none ship "
            f"for {algorithm!r} in {env}: give one of {', '.join(same)}, or a .toml file. --env "
            f"{env} --algorithm {algorithm}{data} trains with the defaults of {algorithm!r}"
        )
    return config, frozenset(config.flat())


def _must_act_in(env: str, algorithm: object) -> None:
    """Check that an algorithm can choose the actions of an environment.

    Without the package of the environment, nothing is checked.
    """
    with suppress(gymnasium.error.Error, ImportError):
        made = gymnasium.make(env)
        space = made.action_space
        made.close()
        with config_errors():
            must_act_in(str(algorithm), find_algorithm(algorithm), space)


def differing(values: Mapping[str, Any], wanted: Collection[str] = ()) -> dict[str, Any]:
    """Return keys a file needs to reproduce this configuration, and wanted ones."""
    config = RunConfig.from_flat(dict(values))
    whole = config.flat()
    included = {
        "env",
        "algorithm",
        *(key.partition(".")[0] for key in wanted),
        *may_be_chosen(config),
    }
    plain = RunConfig.from_flat({key: values[key] for key in included & values.keys()}).flat()
    found = {
        key: value
        for key, value in values.items()
        if key in included or whole[key] != plain.get(key)
    }
    return found if RunConfig.from_flat(found).flat() == whole else dict(values)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file's keys and values.

    Raises:
        ConfigError: the file is missing, is not TOML, or has a table for shipped ones only.
    """
    try:
        values = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        hint = f"; to resume a run, give --resume {path}" if path.is_dir() else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    # The first is probably unfinished, the other copied from a shipped file.
    if values.get("league") == {}:
        raise ConfigError(
            f"{path}: the table 'league' is empty: name a builder, such as builder = 'self_play', "
            "or leave it out"
        )
    if "seen" in values:
        raise ConfigError(
            f"{path}: the table 'seen' has the results of a configuration that "
            "ships: leave it out of your file"
        )
    return values


_CONFIGS = resources.files("juggler.driver.configs")


class MedianResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of runs of a configuration, as medians over the seeds."""

    episode_return: float  # mean return of the last 100 training episodes
    env_steps: int  # trained steps
    seconds: float  # duration since the command was given
    seeds: int  # number of seeds, starting at 0
    machine: str  # the machine that they ran on


@dataclass(frozen=True, slots=True)
class ShippedConfig:
    """A configuration in the package."""

    name: str  # its name for `juggler train`
    config: RunConfig  # the configuration
    # The table `seen` of its file, or a sentence with figures from a page of benchmarks/. None:
    # there were no full runs.
    seen: MedianResults | str | None


def shipped_configs() -> list[str]:
    """Return the names of the configurations in the package."""
    return sorted(
        Path(file.name).stem for file in _CONFIGS.iterdir() if file.name.endswith(".toml")
    )


def read_shipped(name: str) -> ShippedConfig:
    """Read one of `shipped_configs()`."""
    file = f"{name}.toml"
    values: dict[str, Any] = tomllib.loads((_CONFIGS / file).read_text(encoding="utf-8"))
    seen = values.pop("seen", None)
    return ShippedConfig(
        name,
        RunConfig.from_flat(values, where=file),
        None if seen is None else msgspec.convert(seen, MedianResults | str),
    )
