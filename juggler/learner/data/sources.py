"""Where updates take their samples from: an algorithm chooses its source of data."""

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
    """Samples go in as they come, and out as they are to be learned from.

    A run makes an update whenever a sample has come, so what comes in decides when something is
    learned, and the source from what. A replay, which is asked for samples whether or not one has
    come, needs an admission of its own and is none of these yet.
    """

    def add(self, sample: Sample) -> Sequence[Sample]:
        """Take in a sample; return those to learn from now, one after the other. There is one at
        least."""

    def clear(self) -> None:
        """Let go of all samples."""


class Queue(DataSource):
    """Every sample is learned from once, when it comes."""

    def add(self, sample: Sample) -> Sequence[Sample]:
        return [sample]

    def clear(self) -> None:
        pass


class CircularBuffer(DataSource):
    """Keeps the newest N samples, and learns from each of them K times.

    The j-th use (from 0) of a sample is due when ⌊j N / K⌋ others have come after it: the first at
    once, the rest spread evenly over the time that it stays. A sample that leaves has been used
    exactly K times (Luo et al. 2020, "IMPACT: Importance Weighted Asynchronous Architectures with
    Clipped Target Networks", section 3).
    """

    def __init__(self, batches: int, uses: int) -> None:
        """Args:
        batches: N
        uses: K
        """
        self._samples: deque[Sample] = deque(maxlen=batches)
        self._uses_at_age = [0] * batches
        for use in range(uses):
            self._uses_at_age[use * batches // uses] += 1

    def add(self, sample: Sample) -> Sequence[Sample]:
        """The oldest first."""
        self._samples.append(sample)
        youngest = len(self._samples) - 1
        return [
            each
            for place, each in enumerate(self._samples)
            for _ in range(self._uses_at_age[youngest - place])
        ]

    def clear(self) -> None:
        self._samples.clear()
