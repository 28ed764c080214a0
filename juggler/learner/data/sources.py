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
#: The same, by module id.
Sample: TypeAlias = Mapping[str, Columns]
#: Sums over this learner's sample -> sums over the samples of all learners of a group, elementwise.
Sums: TypeAlias = Callable[[Tensor], Tensor]

#: A column [] int64 of samples with steps that were learned from before: how many steps are counted
#: for schedules, at all learners of a group. Without it, all live steps are.
NEW_STEPS: Final = "new_steps"


def alone(x: Tensor) -> Tensor:
    """The sums of a single learner."""
    return x


class DataSource(Protocol):
    """Takes every sample that arrives, and says which samples to learn from now.

    A run makes an update whenever a sample has arrived. In a group, every learner's source must
    give the same number of samples.

    Attributes:
        keeps_frames: whether samples may come with each frame of a stack once, as
            `FrameStack.numbered` makes them; it gives frames [..., k, ...] in place of stacks.
        keeps_rows: whether it gives whole rows of episodes as they came. Then samples come without
            stacks, which are made of what it gives.
    """

    keeps_frames: bool = False
    keeps_rows: bool = False

    def add(self, sample: Columns, sums: Sums = alone) -> Iterable[Columns]:
        """Take a sample; give the samples to learn from now, in order. There may be none yet.

        Args:
            sample: what arrived.
            sums: adds up numbers over the learners of a group, which all call it as often.
        """

    def expect(self, sample: Columns) -> float:
        """Hear, before anything arrives, of what samples will look like -> the bytes of this host's
        memory that will be kept of them.

        Raises:
            ValueError: they do not fit.
        """
        return 0.0

    def try_out(self) -> None:
        """Hear that few samples will come, to find errors of an algorithm: give something to learn
        from with each of them, however little there is."""
        return

    def update_priorities(self, priorities: Tensor | None) -> None:
        """Set the priorities [B] of the rows of the last sample given, after the step that was made
        of it. None: the algorithm has no priorities."""
        return

    def why_alone(self) -> str:
        """Why it cannot be the source of one of several learners, which have to be given as many
        samples each; "": it can."""
        return ""

    def taken_in(self) -> int:
        """How many samples it has kept for later steps, even if the step made on their arrival
        failed."""
        return 0

    def metrics(self) -> Mapping[str, float]:
        """Numbers for people about the last sample given; always the same names."""
        return {}

    def books(self) -> Mapping[str, float]:
        """What became of all that arrived, up to now; {}: nothing is kept of it. Each number is
        finite and from 0 to 1e15, or the driver dismisses the learner."""
        return {}

    def draw_apart(self, rank: int) -> None:
        """Hear that other learners, each of another rank, go on from the same state now: what is
        random is to be different from here on. What `state` does not hold was discarded before."""
        return

    def clear(self) -> None:
        """Discard what `state` does not hold."""

    def state(self) -> dict[str, Tree]:
        """What a checkpoint holds of the samples that are kept; {}: nothing."""
        return {}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from such a state, with samples on a device; from {}, without any.

        Raises:
            ValueError: it is not a state of this source, which stays as it is; or it lacks memory
                for the samples, and then has none.
        """
        self.clear()


class Queue(DataSource):
    """Learns from every sample once, when it arrives."""

    def add(self, sample: Columns, sums: Sums = alone) -> Sequence[Columns]:
        return [sample]

    def clear(self) -> None:
        pass


class CircularBuffer(DataSource):
    """Keeps the newest N samples, and learns from each of them K times.

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
        """Take a sample, and return those that are due, the oldest first."""
        self._samples.append(sample)
        youngest = len(self._samples) - 1
        return [
            each
            for place, each in enumerate(self._samples)
            for _ in range(self._uses_at_age[youngest - place])
        ]

    def clear(self) -> None:
        self._samples.clear()
