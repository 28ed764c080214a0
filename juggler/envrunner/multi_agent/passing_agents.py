"""Environments whose agents come and go under any name."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final

from juggler.envrunner.multi_agent.reports import is_mapping


class PassingAgents:
    """A Parallel environment that has `max_num_agents` instead of `possible_agents`.

    An agent gets the first free place of "agent_0", "agent_1" and so on, until it ends. From the
    next step on, another agent may get the place. The spaces are the places' spaces.

    Args:
        env: the environment. Agents that end may come back, as new agents.

    Raises:
        ValueError: `max_num_agents` is not a number of agents.
    """

    #: Whether agents act again after their end in an episode.
    agents_come_back: Final = True

    def __init__(self, env: Any) -> None:
        if not isinstance(env.max_num_agents, int) or env.max_num_agents < 1:
            raise ValueError(
                f"max_num_agents must be an integer of at least 1, not {env.max_num_agents!r}"
            )
        self.env = env
        self.possible_agents = [f"agent_{i}" for i in range(env.max_num_agents)]
        self._place_of: dict[Hashable, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @property
    def agents(self) -> list[str]:
        return [self._place_of[agent] for agent in self.env.agents]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        results = self.env.reset(seed=seed, options=options)
        self._place_of.clear()
        return self._by_place(results)

    def step(self, actions: Mapping[str, Any]) -> Any:
        agent_at = {place: agent for agent, place in self._place_of.items()}
        results = self.env.step({agent_at[place]: action for place, action in actions.items()})
        found = self._by_place(results)
        present = set(self.env.agents)
        self._place_of = {each: at for each, at in self._place_of.items() if each in present}
        return found

    def _by_place(self, results: Any) -> Any:
        """Name the agents of results by their places; newcomers get one.

        Raises:
            ValueError: there are more agents than places.
        """
        taken = set(self._place_of.values())
        free = [place for place in self.possible_agents if place not in taken]
        for agent in self.env.agents:
            if agent not in self._place_of:
                if not free:
                    raise ValueError(
                        f"agent {agent!r} finds no free place among max_num_agents = "
                        f"{len(self.possible_agents)}: set it to the number of agents that are "
                        "there at once, including agents that end in the same step"
                    )
                self._place_of[agent] = free.pop(0)
        if not isinstance(results, tuple):
            return results
        return tuple(
            {self._place_of.get(agent, agent): value for agent, value in each.items()}
            if is_mapping(each)
            else each
            for each in results
        )
