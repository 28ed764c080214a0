"""Gymnasium environments whose spaces are Tuples with a part for each agent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec

from juggler.envrunner.environments.find_environment import TUPLES, find_environment


def find_game(name: str) -> Callable[..., TupleAgents]:
    """Return a function that makes an environment of Tuples.

    Args:
        name: "tuples:" and the name of a Gymnasium environment, such as
            "tuples:lbforaging:Foraging-8x8-2p-1f-v3".

    Raises:
        ValueError: there is no such environment, or its package is not installed.
        EnvironmentFailed: importing its module failed.
    """
    source = find_environment(name.removeprefix(TUPLES))
    if isinstance(source, EnvSpec):
        source = functools.partial(gymnasium.make, source, disable_env_checker=True)
    return functools.partial(_make, source)


def _make(source: Callable[..., Any], **env_kwargs: Any) -> TupleAgents:
    return TupleAgents(source(**env_kwargs))


class TupleAgents:
    """A Gymnasium environment of several agents, with PettingZoo's Parallel interface.

    Its spaces are Tuples of A parts, as in Level-Based Foraging and RWARE (Papoudakis et al.,
    arXiv:2006.07869). Its agents are "agent_0" to "agent_A-1". `step` takes a tuple of A actions,
    and returns A observations and A rewards, or one reward that each agent gets; terminated,
    truncated and the info alike. An agent that ended before the others repeats its last action.

    Args:
        env: the environment.

    Raises:
        ValueError: its spaces are not Tuples of the same length.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        observations, actions = env.observation_space, env.action_space
        if (
            not isinstance(observations, spaces.Tuple)
            or not isinstance(actions, spaces.Tuple)
            or len(observations) != len(actions)
        ):
            raise ValueError(
                f"{env} needs Tuples with a part for each agent as its spaces; it has observations "
                f"{observations} and actions {actions}: leave out {TUPLES!r} if it has one agent"
            )
        # These names are only known here: the environment has none.
        self.env = env
        self.possible_agents = [f"agent_{i}" for i in range(len(actions))]
        self.agents: list[str] = []
        self._actions: dict[str, Any] = {}
        self.render_mode = env.render_mode
        self.metadata = env.metadata
        self._spaces: dict[str, tuple[Space[Any], Space[Any]]] = dict(
            zip(self.possible_agents, zip(observations, actions, strict=True), strict=True)
        )

    @property
    def unwrapped(self) -> gymnasium.Env[Any, Any]:
        return self.env.unwrapped

    def observation_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> Space[Any]:
        return self._spaces[agent][1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        observations, info = self.env.reset(seed=seed, options=options)
        self.agents = list(self.possible_agents)
        return self._by_agent("observations", observations), self._infos(info)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        self._actions.update(actions)
        together = tuple(self._actions[agent] for agent in self.possible_agents)
        observations, *results, info = self.env.step(together)
        names = ("rewards", "terminated", "truncated")
        rewards, terminated, truncated = map(self._for_each, names, results)
        self.agents = [each for each in self.agents if not (terminated[each] or truncated[each])]
        seen = self._by_agent("observations", observations)
        return seen, rewards, terminated, truncated, self._infos(info)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _by_agent(self, what: str, parts: Any) -> dict[str, Any]:
        if not isinstance(parts, Sequence | np.ndarray) or len(parts) != len(self.possible_agents):
            raise ValueError(
                f"{what} must have a part for each of {len(self.possible_agents)} agents, and are "
                f"{parts!r}"
            )
        return dict(zip(self.possible_agents, parts, strict=True))

    def _for_each(self, what: str, value: Any) -> dict[str, Any]:
        """Return each agent's part, or the one value for all present agents."""
        return self._by_agent(what, value) if np.ndim(value) else dict.fromkeys(self.agents, value)

    def _infos(self, info: Any) -> dict[str, Any]:
        if isinstance(info, Mapping):
            return dict.fromkeys(self.possible_agents, info)
        return self._by_agent("infos", info)
