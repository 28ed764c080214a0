"""EnvPool's environments, which C++ threads step together. No torch here."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any, Final

import numpy as np
from gymnasium.vector import VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.extras import check_extra
from juggler.envrunner.failures import failures_of
from juggler.runtime.nearest import closest

#: The prefix of their names in `env`.
SCHEME: Final = "envpool:"
#: The option of EnvPool with which environments go on at their own pace.
AT_OWN_PACE: Final = "batch_size"
#: What EnvPool itself puts into infos, beside what its environments do.
_OF_ENVPOOL: Final = frozenset({"env_id", "id", "elapsed_step", "current_player"})


class EnvPoolVector(VectorWrapper):
    """N environments of EnvPool, with NEXT_STEP autoreset.

    EnvPool takes a seed only when it makes environments, so a reset with a seed makes them anew.
    """

    def __init__(self, name: str, count: int, options: dict[str, Any]) -> None:
        self._name, self._count, self._options = name, count, options
        super().__init__(make_pool(name, count, options))
        # EnvPool's spaces are those of one environment.
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.close()
            self.env = make_pool(self._name, self._count, {**self._options, "seed": seed % 2**31})
        observations, _ = self.env.reset()  # [N, ...]
        return observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *stepped, info = self.env.step(actions)
        # EnvPool's infos do not follow Gymnasium's conventions.
        return *stepped, given_numbers(info, self._count)


def make_pool(name: str, count: int, options: dict[str, Any]) -> Any:
    """Make environments, which EnvPool steps together.

    Raises:
        ValueError: EnvPool has no such environment.
        EnvironmentFailed: it cannot make them.
    """
    envpool = _envpool_with(name)
    with failures_of(SCHEME + name, "constructor"):
        return envpool.make_gymnasium(name, **options, num_envs=count)


def given_numbers(info: Mapping[str, Any], rows: int) -> dict[str, NDArray[Any]]:
    """The numbers [rows] that environments have put into their info, by name."""
    return {
        name: given
        for name, given in info.items()
        if name not in _OF_ENVPOOL and isinstance(given, np.ndarray) and given.shape == (rows,)
    }


def number_of_agents(name: str) -> int:
    """Return how many agents an environment of EnvPool has.

    Raises:
        ValueError: EnvPool has no such environment.
        EnvironmentFailed: it cannot load it.
    """
    envpool = _envpool_with(name)
    with failures_of(SCHEME + name, "constructor"):
        return int(envpool.make_spec(name).config.max_num_players)


def _envpool_with(name: str) -> Any:
    """The package, if it has an environment of this name."""
    envpool = importlib.import_module("envpool")
    if name not in (known := envpool.list_all_envs()):
        near = closest(name, known)
        hint = (
            f"did you mean {SCHEME + near!r}?" if near else "envpool.list_all_envs() has them all"
        )
        raise ValueError(f"env {SCHEME + name!r}: EnvPool has no such environment: {hint}")
    return envpool


def check_options(options: Collection[str]) -> None:
    """Check the arguments of EnvPool that a run gives.

    Raises:
        ValueError: they have one that Juggler sets.
    """
    if reserved := {"num_envs", "seed", "batch_size"}.intersection(options):
        raise ValueError(
            f"env_kwargs of an envpool: environment cannot have {', '.join(sorted(reserved))}: "
            "set envs_per_runner and seed instead"
        )


def make_envpool_vector(config: EnvRunnerConfig) -> EnvPoolVector:
    """Make the environments of a configuration whose `env` is envpool:…

    Raises:
        EnvironmentFailed: EnvPool cannot make them.
        ValueError: EnvPool is not installed, has no such environment, or lacks an option.
    """
    check_extra(config.env)
    if config.vectorize not in ("auto", "native"):
        raise ValueError(
            f"vectorize = {config.vectorize!r}: EnvPool steps its environments itself; use auto or "
            "native"
        )
    if AT_OWN_PACE in config.env_kwargs:
        raise ValueError(
            f"env_kwargs.{AT_OWN_PACE}: the driver has not made {config.env}, so it has to be told "
            'of its agent: agents = {agent = "default"}'
        )
    check_options(config.env_kwargs)
    return EnvPoolVector(config.env.removeprefix(SCHEME), config.envs_per_runner, config.env_kwargs)
