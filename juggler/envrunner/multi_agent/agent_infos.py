"""Numbers in the infos of environments with several agents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, Final

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from juggler.envrunner.info_numbers import InfoNumbers, InfoWatch, reported_agents
from juggler.envrunner.multi_agent.turns import Turn
from juggler.runtime.near_matches import listed

#: Types of values that an environment may have meant as numbers of its agents.
_MEANT: Final = (np.ndarray, Mapping, Real)


def arrays_in(
    infos: Mapping[str, Any], shape: tuple[int, int]
) -> tuple[dict[str, NDArray[Any]], Callable[[], str] | None]:
    """Flatten infos [N, A] to new arrays [N * A], by name.

    Also returns a function that describes the infos that nothing reads (`Turn.unread`), or None.
    """
    found: dict[str, NDArray[Any]] = {}
    others: list[str] = []
    for name, given in infos.items():
        if isinstance(given, np.ndarray) and given.shape == shape:
            found[name] = given.flatten()
        elif isinstance(given, _MEANT):
            others.append(str(name))
    return found, partial(_of_others, others, shape) if others else None


def _of_others(names: Collection[str], shape: tuple[int, int]) -> str:
    return (
        f"{listed(names)}, and no array of the shape {list(shape)} there: nothing reads that. "
        "Infos have arrays [num_envs, agents] by name"
    )


def unknown_agents(names: Collection[str], agents: Sequence[str]) -> str:
    """Describe infos under names that are not agents."""
    return (
        f"{listed(sorted(names))}, and no agent is called so: nothing reads that. Infos have a "
        f"dict for each agent, as in {{{agents[0]!r}: {{...}}}}"
    )


class AgentInfos:
    """Collects numbers in infos of N environments with A agents each.

    An agent's numbers count from its first action on, and are reported when the episode of its
    environment ends. With many agents, numbers are not reported by agent.

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
        self._watch = InfoWatch(self._slots, steps, mode, reported_agents(agents))
        self._over = np.zeros((num_envs, steps), np.bool_)

    def restart(self) -> None:
        """Drop all running episodes."""
        self._watch.restart()
        self._over[:] = False

    def see(self, turn: Turn, t: int) -> None:
        """Record step t of a round."""
        if turn.infos:
            stepped = np.zeros(self._slots, np.bool_)  # [N * A]
            for group in turn.groups:
                stepped[group.acting[~group.first]] = stepped[group.ended] = True
            self._watch.record(turn.infos, t, stepped)
        self._over[turn.over, t] = True

    def advance(self) -> InfoNumbers:
        """Aggregate a round, after all its steps were recorded."""
        found = self._watch.advance(None, np.repeat(self._over, self._agents, 0))
        self._over[:] = False
        return found
