"""Episodes of a simulator's environments, in which several agents may act."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_OUT, _ACTS, _ENDED = 0, 1, 2

#: Of more episodes that ended since the driver last heard of them, the newest are kept. It takes so
#: many with a batch of any size.
MOST_UNTOLD = 1 << 16


def keep_newest(ended: list[tuple[float, int]]) -> int:
    """Forget the oldest of too many episodes -> how many."""
    many = max(0, len(ended) - MOST_UNTOLD)
    del ended[:many]
    return many


class AgentRows(Protocol):
    """What a batch of steps says of one agent, in R rows.

    Attributes:
        environments: [R] their numbers.
        ended: places among the rows where the agent's episode ended.
        paused: places that want no action.
        rewarded: places whose rewards are those of an action.
        rewards: [R]
    """

    environments: list[int]
    paused: list[int]
    rewarded: list[int]
    rewards: list[float]

    @property
    def index(self) -> int:
        """Of the agent, in its session."""

    @property
    def ended(self) -> list[int]: ...


def _environments_acted_in(parts: Sequence[AgentRows]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        out = set(part.paused)
        found.update(each for at, each in enumerate(part.environments) if at not in out)
    return found


class SharedEpisodes:
    """The episodes of N environments with A agents each.

    An agent takes part from its first observation until its end. The episode of an environment is
    over when nobody takes part in it any more. Until then, an agent that has ended stays away.

    Args:
        agents: A.
        environments: N.
    """

    def __init__(self, agents: int, environments: int) -> None:
        self._stages: NDArray[np.int8] = np.zeros((agents, environments), np.int8)
        self._returns = np.zeros(environments)
        self._lengths = np.zeros(environments, np.intp)

    def follow(
        self, parts: Sequence[AgentRows], continuing: Collection[int] = ()
    ) -> tuple[list[int], tuple[int, int] | None]:
        """Follow who ends and who acts next, as a batch of steps says.

        Args:
            parts: of different agents.
            continuing: environments whose episodes continue with the agents that act next, even if
                all earlier agents have ended.

        Returns:
            The environments whose episodes are over with this batch; and the first agent and
            environment where the agent shall act though it has ended, or None.
        """
        stages = self._stages
        touched: set[int] = set()
        for part in parts:
            ended = [part.environments[at] for at in part.ended]
            stages[part.index, ended] = _ENDED
            touched.update(ended)
        if continuing:
            touched -= {*continuing} & _environments_acted_in(parts)
        over = [each for each in sorted(touched) if not (stages[:, each] == _ACTS).any()]
        stages[:, over] = _OUT
        for part in parts:
            out = set(part.paused)
            acting = [each for at, each in enumerate(part.environments) if at not in out]
            gone = stages[part.index, acting] == _ENDED  # [B]
            if gone.any():
                return over, (part.index, acting[int(gone.argmax())])
            stages[part.index, acting] = _ACTS
        return over, None

    def book(self, parts: Iterable[AgentRows], over: list[int]) -> list[tuple[float, int]]:
        """Add the rewards of a batch of steps -> return and length of the episodes that are over.

        A length is a number of environment steps: each batch with rewards for it is one.
        """
        stepped: set[int] = set()
        for part in parts:
            rewarded = [part.environments[at] for at in part.rewarded]
            self._returns[rewarded] += [part.rewards[at] for at in part.rewarded]
            stepped.update(rewarded)
        self._lengths[list(stepped)] += 1
        returns, lengths = self._returns[over].tolist(), self._lengths[over].tolist()
        self._returns[over], self._lengths[over] = 0, 0
        return list(zip(returns, lengths, strict=True))
