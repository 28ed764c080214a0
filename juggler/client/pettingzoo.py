"""Any environment with PettingZoo's Parallel or AEC interface as a simulator."""

from __future__ import annotations

from typing import Any

from juggler.client.agents import AgentsSession, connect_agents
from juggler.client.connection import GatewayError


def play_agents(
    env: Any,
    address: str,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Play an environment with several agents at a gateway.

    If the gateway dies and another one takes its place within a minute, playing continues there
    with a new episode.

    Args:
        env: an environment with PettingZoo's Parallel or AEC interface.
        address: address of the gateway.
        episodes: how many to play; None: until the run ends.
        seed: seed of the environment.
        options: options of `connect_agents`.

    Returns:
        The undiscounted return of each agent, in each episode.

    Raises:
        GatewayError: the session failed. The end of the run is not an error.
    """
    agents = {
        agent: (env.observation_space(agent), env.action_space(agent))
        for agent in env.possible_agents
    }
    returns: list[dict[str, float]] = []
    in_turns = callable(getattr(env, "last", None))
    while True:
        try:
            with connect_agents(address, agents, **options) as session:
                while len(returns) != episodes:
                    play = _in_turns if in_turns else _at_once
                    returns.append(play(env, session, seed))
                    seed = None
            return returns
        except GatewayError as error:
            if error.code == "ENDED":
                return returns
            if error.code != "UNKNOWN_SESSION":
                raise
            seed = None  # another gateway took the place of a dead one


def _at_once(env: Any, session: AgentsSession, seed: int | None) -> dict[str, float]:
    """Play an episode of a Parallel environment."""
    returns = dict.fromkeys(env.possible_agents, 0.0)
    observations, _ = env.reset(seed=seed)
    actions = session.step(observations)
    while env.agents:
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for agent, reward in rewards.items():
            returns[agent] += float(reward)
        ended = {agent for agent in terminated if terminated[agent] or truncated[agent]}
        shown = {agent: observations[agent] for agent in {*env.agents, *ended}}
        actions = session.step(shown, rewards, terminated, truncated)
    return returns


def _in_turns(env: Any, session: AgentsSession, seed: int | None) -> dict[str, float]:
    """Play an episode of an AEC environment."""
    returns = dict.fromkeys(env.possible_agents, 0.0)
    env.reset(seed=seed)
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        returns[agent] += float(reward)
        ended = {agent: terminated}, {agent: truncated}
        actions = session.step({agent: observation}, {agent: reward}, *ended)
        env.step(actions.get(agent))
    return returns
