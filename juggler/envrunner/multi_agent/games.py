"""One environment with PettingZoo's Parallel or AEC interface, as the agents' turns."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from juggler.envrunner.environments.seeding import environment_seeds
from juggler.envrunner.failures import EnvironmentFailed
from juggler.envrunner.info_numbers import keep_numbers, unknown_agents
from juggler.envrunner.multi_agent.critics import (
    AllObservations,
    GroupObservations,
    Misfit,
    States,
    no_state,
)
from juggler.envrunner.multi_agent.slot_books import (
    BrokenRule,
    SlotBooks,
    SlotResults,
)
from juggler.envrunner.multi_agent.turns import (
    STATE,
    AgentGroup,
    CriticObservations,
    GroupTurn,
    Turn,
)
from juggler.runtime.modules.columns import ACTION_MASK
from juggler.runtime.wire.flags import NoFlag, as_flag
from juggler.runtime.wire.structures import put, tree_map
from juggler.runtime.wire.trees import Tree


class AgentReport(NamedTuple):
    """Observation of an agent that acts next or ended."""

    slot: int
    observation: Any
    mask: Any  # the action mask in its info; None: no mask
    terminated: bool = False


_slot = attrgetter("slot")


class Reports:
    """Results of all environments in one step."""

    def __init__(self, groups: int, slots: int) -> None:
        self.slots = slots  # N * A
        self.rewards: dict[int, float] = {}  # by slot
        # By group, the agents whose episode ended, and the agents that act next.
        self.ended: list[list[AgentReport]] = [[] for _ in range(groups)]
        self.acting: list[list[AgentReport]] = [[] for _ in range(groups)]
        self.over: list[int] = []  # environments whose agents are all done
        # What critics see, by kind and environment: with the agents that act next, and with the
        # agents that ended, in environments where any did; the latter are copies.
        self.critics_now: dict[str, dict[int, Any]] = defaultdict(dict)
        self.critics_at_end: dict[str, dict[int, Any]] = defaultdict(dict)
        self.infos: dict[str, Any] = {}  # [N * A] by name, of agents that have acted or ended
        self.unread: set[str] = set()  # keys of infos that are not agents


def is_mapping(info: Any) -> bool:
    """Return whether this is a dict or another mapping."""
    # Checked first, because the check of other mappings takes longer.
    return type(info) is dict or isinstance(info, Mapping)


class Game(ABC):
    """One environment with several agents.

    Args:
        limit: truncate all agents after this many steps of the environment; None: never.

    Raises:
        ValueError: the environment has no possible_agents.
    """

    def __init__(self, env: Any, index: int, limit: int | None = None) -> None:
        self.env = env
        self.index = index
        self.critics_see: Collection[str] = ()  # values of `critic_sees` that it reports
        self._limit = limit
        self._steps = 0  # of the running episode, which subclasses count
        # Its agents, by its own names; slots are numbered in this order.
        ids = getattr(env, "possible_agents", None)
        if not ids:
            raise ValueError(
                f"{type(getattr(env, 'unwrapped', env)).__name__} must have possible_agents: list "
                "in its constructor every agent that it may ever have. A Parallel environment may "
                "have max_num_agents instead, a number"
            )
        # Slots stay, although agents come and go.
        self.ids: tuple[Hashable, ...] = tuple(ids)
        self._places = {each: place for place, each in enumerate(self.ids)}
        self._slots = [index * len(self.ids) + place for place in range(len(self.ids))]
        self._group_of: Sequence[int] = ()

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
        self._require_agents()

    def _is_late(self) -> bool:
        """Count a step, and return whether it reaches the limit."""
        self._steps += 1
        return self._steps == self._limit

    def _require_agents(self) -> None:
        if not self.env.agents:
            raise BrokenRule(self.index, "no agent is there: `agents` is empty after the reset")

    def _acts(self, agent: Hashable, observation: Any, info: Any, reports: Reports) -> None:
        place = self._place(agent)
        mask = self._info(agent, info).get(ACTION_MASK)
        report = AgentReport(self._slots[place], observation, mask)
        reports.acting[self._group_of[place]].append(report)

    def _ends(
        self, agent: Hashable, observation: Any, info: Any, terminated: bool, reports: Reports
    ) -> None:
        place = self._place(agent)
        # Copies, because the next episode may begin in the same memory.
        mask = self._info(agent, info).get(ACTION_MASK)
        seen, mask = copy.deepcopy((observation, mask))
        report = AgentReport(self._slots[place], seen, mask, terminated)
        reports.ended[self._group_of[place]].append(report)

    def _stepped(self, agent: Hashable, info: Any, reports: Reports) -> None:
        """Keep the numbers in the info of an agent that has acted."""
        slot, given = self._slots[self._place(agent)], self._info(agent, info)
        if given:
            keep_numbers(reports.infos, given, slot, reports.slots)

    def _info(self, agent: Hashable, info: Any) -> Mapping[Any, Any]:
        if not is_mapping(info):
            reason = (
                f"the info of agent {agent!r} must be a dict, and is of type {type(info).__name__}"
            )
            raise BrokenRule(self.index, reason)
        found: Mapping[Any, Any] = info
        return found

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
        self._all_act(self.env.agents, observations, infos, reports)
        self._show_critics(observations, self.env.agents, (), reports)
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
        there, late = dict.fromkeys(self.env.agents), self._is_late()
        ended: list[Hashable] = []
        known = actions  # by agent that has results
        # Agents that pause have no results, and may end all the same.
        if self._paused:
            known = {**actions, **self._paused}
            rewards = {**dict.fromkeys(self._paused, 0.0), **rewards}
            terminations = {**self._paused, **terminations}
            truncations = {**self._paused, **truncations}
        # In PettingZoo, an agent that has acted has a key in each of these dicts.
        for agent in known:
            self._stepped(agent, infos.get(agent, {}), reports)
            # Each must be there: a missing value would end or reward the agent silently.
            terminated = self._of(agent, terminations, "terminations")
            terminated = self._as_flag(agent, "terminated", terminated)
            truncated = self._of(agent, truncations, "truncations")
            truncated = self._as_flag(agent, "truncated", truncated) or (late and agent in there)
            if terminated or truncated:
                seen = self._of(agent, observations, "observations")
                self._ends(agent, seen, infos.get(agent, {}), terminated, reports)
                ended.append(agent)
            # Its value would be bootstrapped from an observation that does not exist.
            elif agent not in there:
                reason = (
                    f"agent {agent!r} is gone from `agents`, and was neither terminated nor "
                    "truncated: an agent must be told its end"
                )
                raise BrokenRule(self.index, reason)
            self._rewarded(agent, self._of(agent, rewards, "rewards"), reports)
        # Rewards may come out of turn, even to agents that did not act.
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
        if there:  # even if all of them pause
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
                self._acts(agent, seen, infos.get(agent, {}), reports)

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
        self._begins()
        self._keep_unread(self._infos(), reports)
        # The results of agents that end at once are dropped, because they have not acted.
        if not self._serve(Reports(len(reports.acting), reports.slots), reports):
            self._require_agents()
        return dict(self._infos())

    def step(self, actions: Mapping[Hashable, Any], reports: Reports) -> None:
        (action,) = actions.values()
        self.env.step(action)
        self._keep_unread(self._infos(), reports)
        if not self._serve(reports, reports, self._is_late()):
            reports.over.append(self.index)

    def _infos(self) -> Mapping[Hashable, Any]:
        infos: Any = getattr(self.env, "infos", {})
        if not is_mapping(infos):
            raise BrokenRule(self.index, f"its infos must be a dict by agent, not {infos!r}")
        by_agent: Mapping[Hashable, Any] = infos
        return by_agent

    def _serve(self, ends: Reports, reports: Reports, late: bool = False) -> bool:
        """Report the agent that acts next; return whether there is one.

        Agents that are done come first, and are stepped with None. Then, if `late`, all other
        agents are truncated.
        """
        served: set[Hashable] = set()
        while self.env.agents:
            agent = self.env.agent_selection
            if agent in served:
                reason = (
                    f"agent {agent!r} is still on turn after its last step, which had no action"
                )
                raise BrokenRule(self.index, reason)
            observation, reward, terminated, truncated, info = self.env.last()
            terminated = self._as_flag(agent, "terminated", terminated)
            truncated = self._as_flag(agent, "truncated", truncated)
            self._rewarded(agent, reward, ends)
            self._stepped(agent, info, ends)
            # The limit ends the episode of every agent, on turn or not.
            if late and not (terminated or truncated):
                if not served:
                    self._show_critics_the_end(ends)
                self._truncate(ends)
                return False
            if not (terminated or truncated):
                # Critics observe the environment again, which may write into the same memory.
                if self.critics_see:
                    observation = copy.deepcopy(observation)
                self._acts(agent, observation, info, reports)
                for kind, seen in self._seen_by_critics(self._observations).items():
                    reports.critics_now[kind][self.index] = seen
                return True
            self._ends(agent, observation, info, terminated, ends)
            if not served:  # done agents leave one after another, and have all ended now
                self._show_critics_the_end(ends)
            served.add(agent)
            # PettingZoo wants a step with None of each agent that is done.
            self.env.step(None)
        return False

    def _observations(self) -> dict[Hashable, Any]:
        # Copies, because the environment may write all of them into the same memory.
        return {agent: copy.deepcopy(self.env.observe(agent)) for agent in self.env.agents}

    def _show_critics_the_end(self, ends: Reports) -> None:
        for kind, seen in self._seen_by_critics(self._observations).items():
            ends.critics_at_end[kind][self.index] = copy.deepcopy(seen)

    def _truncate(self, ends: Reports) -> None:
        """Report the end of every present agent, with the values of `last`.

        An agent that terminated out of turn counts as terminated.
        """
        rewards, infos = getattr(self.env, "_cumulative_rewards", None), self._infos()
        if rewards is None:
            reason = (
                "max_episode_steps needs the rewards of agents that are not on turn, in its "
                "_cumulative_rewards, as PettingZoo's AECEnv has them"
            )
            raise BrokenRule(self.index, reason)
        terminations = getattr(self.env, "terminations", {})
        for agent in self.env.agents:
            terminated = self._as_flag(agent, "terminated", terminations.get(agent, False))
            self._rewarded(agent, rewards[agent], ends)
            self._stepped(agent, infos.get(agent, {}), ends)
            self._ends(agent, self.env.observe(agent), infos.get(agent, {}), terminated, ends)


class GamesInTurn:
    """Environments of PettingZoo's interfaces as `MultiAgentEnvs`.

    The first environment is reset once to find out which agents have action masks in their infos.
    Every episode has its own seed, derived from the seed of `reset`, so that environments that draw
    a new seed at each unseeded reset are reproducible, too.

    Args:
        games: N environments, which have the same agents with the same spaces.

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
        self._slots = self.num_envs * len(self.agents)
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
        # Masks become a part of observations, so their form must be known before.
        self._observations = [
            GroupObservations(group, next((masks[a] for a in group.agents if a in masks), None))
            for group in plain
        ]
        self.groups = tuple(each.group for each in self._observations)
        self._critics: dict[str, States | AllObservations] = {}
        for kind in critics_see:
            self._critics[kind] = self._states() if kind == STATE else AllObservations(plain)
        # Games report only what a critic of this run sees.
        self.critic_spaces: Mapping[str, Space[Any]] = {
            kind: each.space for kind, each in self._critics.items()
        }
        for game in games:
            game.critics_see = tuple(self._critics)
        self._action_spaces = [batch_space(group.action_space, 1) for group in plain]

    def reset(self, seed: int) -> Turn:
        seeds = environment_seeds(seed, self.num_envs)
        self._generators = [np.random.default_rng(each) for each in seeds]
        reports = Reports(len(self.groups), self._slots)
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
        reports = Reports(len(self.groups), self._slots)
        call, i = "step", 0
        try:
            for i, game in enumerate(self._games):
                game.step(by_env[i], reports)
                # The next episode of a game begins at once, with its own seed.
                if reports.over and reports.over[-1] == i:
                    call = "reset"
                    game.reset(int(self._generators[i].integers(2**31)), reports)
                    call = "step"
        except Exception as error:
            raise self._failure(i, call, error) from None
        with self._broken_rules_in("step"):
            over = np.asarray(reports.over, np.intp)  # [L]
            for ended in reports.ended:
                # Books and batches have ascending slots; games report in any order.
                ended.sort(key=_slot)
            rewards = np.zeros(self._slots)  # [N * A]
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
        remedy = "max_episode_steps = 1000 truncates all agents after that many steps"
        return self._books.overdue(steps, self._name, remedy)

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
        # Spaces need not be hashable.
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
            infos = self._games[0].reset(0, Reports(groups, self._slots))
        except Exception as error:
            raise self._failure(0, "reset", error) from None
        return {
            str(agent): info[ACTION_MASK]
            for agent, info in infos.items()
            if is_mapping(info) and info.get(ACTION_MASK) is not None
        }

    def _states(self) -> States:
        """Batch states; the first environment has been reset."""
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
            # An agent that never acted has no last action.
            last = booked.last[ends]
            ended = [each for each, acted in zip(ended, last.tolist(), strict=True) if acted]
            groups.append(
                GroupTurn(
                    acting=np.array(self._acting[at], np.intp),
                    observations=self._batch(at, acting),
                    first=booked.first[acts],
                    rewards=booked.rewards[acts],
                    ended=np.array([each.slot for each in ended], np.intp),
                    # Their masks may be missing, because no action follows.
                    last_observations=self._batch(at, ended, last=True),
                    last_rewards=booked.last_rewards[ends][last],
                    terminated=np.array([each.terminated for each in ended], np.bool_),
                )
            )
        over = np.array(reports.over, np.intp)
        critics = {kind: self._of_critic(kind, reports) for kind in self._critics}
        ended_with = booked.env_returns, booked.env_lengths, booked.agent_returns
        return Turn(
            tuple(groups),
            # A game begins its next episode in the step that ended the last one.
            began,
            over,
            *ended_with,
            critics,
            infos=reports.infos,
            unread=unknown_agents(reports.unread, self.agents),
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
            raise self._failure(error.env, call, error) from None

    def _failure(self, index: int, call: str, error: Exception) -> EnvironmentFailed:
        if isinstance(error, BrokenRule):
            return EnvironmentFailed(self.name_of(index), call, error.reason)
        return EnvironmentFailed.during(self.name_of(index), call, error)
