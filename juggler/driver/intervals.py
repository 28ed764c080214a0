"""What is to be done every so often."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Intervals:
    """Alarms by name, the first of each one interval from now.

    Args:
        seconds: between an alarm and the next; 0: there is none.
    """

    def __init__(self, seconds: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._seconds = {name: length for name, length in seconds.items() if length}
        self._due = {name: now + length for name, length in self._seconds.items()}

    def left(self) -> float:
        """Seconds until the next alarm, at least 0."""
        return max(0.0, min(self._due.values()) - time.monotonic())

    def due(self) -> list[str]:
        """Whose time has come since they were last named here."""
        now = time.monotonic()
        names = [name for name, moment in self._due.items() if moment <= now]
        self._due.update((name, now + self._seconds[name]) for name in names)
        return names
