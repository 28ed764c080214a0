"""Candidates: weights that may have solved the task, until an evaluation confirms it."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.driver.record.episode_returns import RETURN_WINDOW

#: Episodes that confirm a candidate. The standard error of their mean is a tenth of the standard
#: deviation, so that a policy 0.3 deviations below the goal is confirmed once in 700 times.
CONFIRMING_EPISODES = 100

#: Limit of the factor by which these episodes grow with each refusal. They grow because every
#: candidate is another chance to be lucky.
_MORE_EPISODES = 5


@dataclass(slots=True)
class Candidates:
    """When the next candidate is due, and how many episodes must confirm it.

    After the n-th refusal, the next candidate needs n times 100 new training episodes. A run that
    hovers about the goal is evaluated less often, and for longer.

    Attributes:
        refused: number of refused candidates.
        not_before: episodes of the run before which no candidate is due.
    """

    refused: int = 0
    not_before: int = 0

    @property
    def episodes(self) -> int:
        """Episodes that must confirm the next candidate."""
        return CONFIRMING_EPISODES * min(self.refused + 1, _MORE_EPISODES)

    def due(self, episodes: int) -> bool:
        return episodes >= self.not_before

    def refuse(self, episodes: int) -> None:
        """Count a candidate, found after this many episodes, as refused."""
        self.refused += 1
        self.put_off(episodes, self.refused)

    def put_off(self, episodes: int, windows: int = 1) -> None:
        """Wait for more windows of new episodes before the next candidate."""
        self.not_before = episodes + windows * RETURN_WINDOW
