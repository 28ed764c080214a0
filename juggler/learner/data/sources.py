"""Sources of data: which samples an algorithm learns from, and how often."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

#: One module's part of a sample, by the names in `columns`: tensors, or maps of tensors by string
#: keys, nested to any depth.
Columns: TypeAlias = Mapping[str, Any]
#: What one update learns from, by module id.
Sample: TypeAlias = Mapping[str, Columns]


class DataSource(Protocol):
    """Takes every sample that arrives, and says which samples to learn from now.

    A run makes an update whenever a sample has arrived. A replay buffer, which also gives samples
    when none has arrived, would need an admission of its own and is not possible yet.
    """

    def add(self, sample: Sample) -> Sequence[Sample]:
        """Take a sample; return the samples to learn from now, in order: at least one."""

    def clear(self) -> None:
        """Discard all samples."""


class Queue(DataSource):
    """Learns from every sample once, when it arrives."""

    def add(self, sample: Sample) -> Sequence[Sample]:
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
        self._samples: deque[Sample] = deque(maxlen=batches)
        self._uses_at_age = [0] * batches
        for use in range(uses):
            self._uses_at_age[use * batches // uses] += 1

    def add(self, sample: Sample) -> Sequence[Sample]:
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
