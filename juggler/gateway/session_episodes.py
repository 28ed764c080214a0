"""Episodes of a session's environments: line-ups, returns and infos."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.info_numbers import LARGEST, MOST_EPISODES, InfoNumber, keep_newest
from juggler.envrunner.multi_agent.line_up import LineUp, LineUps, Players

_OUT, _ACTS, _ENDED = 0, 1, 2
_NONE, _NONE_LONG = np.zeros(0), np.zeros(0, np.intp)

#: Maximum number of ended episodes until the next report; the oldest are dropped. The driver
#: accepts this many with a batch of any size.
MOST_UNREPORTED = 1 << 16


def forget_oldest(ended: list[Any]) -> int:
    """Drop the oldest of too many episodes; return the number dropped."""
    many = max(0, len(ended) - MOST_UNREPORTED)
    del ended[:many]
    return many


class AgentRows(Protocol):
    """R rows of one agent in a batch of steps.

    Attributes:
        environments: [R] their numbers.
        paused: indices of rows that need no action.
        rewarded: indices of rows whose reward follows an action.
        rewards: [R]
        early: rewards from before an agent's first action, with their indices.
        infos: [R, K]; None: no numbers.
    """

    environments: list[int]
    paused: list[int]
    rewarded: list[int]
    rewards: list[float]
    early: list[tuple[int, float]]
    infos: NDArray[np.float64] | None

    @property
    def index(self) -> int:
        """Index of the agent in its session."""

    @property
    def ended(self) -> list[int]:
        """Indices of rows where the agent's episode ended."""


def _acting(part: AgentRows) -> list[int]:
    """Return the environments where an agent acts next."""
    out = set(part.paused)
    return [each for at, each in enumerate(part.environments) if at not in out]


class Followed(NamedTuple):
    """Ends and starts of environments' episodes in a batch of steps.

    Attributes:
        over: environments whose episodes end.
        began: environments whose next episodes begin.
        early: the first agent and environment where the agent would act although it has ended;
            None: no error.
    """

    over: list[int]
    began: list[int]
    early: tuple[int, int] | None


class BookedBatch(NamedTuple):
    """Results of environments in a batch of steps.

    Attributes:
        env_returns: [L] returns of ended episodes.
        env_lengths: [L] their environment steps.
        agent_returns: [L, A] each agent's return in them; NaN if it did not act.
        steps: number of environment steps.
    """

    env_returns: NDArray[np.float64]
    env_lengths: NDArray[np.intp]
    agent_returns: NDArray[np.float64]
    steps: int


class SharedEpisodes:
    """The episodes of N environments with A agents, and their line-ups.

    An agent takes part from its first observation until its end. The episode of an environment ends
    when no agent takes part in it. Until then, an agent that has ended cannot act.

    Args:
        line_ups: draws a line-up for each episode; None: the same modules act in all episodes.
        played_by: modules that may act, by name of the agent.
        order: names of agents, in the order of the line-ups.
        numbers: numbers of the N environments among the environments of all sessions.

    Attributes:
        names: names of the agents.
        drawn: line-ups are drawn.
    """

    def __init__(
        self,
        line_ups: LineUps | None,
        played_by: Mapping[str, Sequence[str]],
        order: Sequence[str],
        numbers: range,
    ) -> None:
        self.names, self.drawn = tuple(played_by), line_ups is not None
        self._line_ups, self._numbers = line_ups, np.array(numbers, np.intp)
        at_first = {name: ids[0] for name, ids in played_by.items()}
        self._players = Players(len(numbers), self.names, at_first)
        self._column = np.array([order.index(name) for name in self.names], np.intp)  # [A]
        shape = len(self.names), len(numbers)
        self._stages: NDArray[np.int8] = np.zeros(shape, np.int8)
        self._between = set(range(len(numbers)))  # environments without an episode
        self._returns = np.zeros(shape)
        self._acted = np.zeros(shape, np.bool_)  # in the episode
        self._lengths = np.zeros(len(numbers), np.intp)

    def follow(self, parts: Sequence[AgentRows], continuing: Collection[int] = ()) -> Followed:
        """Follow which agents end and which act next.

        Args:
            parts: rows of different agents.
            continuing: environments whose episodes continue with the agents that act next, even if
                all earlier agents have ended.
        """
        stages = self._stages
        touched: set[int] = set()
        for part in parts:
            ended = [part.environments[at] for at in part.ended]
            stages[part.index, ended] = _ENDED
            touched.update(ended)
        if continuing:
            touched -= {*continuing} & {each for part in parts for each in _acting(part)}
        over = [each for each in sorted(touched) if not (stages[:, each] == _ACTS).any()]
        stages[:, over] = _OUT
        self._between.update(over)
        began: set[int] = set()
        for part in parts:
            acting = _acting(part)
            of_agent = stages[part.index, acting]  # [B]
            gone = of_agent == _ENDED
            if gone.any():
                return Followed(over, [], (part.index, acting[int(gone.argmax())]))
            if self._between:
                began.update(self._between.intersection(acting))
            stages[part.index, acting] = _ACTS
        self._between -= began
        return Followed(over, sorted(began), None)

    def book(
        self, parts: Sequence[AgentRows], over: list[int], idle: Mapping[int, float]
    ) -> BookedBatch:
        """Add the rewards of a batch of steps.

        A length is a number of environment steps: each batch with rewards for an environment is one
        step.

        Args:
            parts: rows of different agents.
            over: as `follow` returned it.
            idle: by environment, rewards of agents that never acted in an ended episode.
        """
        stepped: set[int] = set()
        for part in parts:
            rewarded = [part.environments[at] for at in part.rewarded]
            self._returns[part.index, rewarded] += [part.rewards[at] for at in part.rewarded]
            self._acted[part.index, rewarded] = True
            stepped.update(rewarded)
        self._lengths[list(stepped)] += 1
        booked = self._ended(over, len(stepped), idle)
        for part in parts:  # these may belong to the next episode
            for at, reward in part.early:
                self._returns[part.index, part.environments[at]] += reward
        return booked

    def _ended(self, over: list[int], steps: int, idle: Mapping[int, float]) -> BookedBatch:
        if not over:  # most batches
            return BookedBatch(_NONE, _NONE_LONG, _NONE[:, None], steps)
        so_far = self.so_far(over)
        self._returns[:, over], self._acted[:, over], self._lengths[over] = 0, False, 0
        totals = so_far.env_returns + [idle.get(each, 0.0) for each in over]  # [L]
        return so_far._replace(env_returns=totals, steps=steps)

    def so_far(self, environments: Sequence[int]) -> BookedBatch:
        """Return results of running episodes in environments [L], without steps."""
        at = list(environments)
        returns = self._returns[:, at]  # [A, L]
        of_agents = np.where(self._acted[:, at], returns, np.nan)  # [A, L]
        return BookedBatch(returns.sum(0), self._lengths[at], of_agents.T, 0)

    # -- line-ups ---------------------------------------------------------------------------------

    def players(self, environments: Sequence[int]) -> NDArray[np.object_]:
        """Return the ids of modules [K, A] in environments [K]."""
        return self._players.of(np.array(environments, np.intp))

    def begin(self, environments: Sequence[int]) -> None:
        """Draw line-ups for new episodes in environments [K].

        Raises:
            LineUpError: an environment gets no line-up.
        """
        assert self._line_ups is not None
        began = np.array(environments, np.intp)
        line_up = self._line_ups.begin(self._numbers[began])
        ours = line_up.players.reshape(len(began), -1)[:, self._column]  # [K, A]
        slots = began[:, None] * len(self.names) + np.arange(len(self.names))  # [K, A]
        self._players.line_up(LineUp(slots.ravel(), ours.ravel()))

    def report_ended(self, environments: Sequence[int], booked: BookedBatch) -> None:
        """Report ended episodes of environments [L] to the line-ups."""
        if self._line_ups is not None:
            in_order = np.empty_like(booked.agent_returns)  # [L, A]
            in_order[:, self._column] = booked.agent_returns
            self._line_ups.ended(self._numbers[list(environments)], in_order, booked.env_lengths)

    def leave(self) -> None:
        """Drop running episodes: other environments play a league's matches."""
        if self._line_ups is not None:
            self._line_ups.abandon(self._numbers.tolist())


class SessionInfos:
    """Sums up the infos of a session's steps over episodes.

    Args:
        names: names of the K numbers of a step.
        agents: A, number of agents in each environment.
        apart: names of agents with separate numbers; (): numbers are not separate.
        environments: N.
        newest: gets the numbers of episodes, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        agents: int,
        apart: Sequence[str],
        environments: int,
        newest: dict[str, deque[InfoNumber]],
    ) -> None:
        before = [f"{agent}/" for agent in apart] or [""] * agents
        self._names = [
            (a, k, b + name) for a, b in enumerate(before) for k, name in enumerate(names)
        ]
        self._newest = newest
        # [4, N, A, K] sums, counts, least and most
        start = np.array([0, 0, np.inf, -np.inf])[:, None, None, None]
        self._start = np.broadcast_to(start, (4, environments, agents, len(names)))
        self._numbers = self._start.copy()

    def see(self, parts: Iterable[AgentRows], over: Sequence[int]) -> None:
        """Add the numbers of a batch of steps.

        Args:
            parts: rows of different agents.
            over: environments whose episodes end.
        """
        for part in parts:
            if part.infos is not None and part.rewarded:
                rows = [part.environments[at] for at in part.rewarded]  # [R]
                self._add(rows, part.index, part.infos[part.rewarded, None])
        self._end(over)

    def record(
        self, environment: int, infos: NDArray[np.float64] | None, *, starts: bool, ends: bool
    ) -> None:
        """Add the numbers of the L steps of a recording.

        Args:
            environment: its number.
            infos: [L, K]; None: no numbers.
            starts: the first step begins an episode.
            ends: the last step ended it.
        """
        if starts:
            self._end([environment])  # the previous episode
        if infos is not None:
            self._add([environment], 0, infos[None])
        if ends:
            self._end([environment])

    def _add(self, environments: list[int], agent: int, infos: NDArray[np.float64]) -> None:
        """Add numbers [R, L, K] of steps in environments [R]."""
        at, valid = (environments, agent), np.abs(infos) <= LARGEST  # false with a NaN
        sums, counts, least, most = self._numbers
        sums[at] += np.where(valid, infos, 0.0).sum(1)
        counts[at] += valid.sum(1)
        least[at] = np.minimum(least[at], np.where(valid, infos, np.inf).min(1))
        most[at] = np.maximum(most[at], np.where(valid, infos, -np.inf).max(1))

    def _end(self, environments: Sequence[int]) -> None:
        """End the episodes of environments [E]."""
        if not environments:
            return
        ended = list(environments)
        sums, counts, least, most = self._numbers[:, ended]  # [E, A, K] each
        means = sums / np.maximum(counts, 1)  # [E, A, K]
        for a, k, name in self._names:
            gave = counts[:, a, k].nonzero()[0][-MOST_EPISODES:]
            if len(gave):
                columns = ([*each[gave, a, k].tolist()] for each in (means, least, most))
                numbers = [InfoNumber(*each) for each in zip(*columns, strict=True)]
                keep_newest(self._newest, {name: numbers})
        self._numbers[:, ended] = self._start[:, ended]
