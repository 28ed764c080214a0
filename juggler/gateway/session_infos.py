"""Numbers that a simulator tells of its steps, by episode."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.envrunner.info_numbers import InfoNumber, InfoWatch, keep_newest

#: Steps of an environment that are kept until they are summed up.
_STEPS = 16


class ToldRows(Protocol):
    """What a batch of steps tells of one agent, in R rows.

    Attributes:
        environments: [R] their numbers.
        rewarded: places among the rows that are the result of an action.
        infos: [R, K]; None: no row has any.
    """

    environments: list[int]
    rewarded: list[int]
    infos: NDArray[np.float64] | None

    @property
    def index(self) -> int:
        """Of the agent, in its session."""


class SessionInfos:
    """Watches numbers of a session as an EnvRunner watches infos.

    Args:
        names: of the K numbers of a step.
        agents: how many act in each environment, A.
        apart: their names; (): their numbers are not told apart.
        environments: N.
        newest: takes the numbers of episodes, by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        agents: int,
        apart: Sequence[str],
        environments: int,
        newest: dict[str, deque[InfoNumber]],
    ) -> None:
        self._names, self._agents, self._newest = names, agents, newest
        # An episode's numbers are read before the next one begins.
        self._watch = InfoWatch(environments * agents, _STEPS, AutoresetMode.DISABLED, apart)
        self._over = np.zeros((environments, agents, _STEPS), np.bool_)
        self._seen = np.zeros((environments, agents), np.bool_)  # something happened there
        self._t = 0  # steps that are not summed up yet
        self._any_over = False  # an episode ended in one of them

    def see(self, parts: Iterable[ToldRows], over: Sequence[int]) -> None:
        """Take what a batch of steps tells.

        Args:
            parts: of different agents.
            over: the environments whose episodes end with it.
        """
        any_told = False
        for part in parts:
            if part.infos is not None and part.rewarded:
                rows = [part.environments[at] * self._agents + part.index for at in part.rewarded]
                self._watch.put(self._names, part.infos[part.rewarded], rows, self._t)
                self._seen.ravel()[rows] = True
                any_told = True
        if over:
            self._end(over)
        elif any_told:
            self._advance(1)

    def record(
        self, environment: int, infos: NDArray[np.float64] | None, *, starts: bool, ends: bool
    ) -> None:
        """Take the numbers of the L steps of a recording.

        Args:
            environment: its number.
            infos: [L, K]; None: no step has any.
            starts: the first step begins an episode.
            ends: the last step ended it.
        """
        if starts:
            self._end([environment])  # one that is running
        begin, end = 0, 0 if infos is None else len(infos)
        while infos is not None and begin < end:
            count = min(end - begin, _STEPS - self._t)
            steps = slice(self._t, self._t + count)
            self._watch.put(self._names, infos[begin : begin + count], environment, steps)
            self._seen[environment] = True
            self._advance(count)
            begin += count
        if ends:
            self._end([environment])

    def settle(self) -> None:
        """Hand over the numbers of all episodes that have ended."""
        if self._any_over:
            self._sum_up()

    def _end(self, environments: Any) -> None:
        """Episodes end with the step under way."""
        self._over[environments, :, self._t] = True
        self._seen[environments] = True
        self._any_over = True
        self._advance(1)

    def _advance(self, steps: int) -> None:
        self._t += steps
        if self._t == _STEPS:
            self._sum_up()

    def _sum_up(self) -> None:
        # Only where something happened: many environments may step one after the other.
        seen = np.flatnonzero(self._seen)  # [R] of the N * A rows
        over = self._over.reshape(-1, _STEPS)  # [N * A, T]
        keep_newest(self._newest, self._watch.advance(None, over[seen], seen))
        over[seen] = False
        self._seen[:] = False
        self._t, self._any_over = 0, False
