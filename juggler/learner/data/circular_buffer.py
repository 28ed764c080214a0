"""A circular buffer of samples, each of which is learned from several times."""

from __future__ import annotations

from collections import deque

from juggler.learner.config import LearnerConfig
from juggler.learner.core.learner_core import Sample


class CircularBuffer:
    """Keeps the newest N samples, and says when each is due for one of its K uses.

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

    @classmethod
    def of(cls, config: LearnerConfig) -> CircularBuffer:
        """As an algorithm's config has it; where that says nothing, a sample is used once."""
        return cls(getattr(config, "buffer_batches", 1), getattr(config, "batch_uses", 1))

    def push(self, sample: Sample) -> list[Sample]:
        """What is to be learned from, now that this sample has come; the oldest first."""
        self._samples.append(sample)
        youngest = len(self._samples) - 1
        return [
            each
            for place, each in enumerate(self._samples)
            for _ in range(self._uses_at_age[youngest - place])
        ]

    def clear(self) -> None:
        """Begin anew: what is kept is not used any more."""
        self._samples.clear()
