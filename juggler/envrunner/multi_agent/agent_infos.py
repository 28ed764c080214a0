"""Numbers that environments with several agents put into their infos, over episodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium.vector import AutoresetMode

from juggler.envrunner.info_numbers import InfoNumbers, InfoWatch, told_apart
from juggler.envrunner.multi_agent.turns import Turn


class AgentInfos:
    """Watches the infos of N environments with A agents each for numbers.

    An agent's numbers count from its first action on, and are told when the episode of its
    environment is over. With many agents, nothing says which of them a number is of.

    Args:
        num_envs: N.
        agents: their A names.
        steps: T, environment steps of a round.
    """

    def __init__(self, num_envs: int, agents: Sequence[str], steps: int) -> None:
        self._slots = num_envs * len(agents)
        self._agents = len(agents)
        # An episode's numbers are read before the next one begins.
        mode = AutoresetMode.DISABLED
        self._watch = InfoWatch(self._slots, steps, mode, told_apart(agents))
        self._over = np.zeros((num_envs, steps), np.bool_)

    def restart(self) -> None:
        """Drop all running episodes."""
        self._watch.restart()
        self._over[:] = False

    def see(self, turn: Turn, t: int) -> None:
        """Take what step t of a round led to."""
        if turn.infos:
            told = np.zeros(self._slots, np.bool_)  # [N * A]
            for group in turn.groups:
                told[group.acting[~group.first]] = told[group.ended] = True
            self._watch.take(turn.infos, t, told)
        self._over[turn.over, t] = True

    def advance(self) -> InfoNumbers:
        """Account for a round, all of whose steps were seen."""
        found = self._watch.advance(None, np.repeat(self._over, self._agents, 0))
        self._over[:] = False
        return found
