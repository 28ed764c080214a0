"""EnvPool's environments, which are stepped together by threads in C++. No torch here."""

from __future__ import annotations

import importlib
from typing import Any, Final

from gymnasium.vector import VectorWrapper
from gymnasium.vector.utils import batch_space

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.extras import check_extra
from juggler.envrunner.failures import EnvironmentFailed

#: What the names of its environments begin with.
SCHEME: Final = "envpool:"


class EnvPoolVector(VectorWrapper):
    """N of one kind. The step behind the end of an episode begins the next one (NEXT_STEP).

    EnvPool seeds environments when it makes them: a reset with a seed makes all of them anew.

    Args:
        name: of EnvPool's, such as "Pong-v5".
        count: N.
        options: of `envpool.make`.

    Raises:
        EnvironmentFailed: EnvPool does not make it.
    """

    def __init__(self, name: str, count: int, options: dict[str, Any]) -> None:
        self._name, self._count, self._options = name, count, options
        super().__init__(self._made({}))
        # EnvPool's own are those of one environment.
        self.observation_space = batch_space(self.single_observation_space, count)
        self.action_space = batch_space(self.single_action_space, count)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.env.close()
            self.env = self._made({"seed": seed % 2**31})
        observations, _ = self.env.reset()  # [N, ...]
        return observations, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        # What its infos hold is not Gymnasium's.
        return *self.env.step(actions)[:4], {}

    def _made(self, seed: dict[str, int]) -> Any:
        envpool = importlib.import_module("envpool")
        arguments = {**self._options, **seed, "num_envs": self._count}
        try:
            return envpool.make_gymnasium(self._name, **arguments)
        except Exception as error:
            raise EnvironmentFailed.during(SCHEME + self._name, "constructor", error) from None


def envpool_environments(config: EnvRunnerConfig) -> EnvPoolVector:
    """The environments of a configuration whose `env` is envpool:…

    Raises:
        EnvironmentFailed: EnvPool does not make them.
        ValueError: it is not installed, or the configuration asks for what there is not.
    """
    check_extra(config.env)
    if config.vectorize not in ("auto", "native"):
        raise ValueError(
            f"vectorize = {config.vectorize!r}: EnvPool steps its environments itself; use auto or "
            "native"
        )
    if reserved := {"num_envs", "seed", "batch_size"} & config.env_kwargs.keys():
        raise ValueError(
            f"env_kwargs of an envpool: env: without {', '.join(sorted(reserved))}; "
            "envs_per_runner and seed are keys of the run"
        )
    return EnvPoolVector(config.env.removeprefix(SCHEME), config.envs_per_runner, config.env_kwargs)
