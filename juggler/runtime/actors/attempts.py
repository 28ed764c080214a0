"""Repeated attempts, with growing pauses."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 15.0


def attempts(patience: float) -> Iterator[None]:
    """Yields once for each attempt, after a pause, until `patience` seconds are over. The pauses
    grow and are random, so that not all processes try at the same time."""
    end = time.monotonic() + patience
    delay = _FIRST_DELAY_SECONDS
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, delay * random.uniform(0.5, 1.0)))
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        yield
