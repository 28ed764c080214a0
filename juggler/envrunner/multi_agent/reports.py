"""What environments of PettingZoo's interfaces told in one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from juggler.envrunner.info_numbers import keep_numbers
from juggler.runtime.modules.columns import ACTION_MASK


class Told(NamedTuple):
    """What an environment reported to an agent that acts or ended.

    Attributes:
        slot: of the agent.
        observation: what the agent sees.
        mask: the action mask in its info; None: its info has none.
        terminated: its episode ended by itself.
    """

    slot: int
    observation: Any
    mask: Any
    terminated: bool = False


class Reports:
    """What all environments told in one step.

    Attributes:
        rewards: by slot.
        ended: by group, the agents whose episode ended.
        acting: by group, the agents that act next.
        over: environments whose agents are all done.
        critics_now: by what critics see, and by environment, what that is with the agents that act
            next.
        critics_at_end: the same with the agents that ended, where any did; copies.
        infos: numbers in the infos of agents that have acted or ended, [N * A] by name.
        unread: names in infos by agent that are no agents.

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
        self.ended: list[list[Told]] = [[] for _ in range(groups)]
        self.acting: list[list[Told]] = [[] for _ in range(groups)]
        self.over: list[int] = []

    def keep(self, slot: int, info: Any) -> None:
        """Keep the numbers in an agent's info."""
        if self._slots and is_mapping(info) and info:
            keep_numbers(self.infos, info, slot, self._slots)


def mask_in(info: Any) -> Any:
    """The action mask in an agent's info; None: it has none."""
    return info.get(ACTION_MASK) if is_mapping(info) else None


def is_mapping(info: Any) -> bool:
    """Whether this is a dict, or like one."""
    # A dict is one, and the check of other mappings takes longer.
    return type(info) is dict or isinstance(info, Mapping)
