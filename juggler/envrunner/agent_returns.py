"""Returns of each agent in ended episodes, by module."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from juggler.runtime.wire.v1 import training_pb2

#: Undiscounted returns by agent and the module that played it, of the episodes in which it acted.
#: The module is "" if the returns of all modules stay in the order of their episodes.
AgentReturns = dict[tuple[str, str], list[float]]

#: With more agents, a run has no metrics by agent.
MOST_WITH_METRICS: Final = 32


def has_metrics_by_agent(agents: Collection[str]) -> bool:
    """Return whether there are few enough agents for metrics by agent."""
    return 0 < len(agents) <= MOST_WITH_METRICS


def add_returns(
    into: AgentReturns,
    agents: Sequence[str],
    returns: NDArray[np.float64],
    players: NDArray[np.object_] | None = None,
) -> None:
    """Add the returns of more episodes.

    Args:
        agents: A names.
        returns: [L, A]; NaN where an agent did not act.
        players: [L, A] the ids of the modules that played; None: keep returns in order instead.
    """
    for row, place in zip(*np.nonzero(~np.isnan(returns)), strict=True):
        played = agents[place], "" if players is None else players[row, place]
        into.setdefault(played, []).append(float(returns[row, place]))


def to_messages(returns: AgentReturns) -> list[training_pb2.AgentReturns]:
    return [
        training_pb2.AgentReturns(agent=agent, module_id=module_id, returns=got)
        for (agent, module_id), got in returns.items()
    ]


def from_messages(messages: Sequence[training_pb2.AgentReturns]) -> AgentReturns:
    """Reverse `to_messages`."""
    return {(each.agent, each.module_id): list(each.returns) for each in messages}
