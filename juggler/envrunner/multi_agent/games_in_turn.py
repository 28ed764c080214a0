"""N environments of PettingZoo's interfaces, stepped one after another."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.multi_agent.agent_infos import unknown_agents
from juggler.envrunner.multi_agent.critics import AllObservations, States, no_state
from juggler.envrunner.multi_agent.games import Game
from juggler.envrunner.multi_agent.group_observations import GroupObservations, Misfit
from juggler.envrunner.multi_agent.reports import AgentReport, Reports, mask_in
from juggler.envrunner.multi_agent.slot_books import (
    BrokenRule,
    SlotBooks,
    SlotResults,
    overdue_message,
)
from juggler.envrunner.multi_agent.turns import (
    STATE,
    AgentGroup,
    CriticObservations,
    GroupTurn,
    Turn,
)
from juggler.runtime.wire.structures import put, tree_map
from juggler.runtime.wire.trees import Tree


class GamesInTurn:
    """Environments of PettingZoo's interfaces as `MultiAgentEnvs`.

    The first environment is reset once to find out which agents have action masks in their infos.
    Every episode has its own seed, derived from the seed of `reset`, so that environments that draw
    a new seed at each unseeded reset are reproducible, too.

    Args:
        games: N environments, which have the same agents with the same spaces.
        name: of the environments, in errors.
        critics_see: values of `critic_sees` that turns must have.

    Raises:
        EnvironmentFailed: an environment raised, or broke PettingZoo's rules.
        ValueError: an action mask does not fit the actions, or environments have no state for a
            critic.
        UnsupportedSpace: a space has no encoding.
    """

    def __init__(self, games: Sequence[Game], name: str, critics_see: Collection[str] = ()) -> None:
        self._games = games
        self._name = name
        self.num_envs = len(games)
        self.agents = tuple(str(each) for each in games[0].ids)
        come_back = getattr(games[0].env, "agents_come_back", False)
        self._books = SlotBooks(self.num_envs, self.agents, come_back)
        self._acting: list[list[int]] = []  # by group, the slots that act next
        self._generators = [np.random.default_rng(0)]  # by environment, of its next seeds
        with self._broken_rules_in("constructor"):
            plain = self._grouped()
            group_of = {agent: at for at, group in enumerate(plain) for agent in group.agents}
            for game in games:
                game.join([group_of[agent] for agent in self.agents])
        masks = self._masks_in_first_infos(len(plain))
        self._observations = [
            GroupObservations(group, next((masks[a] for a in group.agents if a in masks), None))
            for group in plain
        ]
        self.groups = tuple(each.group for each in self._observations)
        self._critics: dict[str, States | AllObservations] = {}
        for kind in critics_see:
            self._critics[kind] = self._states() if kind == STATE else AllObservations(plain)
        self.critic_spaces: Mapping[str, Space[Any]] = {
            kind: each.space for kind, each in self._critics.items()
        }
        for game in games:
            game.critics_see = tuple(self._critics)
        self._action_spaces = [batch_space(group.action_space, 1) for group in plain]

    def reset(self, seed: int) -> Turn:
        seeds = environment_seeds(seed, self.num_envs)
        self._generators = [np.random.default_rng(each) for each in seeds]
        reports = Reports(len(self.groups))
        i = 0
        try:
            for i, game in enumerate(self._games):
                game.reset(seeds[i], reports)
        except Exception as error:
            raise self._failure(i, "reset", error) from None
        with self._broken_rules_in("reset"):
            booked = self._books.reset(self._now_acting(reports))
            return self._turn(reports, booked, np.arange(self.num_envs))

    def step(self, actions: Sequence[Any]) -> Turn:
        by_env = self._by_env(actions)
        reports = Reports(len(self.groups), self.num_envs * len(self.agents))
        call, i = "step", 0
        try:
            for i, game in enumerate(self._games):
                game.step(by_env[i], reports)
                if reports.over and reports.over[-1] == i:
                    call = "reset"
                    game.reset(int(self._generators[i].integers(2**31)), reports)
                    call = "step"
        except Exception as error:
            raise self._failure(i, call, error) from None
        with self._broken_rules_in("step"):
            over = np.asarray(reports.over, np.intp)  # [L]
            for ended in reports.ended:
                ended.sort(key=_slot)
            rewards = np.zeros(self.num_envs * len(self.agents))  # [N * A]
            rewards[list(reports.rewards)] = list(reports.rewards.values())
            booked = self._books.step(
                rewards,
                np.array([each.slot for ended in reports.ended for each in ended], np.intp),
                over,
                over,
                self._now_acting(reports),
            )
            return self._turn(reports, booked, over)

    def returns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self._books.returns()

    def overdue(self, steps: int) -> str:
        found = self._books.overdue(steps)
        remedy = "max_episode_steps = 1000 truncates all agents after that many steps"
        return overdue_message(found, self._name, remedy)

    def close(self) -> None:
        for game in self._games:
            game.close()

    def name_of(self, index: int) -> str:
        """Name one environment in errors."""
        return f"environment {index} ({self._name})"

    def _grouped(self) -> list[AgentGroup]:
        """Group agents with equal spaces, and compare the environments."""
        ids = self._games[0].ids
        if len({*self.agents}) < len(self.agents):
            raise BrokenRule(0, f"its agents must have different names, not {list(ids)}")
        found = [self._spaces(0, agent) for agent in ids]
        for i, game in enumerate(self._games[1:], start=1):
            if game.ids != ids:
                reason = f"it has the agents {list(game.ids)}, and environment 0 has {list(ids)}"
                raise BrokenRule(i, reason)
            for agent, spaces in zip(ids, found, strict=True):
                if (own := self._spaces(i, agent)) != spaces:
                    reason = f"agent {agent!r} has the spaces {own}, and {spaces} in environment 0"
                    raise BrokenRule(i, reason)
        kinds: list[Any] = []
        members: list[list[str]] = []
        for agent, spaces in zip(self.agents, found, strict=True):
            if spaces not in kinds:
                kinds.append(spaces)
                members.append([])
            members[kinds.index(spaces)].append(agent)
        return [AgentGroup(tuple(m), *kind) for m, kind in zip(members, kinds, strict=True)]

    def _spaces(self, index: int, agent: Hashable) -> tuple[Space[Any], Space[Any]]:
        try:
            return self._games[index].spaces_of(agent)
        except Exception as error:
            raise self._failure(index, "constructor", error) from None

    def _masks_in_first_infos(self, groups: int) -> dict[str, Any]:
        """Reset the first environment, and return its action masks by agent."""
        try:
            infos = self._games[0].reset(0, Reports(groups))
        except Exception as error:
            raise self._failure(0, "reset", error) from None
        masks = {str(agent): mask_in(info) for agent, info in infos.items()}
        return {agent: mask for agent, mask in masks.items() if mask is not None}

    def _states(self) -> States:
        """Batch states; the first environment has been reset.

        Raises:
            ValueError: it has no state.
        """
        env = self._games[0].env
        if not callable(getattr(env, "state", None)):
            raise ValueError(no_state(self._name))
        try:
            first = env.state()
        except NotImplementedError:  # PettingZoo's own classes have the method in any case
            raise ValueError(no_state(self._name)) from None
        except Exception as error:
            raise self._failure(0, "state", error) from None
        space = getattr(env, "state_space", None)
        states = States(space if isinstance(space, Space) else None, first)
        with self._broken_rules_in("state"):
            self._critic_batch(states, {0: first})
        return states

    def _by_env(self, actions: Sequence[Any]) -> list[dict[Hashable, Any]]:
        """Split the actions by environment and agent."""
        ids = self._games[0].ids
        by_env: list[dict[Hashable, Any]] = [{} for _ in self._games]
        for space, slots, batch in zip(self._action_spaces, self._acting, actions, strict=True):
            if slots:
                for slot, action in zip(slots, iterate(space, batch), strict=True):
                    env, place = divmod(slot, len(ids))
                    by_env[env][ids[place]] = action
        return by_env

    def _now_acting(self, reports: Reports) -> NDArray[np.intp]:
        """Keep and return the slots that act next, by groups."""
        for acting in reports.acting:
            acting.sort(key=_slot)
        self._acting = [[each.slot for each in acting] for acting in reports.acting]
        return np.array([slot for slots in self._acting for slot in slots], np.intp)

    def _turn(self, reports: Reports, booked: SlotResults, began: NDArray[np.intp]) -> Turn:
        groups = []
        begin, end = 0, 0  # of the group in the arrays of `booked`
        for at, (acting, ended) in enumerate(zip(reports.acting, reports.ended, strict=True)):
            acts = slice(begin, begin + len(acting))
            ends = slice(end, end + len(ended))
            begin, end = acts.stop, ends.stop
            last = booked.last[ends]  # an agent that never acted has no last action
            ended = [each for each, acted in zip(ended, last.tolist(), strict=True) if acted]
            groups.append(
                GroupTurn(
                    acting=np.array(self._acting[at], np.intp),
                    observations=self._batch(at, acting),
                    first=booked.first[acts],
                    rewards=booked.rewards[acts],
                    ended=np.array([each.slot for each in ended], np.intp),
                    last_observations=self._batch(at, ended, last=True),
                    last_rewards=booked.last_rewards[ends][last],
                    terminated=np.array([each.terminated for each in ended], np.bool_),
                )
            )
        over = np.array(reports.over, np.intp)
        critics = {kind: self._of_critic(kind, reports) for kind in self._critics}
        ended_with = booked.env_returns, booked.env_lengths, booked.agent_returns
        unread = partial(unknown_agents, reports.unread, self.agents) if reports.unread else None
        return Turn(
            tuple(groups), began, over, *ended_with, critics, infos=reports.infos, unread=unread
        )

    def _of_critic(self, kind: str, reports: Reports) -> CriticObservations:
        now = self._critic_batch(self._critics[kind], reports.critics_now[kind])  # [N, ...]
        if not (ends := reports.critics_at_end[kind]):
            return CriticObservations(now, now)
        at_end = tree_map(np.copy, now)  # [N, ...]
        put(at_end, list(ends), self._critic_batch(self._critics[kind], ends))
        return CriticObservations(now, at_end)

    def _critic_batch(self, critic: States | AllObservations, seen: Mapping[int, Any]) -> Tree:
        """Batch what a critic sees of B environments: [B, ...]."""
        try:
            return critic.batch(list(seen.values()))
        except Misfit as error:
            raise BrokenRule(list(seen)[error.row], error.reason) from None

    def _batch(self, group: int, agents: Sequence[AgentReport], last: bool = False) -> Tree:
        """Batch the observations of a group's agents: [B, ...]."""
        observations, masks = [each.observation for each in agents], [each.mask for each in agents]
        try:
            return self._observations[group].batch(observations, masks, last)
        except Misfit as error:
            env, place = divmod(agents[error.row].slot, len(self.agents))
            raise BrokenRule(env, f"agent {self.agents[place]!r}: {error.reason}") from None

    @contextmanager
    def _broken_rules_in(self, call: str) -> Iterator[None]:
        try:
            yield
        except BrokenRule as error:
            where = self.name_of(error.env)
            raise EnvironmentFailed(where, call, error.reason, lasting=True) from None

    def _failure(self, index: int, call: str, error: Exception) -> EnvironmentFailed:
        if isinstance(error, BrokenRule):
            return EnvironmentFailed(self.name_of(index), call, error.reason, lasting=True)
        return EnvironmentFailed.during(self.name_of(index), call, error)


def _slot(report: AgentReport) -> int:
    return report.slot
