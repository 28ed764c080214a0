"""The configurations that ship with Juggler, and the results of runs with them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from juggler.driver.config import ConfigError, RunConfig

_CONFIGS = resources.files("juggler.driver.configs")


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of runs of a configuration, as medians over the seeds.

    Attributes:
        episode_return: mean return of the last 100 training episodes.
        env_steps: trained steps.
        seconds: duration from the command on.
        seeds: number of seeds, from 0 on.
        machine: the machine that they ran on.
    """

    episode_return: float
    env_steps: int
    seconds: float
    seeds: int
    machine: str


@dataclass(frozen=True, slots=True)
class Shipped:
    """A configuration in the package.

    Attributes:
        name: its name for `juggler train`.
        config: the configuration.
        seen: the table `seen` of its file, or a sentence with figures from a page of benchmarks/.
            None: there were no full runs.
    """

    name: str
    config: RunConfig
    seen: Seen | str | None


def shipped_configs() -> list[str]:
    """Return the names of the configurations in the package."""
    return sorted(
        Path(file.name).stem for file in _CONFIGS.iterdir() if file.name.endswith(".toml")
    )


def read_shipped(name: str) -> Shipped:
    """Read one of `shipped_configs()`.

    Raises:
        ConfigError: the file has an invalid key or value.
    """
    file = f"{name}.toml"
    values: dict[str, Any] = tomllib.loads((_CONFIGS / file).read_text(encoding="utf-8"))
    seen = values.pop("seen", None)
    try:
        return Shipped(
            name,
            RunConfig.from_flat(values, where=file),
            None if seen is None else msgspec.convert(seen, Seen | str),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: seen: {error}") from error
