"""Sources of data: samples that an algorithm learns from, and how often."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias

import torch
from torch import Tensor

from juggler.runtime.wire.trees import Tree

#: A sample for an update, by the names in `columns`. Tensors, or maps of tensors by string keys,
#: nested to any depth.
Columns: TypeAlias = Mapping[str, Any]
#: Sums over this learner's sample -> sums over the samples of all learners of a group, elementwise.
Sums: TypeAlias = Callable[[Tensor], Tensor]

#: A column [] int64 of samples with reused steps: number of steps that count for schedules, over
#: all learners of a group. Without it, all live steps count.
NEW_STEPS: Final = "new_steps"


def alone(x: Tensor) -> Tensor:
    """Return the sums of a single learner."""
    return x


class DataSource(Protocol):
    """Receives every sample, and selects the samples to learn from.

    A run makes an update whenever a sample has arrived. In a group, every learner's source must
    yield the same number of samples.

    Attributes:
        keeps_frames: whether samples may have each frame of a stack once, as `FrameStack.numbered`
            makes them; the source then yields frames [..., k, ...] instead of stacks.
        keeps_rows: whether it yields rows of episodes unchanged, without stacks.
    """

    keeps_frames: bool = False
    keeps_rows: bool = False

    def add(self, sample: Columns, sums: Sums = alone) -> Iterable[Columns]:
        """Receive a sample; yield the samples to learn from now, in order.

        Args:
            sample: the arriving sample.
            sums: adds up numbers over the learners of a group, which all make the same calls.
        """

    def expect(self, sample: Columns) -> float:
        """Prepare for samples like this; return host bytes to be kept.

        Raises:
            ValueError: they do not fit.
        """
        return 0.0

    def try_out(self) -> None:
        """Enter a trial: yield a sample, even a small one, per arrival."""
        return

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Set the priorities [B] of rows of the last yielded sample.

        None: the algorithm has no priorities.
        """
        return

    def taken_in(self) -> int:
        """Return the number of samples kept, including after failed steps."""
        return 0

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for people about the last sample, under fixed names."""
        return {}

    def books(self) -> Mapping[str, float]:
        """Return counts of the fate of all arrivals; {}: nothing is kept.

        Numbers must be finite and from 0 to 1e15, or the driver dismisses the learner.
        """
        return {}

    def draw_apart(self, rank: int) -> None:
        """Make draws differ from learners with other ranks.

        Samples that `state` does not hold have already been discarded.
        """
        return

    def clear(self) -> None:
        """Discard samples that `state` does not hold."""

    def state(self) -> dict[str, Tree]:
        """Return the kept samples for a checkpoint; {}: none."""
        return {}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a state with samples on a device; {}: without samples.

        Raises:
            ValueError: it is another source's state, and nothing has changed; or memory is too
                small, and no sample is kept.
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

    The j-th use (from 0) of a sample is due when ⌊j N / K⌋ samples have arrived after it. So the
    first is due at once, and the rest are spread evenly over the time that the sample stays. When
    it leaves, it has been used exactly K times (Luo et al. 2020, "IMPACT: Importance Weighted
    Asynchronous Architectures with Clipped Target Networks", section 3).
    """

    def __init__(self, batches: int, uses: int) -> None:
        """Keep N = `batches` samples, for K = `uses` uses each."""
        self._samples: deque[Columns] = deque(maxlen=batches)
        self._uses_at_age = [0] * batches
        for use in range(uses):
            self._uses_at_age[use * batches // uses] += 1

    def add(self, sample: Columns, sums: Sums = alone) -> Sequence[Columns]:
        """Receive a sample, and return due samples, the oldest first."""
        self._samples.append(sample)
        youngest = len(self._samples) - 1
        return [
            each
            for place, each in enumerate(self._samples)
            for _ in range(self._uses_at_age[youngest - place])
        ]

    def clear(self) -> None:
        self._samples.clear()
