"""Line-ups of a league, drawn by the driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from juggler.envrunner.multi_agent.line_up import LineUp
from juggler.envrunner.rounds import EndedMatch
from juggler.envrunner.setup import RANDOM, may_play
from juggler.runtime.wire.v1 import training_pb2

_MOST_AGAIN = 64  # line-ups that are played again if no new one is left


@dataclass(frozen=True, slots=True)
class AssignedMatch:
    """A match to play.

    Attributes:
        match_id: from the driver.
        attempt: number of times that its line-up was drawn again.
        players: the module of each agent.
        counts: its outcome is reported; otherwise it is repeated to fill the time.
    """

    match_id: int
    attempt: int
    players: tuple[str, ...]
    counts: bool = True


class AssignedLineUps:
    """Assigns each of the driver's line-ups to one episode.

    Short episodes may use up all line-ups before the next request brings more. Then the newest ones
    are played again, in turn, without a report of their outcomes. Before the first line-up comes,
    and in an evaluation, the first module that may play an agent plays it.

    Args:
        agents: the A agents of an environment.
        played_by: by agent, in the order of players in line-ups, the modules that may play it.
    """

    def __init__(self, agents: Sequence[str], played_by: Mapping[str, str | Sequence[str]]) -> None:
        # The place of each agent in line-ups.
        order = {agent: place for place, agent in enumerate(played_by)}
        self._place = np.array([order[agent] for agent in agents], np.intp)  # [A]
        at_first = tuple(may_play(ids)[0] for ids in played_by.values())
        self._at_first = AssignedMatch(0, 0, at_first, counts=False)
        self._fresh: deque[AssignedMatch] = deque()
        self._again: deque[AssignedMatch] = deque(maxlen=_MOST_AGAIN)
        self._playing: dict[int, AssignedMatch] = {}  # by environment
        self._ended: list[EndedMatch] = []
        self._leaving: set[str] = set()  # modules, as soon as no running episode has them

    def assign(self, line_ups: Iterable[training_pb2.LineUp], known: Collection[str]) -> None:
        """Queue line-ups for the episodes that begin next.

        Args:
            line_ups: from the driver.
            known: the modules of this worker, without `random`.

        Raises:
            ValueError: a line-up has a wrong number of players, or an unknown player.
        """
        taken = [
            AssignedMatch(each.match_id, each.attempt, tuple(each.players)) for each in line_ups
        ]
        for match in taken:
            if absent := [each for each in match.players if each not in known and each != RANDOM]:
                raise ValueError(
                    f"the line-up of match {match.match_id} has {absent[0][:100]!r}, and no such "
                    "player is here"
                )
            if len(match.players) != len(self._place):
                raise ValueError(
                    f"the line-up of match {match.match_id} has {len(match.players)} players: the "
                    f"environment has {len(self._place)} agents"
                )
        self._fresh.extend(taken)

    def reset(self, seed: int) -> None:
        """Drop all episodes, and queue their matches again."""
        self.abandon(list(self._playing))

    def abandon(self, envs: Iterable[int]) -> None:
        """Drop the episodes of environments, and queue their matches again."""
        dropped = [self._playing.pop(env) for env in envs if env in self._playing]
        begun = [match for match in dropped if match.counts and not self._has_leaving(match)]
        self._fresh.extendleft(reversed(begun))

    def begin(self, envs: NDArray[np.intp]) -> LineUp:
        """Assign line-ups to environments [K] that begin an episode."""
        players: list[NDArray[np.str_]] = []  # [A] each
        for env in envs.tolist():
            match = self._playing[env] = self._next()
            players.append(np.array(match.players, np.str_)[self._place])
        slots = envs[:, None] * len(self._place) + np.arange(len(self._place))  # [K, A]
        together = np.concatenate(players) if players else np.zeros(0, np.str_)  # [K A]
        return LineUp(slots.ravel(), together)

    def ended(
        self, envs: NDArray[np.intp], returns: NDArray[np.float64], lengths: NDArray[np.intp]
    ) -> None:
        """Record the outcomes of ended episodes.

        Args:
            envs: [L] their environments.
            returns: [L, A] of each agent; NaN: it never acted.
            lengths: [L] environment steps.
        """
        for env, of_agents, length in zip(envs.tolist(), returns, lengths.tolist(), strict=True):
            match = self._playing.pop(env, None)
            if match is None or not match.counts:
                continue
            in_order = np.empty(len(self._place))  # [A]
            in_order[self._place] = of_agents
            self._ended.append(EndedMatch(match.match_id, match.attempt, in_order.tolist(), length))

    def pop_ended(self) -> list[EndedMatch]:
        """Return the matches that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def forget(self, module_id: str, other: str) -> None:
        """Begin no more matches with this module.

        Before the first line-up comes, and in an evaluation, `other` plays instead.
        """
        players = (other if each == module_id else each for each in self._at_first.players)
        self._at_first = replace(self._at_first, players=tuple(players))
        self._leaving.add(module_id)
        for matches in (self._fresh, self._again):
            kept = [match for match in matches if not self._has_leaving(match)]
            matches.clear()
            matches.extend(kept)

    def pop_left(self) -> set[str]:
        """Return the forgotten modules that have left all running episodes, each once."""
        if not self._leaving:
            return set()
        in_play = {player for match in self._playing.values() for player in match.players}
        left = self._leaving - in_play
        self._leaving -= left
        return left

    def _has_leaving(self, match: AssignedMatch) -> bool:
        return not self._leaving.isdisjoint(match.players)

    def _next(self) -> AssignedMatch:
        if self._fresh:
            match = self._fresh.popleft()
            self._again.append(replace(match, counts=False))
            return match
        if not self._again:
            return self._at_first
        self._again.rotate(-1)
        return self._again[-1]
