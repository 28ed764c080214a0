"""Adapts environments to named agents: tuples, places, and padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.envs.registration import EnvSpec
from numpy.typing import NDArray

from juggler.envrunner.environments.action_masks import mask_space, space_with_masks, with_masks
from juggler.envrunner.environments.find_environment import TUPLES, find_environment
from juggler.envrunner.multi_agent.games import is_mapping
from juggler.envrunner.multi_agent.turns import AgentGroup, GroupTurn, MultiAgentEnvs, Turn
from juggler.runtime.connectors.leaves import at, holds_masks
from juggler.runtime.wire.structures import space_leaves, zeros
from juggler.runtime.wire.trees import Tree


def find_tuple_game(name: str) -> Callable[..., TupleAgents]:
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
        """Name the agents of results by their places; newcomers get one."""
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
        seen = [
            group.observation_space
            if mask is None
            else space_with_masks(group.observation_space, mask_space(mask))
            for group, mask in zip(envs.groups, self._masks, strict=True)
        ]
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
        groups = zip(self._envs.groups, self._leaves, self._masks, strict=True)
        for (group, leaves, mask), part, places in zip(groups, parts, rows, strict=True):
            seen: Any = part
            if mask is not None:
                masks = np.broadcast_to(mask, (len(places), len(mask)))  # [b, n]
                seen = with_masks(group.observation_space, part, masks)
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
        what: "actions" or "observations", for errors.
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
