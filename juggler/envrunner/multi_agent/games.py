"""One environment with PettingZoo's Parallel or AEC interface, as the agents' turns."""

from __future__ import annotations

import copy
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from gymnasium import Space

from juggler.envrunner.multi_agent.reports import AgentReport, Reports, is_mapping, mask_in
from juggler.envrunner.multi_agent.slot_books import BrokenRule
from juggler.envrunner.multi_agent.turns import STATE
from juggler.runtime.wire.flags import NoFlag, as_flag


def reader(env: Any, name: str) -> Callable[[], Any]:
    """Make a fast `getattr(env, name)` for an environment that has been reset.

    PettingZoo's wrappers forward a lookup one by one, which takes longer than some moves. Wrappers
    that would only forward it are skipped, unless they have their own value of this name. Wrappers
    with their own property or `__getattr__` are called as usual.

    Args:
        env: an environment, which may be a wrapper. What wrappers wrap must stay the same.
        name: of an attribute.
    """
    wrappers = sys.modules.get("pettingzoo.utils.wrappers")
    passed: list[dict[str, Any]] = []  # the wrappers' own attributes
    while wrappers is not None and _only_forwards(env, name, wrappers):
        passed.append(vars(env))
        env = env.env
    if not passed:
        return functools.partial(getattr, env, name)

    def read() -> Any:
        for own in passed:
            if name in own:
                return own[name]
        return getattr(env, name)

    return read


def _only_forwards(env: Any, name: str, wrappers: Any) -> bool:
    """Return whether a wrapper only forwards this attribute."""
    kinds = wrappers.BaseWrapper, wrappers.OrderEnforcingWrapper, wrappers.BaseParallelWrapper
    made: Any = type(env)
    ordinary: Any = object.__getattribute__
    return (
        isinstance(env, kinds)
        and made.__getattribute__ is ordinary
        and any(made.__getattr__ is kind.__getattr__ for kind in kinds)
        and not hasattr(made, name)
        and "env" in vars(env)
    )


class Game(ABC):
    """One environment with several agents.

    Args:
        env: an environment of PettingZoo's interface.
        index: of the environment among N.
        limit: truncate all agents after this many steps of the environment; None: never.

    Attributes:
        ids: its agents, by its own names; slots are numbered in this order.
        critics_see: values of `critic_sees` that it reports.

        Raises:
            ValueError: the environment has no possible_agents.
    """

    def __init__(self, env: Any, index: int, limit: int | None = None) -> None:
        self.env = env
        self.index = index
        self.critics_see: Collection[str] = ()
        self._limit = limit
        self._steps = 0  # of the running episode, which subclasses count
        ids = getattr(env, "possible_agents", None)
        if not ids:
            raise ValueError(
                f"{type(getattr(env, 'unwrapped', env)).__name__} must have possible_agents: list "
                "in its constructor every agent that it may ever have. A Parallel environment may "
                "have max_num_agents instead, a number"
            )
        self.ids: tuple[Hashable, ...] = tuple(ids)
        self._places = {each: place for place, each in enumerate(self.ids)}
        self._slots = [index * len(self.ids) + place for place in range(len(self.ids))]
        self._group_of: Sequence[int] = ()
        self._agents: Callable[[], Any] = list  # the present agents of the running episode

    def spaces_of(self, agent: Hashable) -> tuple[Space[Any], Space[Any]]:
        """Return the observation space and the action space of an agent.

        Raises:
            BrokenRule: one of them changes with each call, or is not a space.
        """
        for name in ("observation_space", "action_space"):
            space, again = getattr(self.env, name)(agent), getattr(self.env, name)(agent)
            if not isinstance(space, Space):
                reason = f"{name}({agent!r}) must return a space, not {space!r}"
                raise BrokenRule(self.index, reason)
            if space is not again and space != again:
                reason = (
                    f"{name}({agent!r}) returns {space} and then {again}: an agent must always "
                    "have the same space"
                )
                raise BrokenRule(self.index, reason)
        return self.env.observation_space(agent), self.env.action_space(agent)

    def join(self, group_of: Sequence[int]) -> None:
        """Set the group of each agent, before the first report."""
        self._group_of = group_of

    @abstractmethod
    def reset(self, seed: int, reports: Reports) -> Mapping[Hashable, Any]:
        """Begin an episode, report the first actors, and return infos."""

    @abstractmethod
    def step(self, actions: Mapping[Hashable, Any], reports: Reports) -> None:
        """Carry out the actions, and report their results."""

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        if callable(close := getattr(self.env, "close", None)):
            close()

    def _seen_by_critics(
        self, observations: Callable[[], Mapping[Hashable, Any]]
    ) -> dict[str, Any]:
        """Return what critics see now: the state, or all observations by agent."""
        return {
            kind: (
                self.env.state()
                if kind == STATE
                else {str(agent): each for agent, each in observations().items()}
            )
            for kind in self.critics_see
        }

    def _begins(self) -> None:
        self._steps = 0
        self._agents = reader(self.env, "agents")
        self._require_agents()

    def _is_late(self) -> bool:
        """Count a step, and return whether it reaches the limit."""
        self._steps += 1
        return self._steps == self._limit

    def _require_agents(self) -> None:
        if not self._agents():
            raise BrokenRule(self.index, "no agent is there: `agents` is empty after the reset")

    def _acts(self, agent: Hashable, observation: Any, info: Any, reports: Reports) -> None:
        place = self._place(agent)
        report = AgentReport(self._slots[place], observation, mask_in(info))
        reports.acting[self._group_of[place]].append(report)

    def _ends(
        self, agent: Hashable, observation: Any, info: Any, terminated: bool, reports: Reports
    ) -> None:
        place = self._place(agent)
        # Copies, because the next episode may begin in the same memory.
        seen, mask = copy.deepcopy((observation, mask_in(info)))
        report = AgentReport(self._slots[place], seen, mask, terminated)
        reports.ended[self._group_of[place]].append(report)

    def _rewarded(self, agent: Hashable, reward: Any, reports: Reports) -> None:
        try:
            reports.rewards[self._slots[self._place(agent)]] = float(reward)
        except (TypeError, ValueError):
            reason = f"the reward of agent {agent!r} must be a number, not {reward!r}"
            raise BrokenRule(self.index, reason) from None

    def _as_flag(self, agent: Hashable, what: str, value: Any) -> bool:
        if value is True or value is False:  # the usual case
            return bool(value)
        try:
            return as_flag(f"{what} of agent {agent!r}", value)
        except NoFlag as error:
            raise BrokenRule(self.index, str(error)) from None

    def _keep_unread(self, infos: Mapping[Hashable, Any], reports: Reports) -> None:
        if unknown := infos.keys() - self._places.keys():
            reports.unread.update(map(str, unknown))

    def _place(self, agent: Hashable) -> int:
        place = self._places.get(agent)
        if place is None:
            reason = f"agent {agent!r} is not in possible_agents, {list(self.ids)}"
            raise BrokenRule(self.index, reason)
        return place


class ParallelGame(Game):
    """PettingZoo's Parallel interface: all present agents act at once.

    An agent pauses while it is present without an observation.
    """

    _paused: dict[Hashable, bool]  # by agent, whether it has ended: False

    def reset(self, seed: int, reports: Reports) -> Mapping[Hashable, Any]:
        result = self.env.reset(seed=seed)
        if not _are_dicts(result, 2):
            raise BrokenRule(self.index, "it must return (observations, infos), two dicts by agent")
        observations, infos = result
        self._begins()
        self._keep_unread(infos, reports)
        self._all_act(self._agents(), observations, infos, reports)
        self._show_critics(observations, self._agents(), (), reports)
        by_agent: Mapping[Hashable, Any] = infos
        return by_agent

    def step(self, actions: Mapping[Hashable, Any], reports: Reports) -> None:
        result = self.env.step(dict(actions))
        if not _are_dicts(result, 5):
            reason = (
                "it must return (observations, rewards, terminations, truncations, infos), five "
                "dicts by agent"
            )
            raise BrokenRule(self.index, reason)
        observations, rewards, terminations, truncations, infos = result
        self._keep_unread(infos, reports)
        there, late = dict.fromkeys(self._agents()), self._is_late()
        ended: list[Hashable] = []
        known = actions  # by agent that has results
        if self._paused:
            known = {**actions, **self._paused}
            rewards = {**dict.fromkeys(self._paused, 0.0), **rewards}
            terminations = {**self._paused, **terminations}
            truncations = {**self._paused, **truncations}
        for agent in known:
            reports.keep(self._slots[self._place(agent)], infos.get(agent))
            terminated = self._of(agent, terminations, "terminations")
            terminated = self._as_flag(agent, "terminated", terminated)
            truncated = self._of(agent, truncations, "truncations")
            truncated = self._as_flag(agent, "truncated", truncated) or (late and agent in there)
            if terminated or truncated:
                seen = self._of(agent, observations, "observations")
                self._ends(agent, seen, infos.get(agent), terminated, reports)
                ended.append(agent)
            elif agent not in there:
                reason = (
                    f"agent {agent!r} is gone from `agents`, and was neither terminated nor "
                    "truncated: an agent must be told its end"
                )
                raise BrokenRule(self.index, reason)
            self._rewarded(agent, self._of(agent, rewards, "rewards"), reports)
        for agent in rewards.keys() - known.keys():
            if agent in self._places:  # else it is an extra key, such as "common"
                self._rewarded(agent, rewards[agent], reports)
        if there and not late:
            self._all_act(there, observations, infos, reports)
        else:
            reports.over.append(self.index)
        self._show_critics(observations, () if late else there, ended, reports)

    def _show_critics(
        self,
        observations: Mapping[Hashable, Any],
        there: Iterable[Hashable],
        ended: Collection[Hashable],
        reports: Reports,
    ) -> None:
        """Report what critics see, with present agents and agents that just ended."""
        if not self.critics_see:
            return
        there = list(there)
        acting = {agent: observations[agent] for agent in there if agent in observations}
        if ended:
            every = {**acting, **{agent: observations[agent] for agent in ended}}
            for kind, seen in self._seen_by_critics(lambda: every).items():
                reports.critics_at_end[kind][self.index] = copy.deepcopy(seen)
        if there:  # also if all of them pause
            for kind, seen in self._seen_by_critics(lambda: acting).items():
                reports.critics_now[kind][self.index] = seen

    def _all_act(
        self,
        agents: Iterable[Hashable],
        observations: Mapping[Hashable, Any],
        infos: Mapping[Hashable, Any],
        reports: Reports,
    ) -> None:
        self._paused = {}
        for agent in agents:
            try:
                seen = observations[agent]
            except KeyError:
                self._place(agent)
                self._paused[agent] = False
            else:
                self._acts(agent, seen, infos.get(agent), reports)

    def _of(self, agent: Hashable, by_agent: Mapping[Hashable, Any], what: str) -> Any:
        try:
            return by_agent[agent]
        except KeyError:
            reason = f"agent {agent!r} is missing in the {what} that it returned"
            raise BrokenRule(self.index, reason) from None


def _are_dicts(result: Any, count: int) -> bool:
    """Return whether an environment returned this many dicts."""
    return isinstance(result, tuple) and len(result) == count and all(map(is_mapping, result))


class TurnBasedGame(Game):
    """An environment of PettingZoo's AEC interface: one agent acts at a time."""

    def reset(self, seed: int, reports: Reports) -> Mapping[Hashable, Any]:
        self.env.reset(seed=seed)
        self._on_turn = reader(self.env, "agent_selection")
        self._infos = reader(self.env, "infos") if hasattr(self.env, "infos") else dict
        self._begins()
        self._keep_unread(self._infos(), reports)
        # The results of agents that end at once are dropped, because they have not acted.
        if not self._serve(Reports(len(reports.acting)), reports):
            self._require_agents()
        return dict(self._infos())

    def step(self, actions: Mapping[Hashable, Any], reports: Reports) -> None:
        (action,) = actions.values()
        self.env.step(action)
        self._keep_unread(self._infos(), reports)
        if not self._serve(reports, reports, self._is_late()):
            reports.over.append(self.index)

    def _serve(self, ends: Reports, reports: Reports, late: bool = False) -> bool:
        """Report the agent that acts next; return whether there is one.

        Agents that are done come first, and are stepped with None. Then, if `late`, all other
        agents are truncated.
        """
        served: set[Hashable] = set()
        while self._agents():
            agent = self._on_turn()
            if agent in served:
                reason = (
                    f"agent {agent!r} is still on turn after its last step, which had no action"
                )
                raise BrokenRule(self.index, reason)
            observation, reward, terminated, truncated, info = self.env.last()
            terminated = self._as_flag(agent, "terminated", terminated)
            truncated = self._as_flag(agent, "truncated", truncated)
            self._rewarded(agent, reward, ends)
            ends.keep(self._slots[self._place(agent)], info)
            if late and not (terminated or truncated):
                if not served:
                    self._show_critics_the_end(ends)
                self._truncate(ends)
                return False
            if not (terminated or truncated):
                if not self.critics_see:
                    self._acts(agent, observation, info, reports)
                    return True
                # A copy, because the environment is observed again for critics.
                self._acts(agent, copy.deepcopy(observation), info, reports)
                for kind, seen in self._seen_by_critics(self._observations).items():
                    reports.critics_now[kind][self.index] = seen
                return True
            self._ends(agent, observation, info, terminated, ends)
            if not served:  # done agents leave one after another, and have all ended now
                self._show_critics_the_end(ends)
            served.add(agent)
            self.env.step(None)
        return False

    def _observations(self) -> dict[Hashable, Any]:
        # Copies, because the environment may write all of them into the same memory.
        return {agent: copy.deepcopy(self.env.observe(agent)) for agent in self._agents()}

    def _show_critics_the_end(self, ends: Reports) -> None:
        for kind, seen in self._seen_by_critics(self._observations).items():
            ends.critics_at_end[kind][self.index] = copy.deepcopy(seen)

    def _truncate(self, ends: Reports) -> None:
        """Report the end of every present agent, with the values of `last`.

        An agent that terminated out of turn counts as terminated.
        """
        rewards, infos = getattr(self.env, "_cumulative_rewards", None), self.env.infos
        if rewards is None:
            reason = (
                "max_episode_steps needs the rewards of agents that are not on turn, in its "
                "_cumulative_rewards, as PettingZoo's AECEnv has them"
            )
            raise BrokenRule(self.index, reason)
        terminations = getattr(self.env, "terminations", {})
        for agent in self._agents():
            terminated = self._as_flag(agent, "terminated", terminations.get(agent, False))
            self._rewarded(agent, rewards[agent], ends)
            ends.keep(self._slots[self._place(agent)], infos.get(agent))
            self._ends(agent, self.env.observe(agent), infos.get(agent), terminated, ends)
