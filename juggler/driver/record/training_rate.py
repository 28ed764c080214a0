"""How many steps a run trains on per second."""

from __future__ import annotations

from collections import deque

_SECONDS = 10.0


class TrainingRate:
    """Steps trained on per second, over the last ten seconds, or the last update if it took longer.

    Steps are counted an update at a time, so the rate is one from change to change. A pause since
    the last change counts from when it is longer than the one before it.

    Args:
        time: in seconds of training, when the rate begins.
        steps: trained on by then.
    """

    def __init__(self, time: float = 0.0, steps: int = 0) -> None:
        self._changes = deque([(time, steps)])
        self._now = time

    def note(self, time: float, steps: int) -> None:
        """The steps so far. Called about every second."""
        self._now = time
        if steps != self._changes[-1][1]:
            self._changes.append((time, steps))
        while len(self._changes) > 2 and self._changes[1][0] <= time - _SECONDS:
            self._changes.popleft()

    def per_second(self) -> float:
        if len(self._changes) < 2:
            return 0.0
        (first, before), (previous, _) = self._changes[0], self._changes[-2]
        last, steps = self._changes[-1]
        until = max(last, self._now - (last - previous))
        return (steps - before) / max(until - first, 1e-9)
