"""How many batches may be open: the rule of admission, which people are told by too."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """How much may be open for a module, so that no batch waits for too many updates.

    An update takes whole batches of each learner: at least one, and at least the learner's share
    of batch_size. So many small batches are one update, and each batch of a share or more is one.

    Attributes:
        updates: that batches may be open for at once.
        batch_size: live steps in one update, over all learners.
        learners: that make each update together.
    """

    updates: int
    batch_size: int
    learners: int = 1

    def is_left(self, batches: int, steps: int) -> bool:
        """Whether one more batch may be asked for a learner that has so many, with so many live
        steps together."""
        return batches < self.updates or steps * self.learners < self.updates * self.batch_size

    def batches(self, steps: int) -> int:
        """How many batches of so many steps may be open at once, for all learners together."""
        most = range(self.updates * self.batch_size)  # for one learner, if each batch had one step
        return self.learners * bisect_left(
            most, True, key=lambda open_: not self.is_left(open_, open_ * steps)
        )
