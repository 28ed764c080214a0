"""The distribution of a measured quantity."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: For durations, in seconds: from a message on the same host to a step of a slow simulator.
DURATIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Histogram:
    """Counts of values in buckets, which only grow.

    Args:
        bounds: upper bounds of the buckets, inclusive and in order; one more bucket has the rest.

    Attributes:
        counts: by bucket; the last one is for values above all bounds.
        sum: of all values.
        most: the largest of them; 0: there is none.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0
        self.most = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self.most = max(self.most, value)
