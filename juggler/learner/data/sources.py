"""Sources of data: which samples an algorithm learns from, and how often."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from juggler.runtime.wire.trees import Tree

#: A sample: what one update learns from, by the names in `columns`. Tensors, or maps of tensors by
#: string keys, nested to any depth.
Columns: TypeAlias = Mapping[str, Any]
#: Sums over this learner's sample -> sums over the samples of all learners of a group, elementwise.
Sums: TypeAlias = Callable[[Tensor], Tensor]

#: A column [] int64 of samples with steps that were learned from before: how many steps are counted
#: for schedules, at all learners of a group. Without it, all live steps are.
NEW_STEPS: Final = "new_steps"


def alone(x: Tensor) -> Tensor:
    """The sums of a single learner."""
    return x


class DataSource(Protocol):
    """Receives every sample, and decides what to learn from now.

    A run makes an update whenever a sample has arrived. In a group, every learner's source must
    give the same number of samples.

    Attributes:
        keeps_frames: whether samples may come with each frame of a stack once, as
            `FrameStack.numbered` makes them; it then gives frames [..., k, ...] instead of stacks.
        keeps_rows: whether it gives whole rows of episodes as they came, without stacks.
    """

    keeps_frames: bool = False
    keeps_rows: bool = False

    def add(self, sample: Columns, sums: Sums = alone) -> Iterable[Columns]:
        """Receive a sample; yield the samples to learn from now, in order.

        Args:
            sample: what arrived.
            sums: adds up numbers over the learners of a group, which all call it as often.
        """

    def expect(self, sample: Columns) -> float:
        """Prepare for samples like this; return host bytes to be kept.

        Raises:
            ValueError: they do not fit.
        """
        return 0.0

    def try_out(self) -> None:
        """Enter a trial: yield something for each sample, however small."""
        return

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Set the priorities [B] of the last given sample's rows.

        None: the algorithm has no priorities.
        """
        return

    def taken_in(self) -> int:
        """Number of samples kept, even if the step on arrival failed."""
        return 0

    def metrics(self) -> Mapping[str, float]:
        """Numbers for people about the last sample given; always the same names."""
        return {}

    def books(self) -> Mapping[str, float]:
        """Counts of what became of all arrivals; {}: nothing is kept.

        Numbers must be finite and from 0 to 1e15, or the driver dismisses the learner.
        """
        return {}

    def draw_apart(self, rank: int) -> None:
        """Make draws differ from those of learners with other ranks.

        What `state` does not hold was discarded before.
        """
        return

    def clear(self) -> None:
        """Discard what `state` does not hold."""

    def state(self) -> dict[str, Tree]:
        """What a checkpoint holds of the samples that are kept; {}: nothing."""
        return {}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a state with samples on a device; {}: without samples.

        Raises:
            ValueError: it is another source's state, and nothing changes; or memory is too small,
                and no sample is kept.
        """
        self.clear()


class Queue(DataSource):
    """Learns from every sample once, when it arrives."""

    def add(self, sample: Columns, sums: Sums = alone) -> Sequence[Columns]:
        return [sample]

    def clear(self) -> None:
        pass


class CircularBuffer(DataSource):
    """Keeps the newest N samples, and learns K times from each.

    The j-th use (from 0) of a sample is due when ⌊j N / K⌋ others have arrived after it. So the
    first is due at once, and the others are spread evenly over the time that it stays. When a
    sample leaves, it has been used exactly K times (Luo et al. 2020, "IMPACT: Importance Weighted
    Asynchronous Architectures with Clipped Target Networks", section 3).
    """

    def __init__(self, batches: int, uses: int) -> None:
        """Args:
        batches: N.
        uses: K.
        """
        self._samples: deque[Columns] = deque(maxlen=batches)
        self._uses_at_age = [0] * batches
        for use in range(uses):
            self._uses_at_age[use * batches // uses] += 1

    def add(self, sample: Columns, sums: Sums = alone) -> Sequence[Columns]:
        """Receive a sample, and return the due ones, the oldest first."""
        self._samples.append(sample)
        youngest = len(self._samples) - 1
        return [
            each
            for place, each in enumerate(self._samples)
            for _ in range(self._uses_at_age[youngest - place])
        ]

    def clear(self) -> None:
        self._samples.clear()
