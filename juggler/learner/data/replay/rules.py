"""How rows of a table are drawn and leave. No torch, because the driver checks this too."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Selector: TypeAlias = Literal["random", "fifo", "lifo"]
Remover: TypeAlias = Literal["fifo", "lifo", "random", "lowest_priority"]


class Rules(NamedTuple):
    """How rows are drawn, and how they leave; the words are those of Reverb.

    Attributes:
        selector: which rows are drawn: at random, the oldest first ("fifo") or the newest first
            ("lifo").
        remover: which leave when the table is full: the oldest, the newest, any, or those of the
            lowest priority.
        max_times_sampled: how often a row is drawn before it leaves; 0: any number of times.
        priority_exponent: α of draws at random.
    """

    selector: Selector = "random"
    remover: Remover = "fifo"
    max_times_sampled: int = 0
    priority_exponent: float = 0.0

    def check(self) -> None:
        """Raises:
        ValueError: these do not go together.
        """
        if self.selector != "random" and not self.max_times_sampled:
            raise ValueError(
                f"replay_selector = {self.selector!r} draws the same step again and again: set "
                "max_times_sampled to 1 or more, after which it leaves"
            )
        if self.remover == "lowest_priority" and not self.priority_exponent:
            raise ValueError(
                "replay_remover = 'lowest_priority' with priority_exponent = 0: steps have no "
                "priority; set priority_exponent above 0, or replay_remover = 'fifo'"
            )
