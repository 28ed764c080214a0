"""The mean returns that a run is to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Final

from juggler.driver.record.episode_returns import RETURN_WINDOW, Played
from juggler.driver.record.metrics import Metrics
from juggler.envrunner.agent_returns import AgentReturns

#: Stands for the return of an episode, which is the sum over all agents.
EPISODE: Final = ""


class ReturnGoals:
    """The mean returns that `stop_return` asks for: of an episode, or of some modules and agents.

    Args:
        stop_return: the key of a configuration.

    Attributes:
        by_name: the goals, by id of a module or name of an agent, or by EPISODE.
    """

    def __init__(self, stop_return: float | Mapping[str, float] | None) -> None:
        if stop_return is None:
            self.by_name: dict[str, float] = {}
        elif isinstance(stop_return, Mapping):
            self.by_name = dict(stop_return)
        else:
            self.by_name = {EPISODE: stop_return}

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def proposed(self, metrics: Metrics) -> dict[str, float]:
        """The training returns if all of them reach their goals and no candidate of these episodes
        was refused; else {}."""
        if not self or not metrics.candidates.due(metrics.episodes):
            return {}
        found = {}
        for name, goal in self.by_name.items():
            returns = metrics.returns_of(name)
            if len(returns) < RETURN_WINDOW or (mean := sum(returns) / len(returns)) < goal:
                return {}
            found[name] = mean
        return found

    def now(self, metrics: Metrics) -> dict[str, float | None]:
        """The training returns; None before there is one."""
        return {
            name: sum(returns) / len(returns) if (returns := metrics.returns_of(name)) else None
            for name in self.by_name
        }

    def played(self, returns: Sequence[float], agent_returns: AgentReturns) -> dict[str, Played]:
        """The results of an evaluation, by name; a goal of which it has no episode is left out.

        Args:
            returns: of the episodes.
            agent_returns: what each agent got in them.
        """
        found = {}
        for name in self.by_name:
            if name == EPISODE:
                found[name] = Played.of(returns)
                continue
            # A module's id counts before an agent's name.
            of_module = [got for (_, module_id), got in agent_returns.items() if module_id == name]
            of_agent = [got for (agent, _), got in agent_returns.items() if agent == name]
            if each := list(chain.from_iterable(of_module or of_agent)):
                found[name] = Played.of(each)
        return found

    def reached(self, played: Mapping[str, Played]) -> bool:
        """Tell whether an evaluation reaches every goal."""
        return all(
            name in played and played[name].mean >= goal for name, goal in self.by_name.items()
        )

    def as_given(self, values: Mapping[str, float]) -> float | dict[str, float]:
        """Numbers by name in the form of `stop_return`: one, or a table."""
        return values[EPISODE] if EPISODE in self.by_name else dict(values)
