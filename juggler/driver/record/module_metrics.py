"""What a run tells of one of its modules, beside the steps, which the ledger counts; and of one of
several agents."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from juggler.driver.record.episode_returns import RETURN_WINDOW


class StalenessSince:
    """Mean and maximum since the last `take`; without anything new, those of before."""

    def __init__(self) -> None:
        self._total, self._count, self._most = 0, 0, 0
        self._last: tuple[float | None, int | None] = (None, None)

    def observe(self, staleness: int) -> None:
        self._total += staleness
        self._count += 1
        self._most = max(self._most, staleness)

    def take(self) -> dict[str, float | None]:
        """For a line of metrics."""
        if self._count:
            self._last = (self._total / self._count, self._most)
            self._total, self._count, self._most = 0, 0, 0
        return {"staleness_mean": self._last[0], "staleness_max": self._last[1]}


@dataclass(slots=True)
class ModuleMetrics:
    """
    Attributes:
        returns: of the newest episodes of the agents that the module plays, one for each agent.
        lengths: how many steps these agents made in them.
        episodes: how many have ended.
        played: steps of a module that is not trained, as far as the run has heard of them.
        staleness: of the batches that updates have used.
        evaluation_return: the mean in the newest evaluation; None: there was none.
    """

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    episodes: int = 0
    played: int = 0
    staleness: StalenessSince = field(default_factory=StalenessSince)
    evaluation_return: float | None = None

    def agents_ended(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Both lists have the same length."""
        self.returns.extend(returns[-RETURN_WINDOW:])
        self.lengths.extend(lengths[-RETURN_WINDOW:])
        self.episodes += len(returns)

    @property
    def return_mean(self) -> float | None:
        """Over the last 100 episodes; None before there is one."""
        return _mean(self.returns)

    def line(self) -> dict[str, Any]:
        """What happened since the last line."""
        return {**self.staleness.take(), **self._episodes_line()}

    def played_line(self) -> dict[str, Any]:
        """The same of a module that is not trained."""
        return {"env_steps_played": self.played, **self._episodes_line()}

    def _episodes_line(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "episode_return_mean": self.return_mean,
            "episode_length_mean": _mean(self.lengths),
            "evaluation_return_mean": self.evaluation_return,
        }


@dataclass(slots=True)
class AgentMetrics:
    """
    Attributes:
        returns: of the newest episodes in which the agent acted.
        episodes: how many of them have ended.
        evaluation_return: the mean in the newest evaluation; None: there was none.
    """

    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RETURN_WINDOW))
    episodes: int = 0
    evaluation_return: float | None = None

    def ended(self, returns: Sequence[float]) -> None:
        self.returns.extend(returns[-RETURN_WINDOW:])
        self.episodes += len(returns)

    @property
    def return_mean(self) -> float | None:
        """Over the last 100 episodes; None before there is one."""
        return _mean(self.returns)

    def line(self) -> dict[str, Any]:
        return {
            "episodes": self.episodes,
            "episode_return_mean": self.return_mean,
            "evaluation_return_mean": self.evaluation_return,
        }


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None
