"""Configurations that ship with Juggler, and how far runs of them were seen to get."""

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
    """How runs of a configuration ended: the median of each over the seeds.

    Attributes:
        episode_return: the mean of the last 100 training episodes.
        env_steps: trained on.
        seconds: from the command on.
        seeds: how many, 0 and up.
        machine: what they ran on.
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
        name: that `juggler train` knows it by.
        config: what it says.
        seen: what its file has in the table `seen`; None: it was not tried in full.
    """

    name: str
    config: RunConfig
    seen: Seen | None


def shipped_configs() -> list[str]:
    """Names of the configurations in the package."""
    return sorted(
        Path(file.name).stem for file in _CONFIGS.iterdir() if file.name.endswith(".toml")
    )


def read_shipped(name: str) -> Shipped:
    """
    Args:
        name: one of `shipped_configs()`.

    Raises:
        ConfigError: the file says something wrong.
    """
    file = f"{name}.toml"
    values: dict[str, Any] = tomllib.loads((_CONFIGS / file).read_text(encoding="utf-8"))
    seen = values.pop("seen", None)
    try:
        return Shipped(
            name,
            RunConfig.from_flat(values, where=file),
            None if seen is None else msgspec.convert(seen, Seen),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: seen: {error}") from error
