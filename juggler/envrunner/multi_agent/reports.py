"""Results of one step of environments with PettingZoo's interfaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from juggler.envrunner.info_numbers import keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK


class AgentReport(NamedTuple):
    """Observation of an agent that acts next or ended.

    Attributes:
        slot: of the agent.
        observation: of the agent.
        mask: the action mask in its info; None: no mask.
        terminated: its episode terminated.
    """

    slot: int
    observation: Any
    mask: Any
    terminated: bool = False


class Reports:
    """Results of all environments in one step.

    Attributes:
        rewards: by slot.
        ended: by group, the agents whose episode ended.
        acting: by group, the agents that act next.
        over: environments whose agents are all done.
        critics_now: what critics see with the agents that act next, by kind and environment.
        critics_at_end: the same with the agents that ended, in environments where any did; copies.
        infos: numbers in the infos of agents that have acted or ended, [N * A] by name.
        unread: keys of infos that are not agents.

    Args:
        groups: of agents.
        slots: N * A; 0: infos are not read.
    """

    def __init__(self, groups: int, slots: int = 0) -> None:
        self.infos: dict[str, Any] = {}
        self.unread: set[str] = set()
        self._slots = slots
        self.critics_now: dict[str, dict[int, Any]] = defaultdict(dict)
        self.critics_at_end: dict[str, dict[int, Any]] = defaultdict(dict)
        self.rewards: dict[int, float] = {}
        self.ended: list[list[AgentReport]] = [[] for _ in range(groups)]
        self.acting: list[list[AgentReport]] = [[] for _ in range(groups)]
        self.over: list[int] = []

    def keep(self, slot: int, info: Any) -> None:
        """Keep the numbers in an agent's info."""
        if self._slots and is_mapping(info) and info:
            keep_numbers(self.infos, info, slot, self._slots)


def mask_in(info: Any) -> Any:
    """Return the action mask in an agent's info; None: no mask."""
    return info.get(ACTION_MASK) if is_mapping(info) else None


def is_mapping(info: Any) -> bool:
    """Return whether this is a dict or another mapping."""
    # Checked first, because the check of other mappings takes longer.
    return type(info) is dict or isinstance(info, Mapping)
