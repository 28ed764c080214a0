"""Gymnasium's and PettingZoo's environments as simulators, without importing either."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Literal

import numpy as np

from juggler.client.connection import GatewayConnection, GatewayError
from juggler.client.session import AgentsSession, Session, connect, connect_agents
from juggler.client.space_values import as_message, dict_of, multi_binary

_MASK = "action_mask"


def play(
    env: Any,
    address: str,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    env_kwargs: dict[str, Any] | None = None,
    mode: Literal["remote", "local"] = "remote",
    **options: Any,
) -> list[float]:
    """Play an environment at a gateway: `play("CartPole-v1", "127.0.0.1:5005")`.

    If the gateway dies and another one replaces it within a minute, playing continues there with a
    new episode.

    Args:
        env: a Gymnasium id, or an environment.
        address: address of the gateway.
        episodes: number of episodes to play; None: until the run ends.
        seed: seed of the environment; None: a seed from the run. The run's `simulator_parameters`
            are the options of each reset.
        env_kwargs: keyword arguments for making an environment by its id.
        mode: what acts, as in `connect`.
        options: options of `connect`. Numbers in the environment's `info` reach the run's metrics
            if `info_names` has their names.

    Returns:
        The undiscounted return of each episode.

    Raises:
        GatewayError: the session failed. The end of the run is not an error.
        ModuleNotFoundError: `env` is an id, and Gymnasium is not installed.
    """
    made = isinstance(env, str)
    if made:
        # The client itself does not depend on Gymnasium.
        try:
            gymnasium = importlib.import_module("gymnasium")
        except ModuleNotFoundError as error:
            text = "environments by name need the package gymnasium: pip install gymnasium"
            raise ModuleNotFoundError(text) from error
        env = gymnasium.make(env, **(env_kwargs or {}))
    spaces = env.observation_space, env.action_space
    returns: list[float] = []

    # The returns outlive a session: playing may continue at another gateway.
    def session_with(seed: int | None) -> None:
        with connect(address, *spaces, mode=mode, **options) as session:
            _play(env, session, episodes, seed, returns)

    try:
        _until_the_end(session_with, seed)
    finally:
        if made:
            env.close()
    return returns


def play_agents(
    env: Any,
    address: str,
    *,
    episodes: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Play an environment with several agents at a gateway.

    If the gateway dies and another one replaces it within a minute, playing continues there with a
    new episode.

    Args:
        env: an environment with PettingZoo's Parallel or AEC interface.
        address: address of the gateway.
        episodes: number of episodes to play; None: until the run ends.
        seed: seed of the environment; None: a seed from the run. The run's `simulator_parameters`
            are the options of each reset.
        options: options of `connect_agents`. Numbers in the agents' infos reach the run's metrics
            if `info_names` has their names.

    Returns:
        For each episode, the undiscounted return of each agent, by the agent's id as a string.

    Raises:
        GatewayError: the session failed. The end of the run is not an error.
        ValueError: an agent acts without an action mask, although the first infos had masks; or a
            mask is not a zero or one for each action.
    """
    in_turns = callable(getattr(env, "last", None))
    begun = env.reset(seed=seed)  # only to find masks; the first episode resets again
    masks = _Masks(env, getattr(env, "infos", {}) if in_turns else begun[1])
    agents = {
        str(agent): (masks.space(agent), env.action_space(agent)) for agent in env.possible_agents
    }
    # The returns outlive a session: playing may continue at another gateway.
    returns: list[dict[str, float]] = []

    def session_with(seed: int | None) -> None:
        play_episode = _in_turns if in_turns else _at_once
        with connect_agents(address, agents, **options) as session:
            seed = session.next_seed() if seed is None else seed
            while len(returns) != episodes:
                returns.append(play_episode(env, session, masks, seed))
                seed = None

    _until_the_end(session_with, seed)
    return returns


def _until_the_end(session_with: Callable[[int | None], None], seed: int | None) -> None:
    """Play sessions, the first with a seed, until one is complete."""
    while True:
        try:
            return session_with(seed)
        except GatewayError as error:
            if error.code == "ENDED":
                return None
            if error.code != "UNKNOWN_SESSION":
                raise
        seed = None  # a dead gateway has been replaced


def _play(
    env: Any, session: Session, episodes: int | None, seed: int | None, returns: list[float]
) -> None:
    """Play in one session until there are as many returns as episodes."""
    seed = session.next_seed() if seed is None else seed
    observation, _ = env.reset(seed=seed, **_options(session))
    action, total = session.step(observation), 0.0
    while True:
        observation, reward, terminated, truncated, info = env.step(action)
        result = reward, terminated, truncated
        total += float(reward)
        final = None
        if terminated or truncated:
            returns.append(total)
            if len(returns) == episodes:
                session.step(observation, *result, infos=info)
                return
            # The reset may write into the same memory.
            total, final, info = 0.0, deepcopy(observation), dict(info)
            observation, _ = env.reset(**_options(session))
        action = session.step(observation, *result, final, infos=info)


def _options(session: GatewayConnection) -> dict[str, dict[str, float]]:
    """Return the options of a reset, if the run has parameters."""
    return {"options": session.parameters} if session.parameters else {}


class _Masks:
    """Action masks that infos have after a reset, as parts of observations."""

    def __init__(self, env: Any, infos: Mapping[Any, Any]) -> None:
        agents = env.possible_agents
        self._spaces = {agent: env.observation_space(agent) for agent in agents}
        # In a turn-based game, perhaps only the current agent has a mask.
        self._lengths = {
            agent: len(infos[masked][_MASK])
            for agent in agents
            for masked in agents
            if _MASK in (infos.get(masked) or {})
            and env.action_space(agent) == env.action_space(masked)
        }

    def space(self, agent: Any) -> Any:
        """Return the space of the agent's observations, with its mask."""
        if agent not in self._lengths:
            return self._spaces[agent]
        message = as_message(self._spaces[agent])
        parts = {"observation": message}
        if message.HasField("dict"):
            parts = {entry.key: entry.space for entry in message.dict.entries}
        return dict_of({**parts, _MASK: multi_binary(self._lengths[agent])})

    def shown(self, agent: Any, observation: Any, infos: Any, over: bool) -> Any:
        """Return an observation with its mask.

        The last observation of an episode gets no action. If it has no mask, it gets ones.

        Raises:
            ValueError: the mask is missing or not valid.
        """
        if agent not in self._lengths:
            return observation
        mask, length = (infos or {}).get(_MASK), self._lengths[agent]
        if mask is None and not over:
            raise ValueError(f"the info of agent {agent!r} has no {_MASK}, and had one before")
        given = np.asarray(np.ones(length) if mask is None else mask)  # [n]
        if given.shape != (length,) or not np.isin(given, (0, 1)).all():
            rule = f"must have {length} numbers that are 0 or 1"
            raise ValueError(f"the {_MASK} of agent {agent!r} {rule}, and is {mask!r}")
        parts = observation if isinstance(observation, Mapping) else {"observation": observation}
        return {**parts, _MASK: given.astype(np.int8)}


def _at_once(env: Any, session: AgentsSession, masks: _Masks, seed: int | None) -> dict[str, float]:
    """Play an episode of a Parallel environment."""
    ids = {str(agent): agent for agent in env.possible_agents}
    returns = dict.fromkeys(ids, 0.0)
    observations, infos = env.reset(seed=seed, **_options(session))
    actions = session.step(
        {
            name: masks.shown(agent, observations[agent], infos.get(agent), False)
            for name, agent in ids.items()
            if agent in observations
        }
    )
    while env.agents:
        observations, *results, infos = env.step(
            {ids[name]: each for name, each in actions.items()}
        )
        # Extra keys, such as "__all__", are ignored, as in a run without a gateway.
        rewards, terminated, truncated = (
            {name: of[agent] for name, agent in ids.items() if agent in of} for of in results
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
    env.reset(seed=seed, **_options(session))
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
