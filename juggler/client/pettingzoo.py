"""Any environment with PettingZoo's Parallel or AEC interface as a simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from juggler.client.agents import AgentsSession, connect_agents
from juggler.client.connection import GatewayError
from juggler.client.spaces import as_message, dict_of, multi_binary
from juggler.runtime.wire.v1.spaces_pb2 import Space

_MASK = "action_mask"


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
        options: options of `connect_agents`. Numbers that agents find in their infos reach the
            run's metrics if `info_names` has their names.

    Returns:
        For each episode, the undiscounted return of each agent, by the agent's id as a string.

    Raises:
        GatewayError: the session failed. The end of the run is not an error.
        ValueError: an agent acts without an action mask, where the first infos had masks; or a
            mask is not zeros and ones, one of them for each action.
    """
    in_turns = callable(getattr(env, "last", None))
    begun = env.reset(seed=seed)  # to see whether there are masks; the first episode begins anew
    masks = _Masks(env, getattr(env, "infos", {}) if in_turns else begun[1])
    agents = {
        str(agent): (masks.space(agent), env.action_space(agent)) for agent in env.possible_agents
    }
    returns: list[dict[str, float]] = []
    while True:
        try:
            with connect_agents(address, agents, **options) as session:
                while len(returns) != episodes:
                    play = _in_turns if in_turns else _at_once
                    returns.append(play(env, session, masks, seed))
                    seed = None
            return returns
        except GatewayError as error:
            if error.code == "ENDED":
                return returns
            if error.code != "UNKNOWN_SESSION":
                raise
            seed = None  # another gateway took the place of a dead one


class _Masks:
    """Action masks that infos have, as parts of observations.

    Args:
        env: the environment.
        infos: by agent, after a reset.
    """

    def __init__(self, env: Any, infos: Mapping[Any, Any]) -> None:
        self._spaces = {agent: env.observation_space(agent) for agent in env.possible_agents}
        seen = {
            agent: len(info[_MASK])
            for agent in env.possible_agents
            if (info := infos.get(agent)) and _MASK in info
        }
        # In a game of turns, perhaps only the agent on turn has one.
        self._lengths = {
            agent: length
            for agent in env.possible_agents
            for masked, length in seen.items()
            if env.action_space(agent) == env.action_space(masked)
        }

    def space(self, agent: Any) -> Any:
        """What the agent observes."""
        plain = self._spaces[agent]
        if agent not in self._lengths:
            return plain
        message = as_message(plain)
        parts: dict[str, Space] = {"observation": message}
        if message.HasField("dict"):
            parts = {entry.key: entry.space for entry in message.dict.entries}
        return dict_of({**parts, _MASK: multi_binary(self._lengths[agent])})

    def shown(
        self, agent: Any, observation: Any, info: Mapping[str, Any] | None, over: bool
    ) -> Any:
        """An observation with its mask. The last one of an episode, which nobody acts on, may lack
        it, and gets ones.

        Raises:
            ValueError: there is no mask, or it is not one.
        """
        if agent not in self._lengths:
            return observation
        mask, length = (info or {}).get(_MASK), self._lengths[agent]
        if mask is None and not over:
            raise ValueError(f"the info of agent {agent!r} has no {_MASK}, and had one before")
        given = np.asarray(np.ones(length) if mask is None else mask)  # [n]
        if given.shape != (length,) or not np.isin(given, (0, 1)).all():
            raise ValueError(
                f"the {_MASK} of agent {agent!r} must have {length} numbers that are 0 or 1, and "
                f"is {mask!r}"
            )
        legal: NDArray[np.int8] = given.astype(np.int8)  # [n]
        parts = observation if isinstance(observation, Mapping) else {"observation": observation}
        return {**parts, _MASK: legal}


def _at_once(env: Any, session: AgentsSession, masks: _Masks, seed: int | None) -> dict[str, float]:
    """Play an episode of a Parallel environment."""
    ids = {str(agent): agent for agent in env.possible_agents}
    returns = dict.fromkeys(ids, 0.0)
    observations, infos = env.reset(seed=seed)
    actions = session.step(
        {
            name: masks.shown(agent, observations[agent], infos.get(agent), False)
            for name, agent in ids.items()
            if agent in observations
        }
    )
    while env.agents:
        observations, *told, infos = env.step({ids[name]: each for name, each in actions.items()})
        # Extra keys, such as "__all__", are ignored, as in a run without a gateway.
        rewards, terminated, truncated = (
            {name: of[agent] for name, agent in ids.items() if agent in of} for of in told
        )
        for name, reward in rewards.items():
            returns[name] += float(reward)
        ended = {name for name in terminated if terminated[name] or truncated[name]}
        shown = {
            name: masks.shown(agent, observations[agent], infos.get(agent), name in ended)
            for name, agent in ids.items()
            if agent in env.agents or name in ended
        }
        numbers = {name: infos.get(ids[name]) or {} for name in shown}
        others = bool(env.agents)
        actions = session.step(shown, rewards, terminated, truncated, numbers, continues=others)
    return returns


def _in_turns(
    env: Any, session: AgentsSession, masks: _Masks, seed: int | None
) -> dict[str, float]:
    """Play an episode of an AEC environment."""
    returns = {str(agent): 0.0 for agent in env.possible_agents}
    env.reset(seed=seed)
    while env.agents:
        agent = env.agent_selection
        name = str(agent)
        observation, reward, terminated, truncated, info = env.last()
        returns[name] += float(reward)
        shown = {name: masks.shown(agent, observation, info, terminated or truncated)}
        over = {name: terminated}, {name: truncated}
        others = len(env.agents) > (terminated or truncated)
        actions = session.step(shown, {name: reward}, *over, {name: info or {}}, continues=others)
        env.step(actions.get(name))
    return returns
