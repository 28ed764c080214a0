"""Builds an EnvRunner's environments with several agents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator
from numpy.typing import NDArray

from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.environments.action_masks import mask_space
from juggler.envrunner.environments.envpool import AT_OWN_PACE, make_envpool_rows
from juggler.envrunner.environments.envpool import SCHEME as ENVPOOL
from juggler.envrunner.environments.find_environment import find_environment, wrapper_specs
from juggler.envrunner.failures import failures_of
from juggler.envrunner.multi_agent.games import (
    Game,
    GamesInTurn,
    ParallelGame,
    TurnBasedGame,
    is_mapping,
)
from juggler.envrunner.multi_agent.interfaces import FINDERS, METHODS, class_of
from juggler.envrunner.multi_agent.interfaces import has_several_agents as has_several_agents
from juggler.envrunner.multi_agent.pettingzoo_games import native
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.envrunner.multi_agent.vector_env import MultiAgentVectorEnv
from juggler.envrunner.multi_agent.vector_turns import VectorTurns
from juggler.runtime.connectors.leaves import OBSERVATION, at, holds_masks
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.near_matches import all_of, one_of
from juggler.runtime.wire.structures import space_leaves, zeros
from juggler.runtime.wire.trees import Tree


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
        # `ParallelGame` explains what it should be.
        if not isinstance(results, tuple):
            return results
        return tuple(
            {self._place_of.get(agent, agent): value for agent, value in each.items()}
            if is_mapping(each)
            else each
            for each in results
        )


Rows = NDArray[np.intp]
#: Returns the space of Boxes with the same dtype and number of dimensions; None: there is none.
MergedBox = Callable[[Sequence[Any]], spaces.Box | None]


class PaddedAgents:
    """Environments whose groups of agents are padded to one group.

    Arrays of observations get zeros at their ends. If agents have different numbers of actions, the
    key "action_mask" of their observations allows each its own. Numbers at the ends of a longer
    action are dropped.

    Args:
        envs: the environments.

    Raises:
        ValueError: the spaces cannot be padded.
    """

    def __init__(self, envs: MultiAgentEnvs) -> None:
        self._envs = envs
        self.num_envs, self.agents = envs.num_envs, envs.agents
        self.critic_spaces: Mapping[str, Space[Any]] = envs.critic_spaces
        actions = _together([each.action_space for each in envs.groups], "actions", _box_of_actions)
        masked = isinstance(actions, spaces.Discrete) and any(
            each.action_space != actions or holds_masks(each.observation_space)
            for each in envs.groups
        )
        # By group, the mask [n] of its actions, if it has to be added.
        self._masks = [_own_mask(each) if masked else None for each in envs.groups]
        seen = [_with_mask(*each) for each in zip(envs.groups, self._masks, strict=True)]
        self._leaves = [space_leaves(each) for each in seen]
        observations = _together(seen, "observations", _box_of_observations)
        self.groups: tuple[AgentGroup, ...] = (AgentGroup(envs.agents, observations, actions),)
        number = {agent: g for g, each in enumerate(envs.groups) for agent in each.agents}
        self._group_of = np.array([number[agent] for agent in envs.agents], np.intp)  # [A]
        self._acting: Rows = np.zeros(0, np.intp)  # [B]

    def reset(self, seed: int) -> Turn:
        return self._merged(self._envs.reset(seed))

    def step(self, actions: Sequence[Any]) -> Turn:
        (batch,) = actions
        groups = self._group_of[self._acting % len(self.agents)]  # [B]
        own = [
            _own_actions(batch, np.flatnonzero(groups == g), group.action_space)
            for g, group in enumerate(self._envs.groups)
        ]
        return self._merged(self._envs.step(own))

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._envs.returns()

    def overdue(self, steps: int) -> str:
        return self._envs.overdue(steps)

    def close(self) -> None:
        self._envs.close()

    def _merged(self, turn: Turn) -> Turn:
        parts = turn.groups
        acting, acts = _in_order([each.acting for each in parts])
        ended, ends = _in_order([each.ended for each in parts])
        self._acting = acting
        merged = GroupTurn(
            acting=acting,
            observations=self._padded([each.observations for each in parts], acts),
            first=_joined([each.first for each in parts], acts),
            rewards=_joined([each.rewards for each in parts], acts),
            ended=ended,
            last_observations=self._padded([each.last_observations for each in parts], ends),
            last_rewards=_joined([each.last_rewards for each in parts], ends),
            terminated=_joined([each.terminated for each in parts], ends),
        )
        return replace(turn, groups=(merged,))

    def _padded(self, parts: Sequence[Tree], rows: Sequence[Rows]) -> Tree:
        """Merge observations of the groups: [B, ...].

        Args:
            parts: by group, [b, ...].
            rows: by group, [b] their places among B.
        """
        merged = zeros(self.groups[0].observation_space, (sum(map(len, rows)),))
        for part, places, leaves, mask in zip(parts, rows, self._leaves, self._masks, strict=True):
            seen: Any = part
            if mask is not None:
                seen = {**part} if isinstance(part, Mapping) else {OBSERVATION: part}
                seen[ACTION_MASK] = np.broadcast_to(mask, (len(places), len(mask)))  # [b, n]
            for path, _ in leaves:
                values = at(seen, path)  # [b, ...]
                at(merged, path)[(places, *map(slice, values.shape[1:]))] = values
        return merged


def _in_order(slots: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
    """Sort the slots of the groups; return their places by group, too."""
    every = np.concatenate(slots)  # [B]
    places = np.empty(len(every), np.intp)
    order = np.argsort(every)
    places[order] = np.arange(len(every))
    return every[order], np.split(places, np.cumsum([len(each) for each in slots])[:-1])


def _joined(parts: Sequence[NDArray[Any]], rows: Sequence[Rows]) -> NDArray[Any]:
    joined = np.empty(sum(map(len, rows)), parts[0].dtype)  # [B]
    joined[np.concatenate(rows)] = np.concatenate(parts)
    return joined


def _own_actions(batch: Any, rows: Rows, space: Space[Any]) -> Any:
    """Return a group's part of the actions, without padding: [b, ...]."""
    if isinstance(space, spaces.Dict):
        return {key: _own_actions(batch[key], rows, each) for key, each in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_own_actions(part, rows, e) for part, e in zip(batch, space, strict=True))
    return batch[(rows, *map(slice, space.shape or ()))]


# -- spaces ---------------------------------------------------------------------------------------


def _together(parts: Sequence[Any], what: str, box: MergedBox) -> Space[Any]:
    """Return the space that holds padded values of all spaces.

    Args:
        parts: by group.
        what: "actions" or "observations", for errors.
        box: merges Boxes.

    Raises:
        ValueError: there is none.
    """
    first = parts[0]
    found: Space[Any] | None = None
    if all(each == first for each in parts):
        found = first
    elif all(isinstance(each, spaces.Dict) and each.keys() == first.keys() for each in parts):
        found = spaces.Dict({key: _together([e[key] for e in parts], what, box) for key in first})
    elif all(isinstance(each, spaces.Tuple) and len(each) == len(first) for each in parts):
        found = spaces.Tuple(_together(each, what, box) for each in zip(*parts, strict=True))
    # Numbers must mean the same in all groups, so starts and kinds must be equal.
    elif all(isinstance(each, spaces.Discrete) and each.start == first.start for each in parts):
        found = spaces.Discrete(max(int(each.n) for each in parts), start=int(first.start))
    elif all(isinstance(each, spaces.MultiBinary) and len(each.shape) == 1 for each in parts):
        found = spaces.MultiBinary(max(each.shape[0] for each in parts))
    elif all(
        isinstance(each, spaces.Box)
        and (each.dtype, len(each.shape)) == (first.dtype, len(first.shape))
        for each in parts
    ):
        # Bounds of actions and of observations are padded differently.
        found = box(parts)
    if found is None:
        kinds = " and ".join(map(str, dict.fromkeys(map(str, parts))))
        raise ValueError(
            f"pad_agents: {what} of {kinds} cannot be padded to equal ones: leave it out, and give "
            "each kind of agent a module of its own"
        )
    return found


def _largest(parts: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(max, zip(*(each.shape for each in parts), strict=True)))


def _box_of_observations(parts: Sequence[Any]) -> spaces.Box:
    """Return a Box with the bounds of all, and zero."""
    low, high = np.zeros((2, *_largest(parts)), parts[0].dtype)
    for each in parts:
        own = tuple(map(slice, each.shape))
        low[own], high[own] = np.minimum(low[own], each.low), np.maximum(high[own], each.high)
    return spaces.Box(low, high, dtype=parts[0].dtype.type)


def _box_of_actions(parts: Sequence[Any]) -> spaces.Box | None:
    """Return the longest Box; None: the bounds of others differ."""
    longest = max(parts, key=lambda each: each.shape)
    for each in parts:
        own = tuple(map(slice, each.shape))
        if _largest(parts) != longest.shape or not (
            np.array_equal(each.low, longest.low[own])
            and np.array_equal(each.high, longest.high[own])
        ):
            return None
    found: spaces.Box = longest
    return found


def _own_mask(group: AgentGroup) -> NDArray[np.int8] | None:
    """Return a mask of ones; None: the group has masks."""
    if holds_masks(group.observation_space):
        return None
    assert isinstance(group.action_space, spaces.Discrete)
    return np.ones(int(group.action_space.n), np.int8)


def _with_mask(group: AgentGroup, mask: NDArray[np.int8] | None) -> Space[Any]:
    space = group.observation_space
    if mask is None:
        return space
    parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
    return spaces.Dict({**parts, ACTION_MASK: mask_space(mask)})


#: Makes one environment from env_kwargs, or N of them from env_kwargs and num_envs.
MultiAgentFactory = Callable[..., Any]


def make_multi_agent_envs(
    config: EnvRunnerConfig,
    env_factory: MultiAgentFactory | None = None,
    *,
    just_one: bool = False,
    critics_see: Collection[str] = (),
) -> MultiAgentEnvs:
    """Build an EnvRunner's environments with several agents.

    Args:
        config: the environments and their number.
        env_factory: makes the environments instead of `config.env`.
        just_one: make only one environment, to read its agents and spaces.
        critics_see: values of `critic_sees` that turns must have.

        Raises:
            ValueError: `config` names an environment that does not exist, or an option that is not
                for several agents; or the environments have no state for a critic.
            EnvironmentFailed: the constructor of an environment failed, or its agents break
                PettingZoo's rules.
    """
    config.validate()
    envs = _made(config, 1 if just_one else config.envs_per_runner, env_factory, critics_see)
    if not config.pad_agents or len(envs.groups) == 1:
        return envs
    try:
        return PaddedAgents(envs)
    except BaseException:
        envs.close()
        raise


def _made(
    config: EnvRunnerConfig,
    num_envs: int,
    env_factory: MultiAgentFactory | None,
    critics_see: Collection[str],
) -> MultiAgentEnvs:
    if env_factory is None and config.env.startswith(ENVPOOL) and AT_OWN_PACE in config.env_kwargs:
        _check_options(config, config.env, True)
        return make_envpool_rows(config, num_envs, critics_see)
    make, name = find_games(config, env_factory)
    is_vector = steps_all_at_once(make)
    _check_options(config, name, is_vector)
    # A vector makes all of its environments itself.
    if is_vector:
        if "num_envs" in config.env_kwargs:
            raise ValueError("env_kwargs must not have num_envs: set envs_per_runner instead")
        with failures_of(name, "constructor"):
            vector = make(num_envs=num_envs, **config.env_kwargs)
        try:
            _check_vector(vector, num_envs, name)
            return VectorTurns(vector, name, critics_see)
        except BaseException:
            vector.close()
            raise
    # Games that were made are closed if a later one fails.
    wrappers = wrapper_specs(config.env_wrappers)
    games: list[Game] = []
    try:
        for i in range(num_envs):
            with failures_of(f"environment {i} ({name})", "constructor"):
                env = _wrapped(make(**config.env_kwargs), wrappers)
            games.append(_game(env, i, name, config.max_episode_steps))
        return GamesInTurn(games, name, critics_see)
    except BaseException:
        for game in games:
            game.close()
        raise


def find_games(
    config: EnvRunnerConfig, env_factory: MultiAgentFactory | None
) -> tuple[MultiAgentFactory, str]:
    """Find the factory of the environments, and their name.

    Raises:
        ValueError: there is no such environment, or it has one agent.
        EnvironmentFailed: importing its module failed.
    """
    scheme = next(filter(config.env.startswith, FINDERS), "")
    if env_factory is None and scheme:
        return FINDERS[scheme](config.env), config.env.removeprefix(scheme)
    source = env_factory or find_environment(config.env)
    if isinstance(source, EnvSpec):
        raise ValueError(f"env {config.env!r} has one agent: it is registered with Gymnasium")
    return source, getattr(source, "__qualname__", type(source).__name__)


def steps_all_at_once(make: MultiAgentFactory) -> bool:
    """Return whether a factory makes a `MultiAgentVectorEnv`."""
    made = class_of(make)
    return made is not None and issubclass(made, MultiAgentVectorEnv)


def _check_options(config: EnvRunnerConfig, name: str, is_vector: bool) -> None:
    """Check keys that have another meaning, or none, for several agents."""
    allowed = ("auto", "native") if is_vector else ("auto", "sync")
    if config.vectorize not in allowed:
        raise ValueError(
            f"vectorize = {config.vectorize!r}: the environments of {name} have several agents, "
            f"and are stepped in the EnvRunner's own process; use {one_of(allowed)}"
        )
    # One agent's step may end an episode that others still play.
    if config.autoreset not in ("auto", "same_step"):
        raise ValueError(
            f"autoreset = {config.autoreset!r}: an environment with several agents begins its next "
            "episode within the step that ended the last one; leave it out"
        )
    # A vector has no single environments to wrap or to cut.
    if is_vector and config.env_wrappers:
        raise ValueError(
            f"env_wrappers wrap single environments, and {name} steps all of its own: leave them "
            "out"
        )
    if is_vector and config.max_episode_steps is not None:
        raise ValueError(
            f"max_episode_steps: {name} steps all of its environments at once and has to truncate "
            "their episodes itself; leave it out, or see whether env_kwargs has a limit"
        )
    # Gymnasium's own wrappers expect one observation and one reward.
    for piece in wrapper_specs(config.env_wrappers):
        if piece.entry_point.startswith("gymnasium.wrappers:"):
            raise ValueError(
                f"env_wrappers: {piece.name} is for environments with one agent; name a wrapper of "
                "PettingZoo's interface as 'package.module:Class'"
            )


def _check_vector(vector: MultiAgentVectorEnv, num_envs: int, name: str) -> None:
    needed = ("num_envs", "agents", "observation_space", "action_space")
    if lacking := [each for each in needed if not hasattr(vector, each)]:
        raise ValueError(f"{name} must have {all_of(lacking)}: set them in its constructor")
    if vector.num_envs != num_envs:
        raise ValueError(
            f"{name} has {vector.num_envs} environments where {num_envs} were asked for"
        )
    if not vector.agents or len({*vector.agents}) < len(vector.agents):
        raise ValueError(f"{name} must have agents with different names, not {vector.agents!r}")


def _wrapped(env: Any, wrappers: tuple[WrapperSpec, ...]) -> Any:
    for wrapper in wrappers:
        wrap: Callable[..., Any] = load_env_creator(wrapper.entry_point)
        env = wrap(env, **wrapper.kwargs or {})
    return env


def _game(env: Any, index: int, name: str, limit: int | None) -> Game:
    env = native(env)
    if callable(getattr(env, "last", None)):
        return TurnBasedGame(env, index, limit)
    if all(callable(getattr(env, each, None)) for each in METHODS):
        if not hasattr(env, "possible_agents") and hasattr(env, "max_num_agents"):
            env = PassingAgents(env)
        return ParallelGame(env, index, limit)
    raise ValueError(
        f"{name} must make an environment with PettingZoo's Parallel or AEC interface, or be a "
        f"MultiAgentVectorEnv; it made a {type(env).__name__}"
    )
