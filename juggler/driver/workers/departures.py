"""What people are told of workers that leave."""

from __future__ import annotations

import textwrap
from collections import deque

from juggler.driver.record.progress import Progress
from juggler.driver.workers.registry import WorkerRegistry
from juggler.runtime.actors.hub_events import Left

_REMEMBERED = 100  # failures


class Departures:
    """
    Args:
        registry: remembers how workers failed.
        progress: shows it.
    """

    def __init__(self, registry: WorkerRegistry, progress: Progress) -> None:
        self._registry = registry
        self._progress = progress
        # Failures that people have seen already.
        self._shown: deque[str] = deque(maxlen=_REMEMBERED)

    def show(self, event: Left) -> None:
        """A worker has left."""
        text, failure = f"{event.worker.worker_id} left: {event.reason}", event.failure
        if failure is not None:
            self._registry.last_failure = failure.message
            if event.worker.local:  # it may stay down, and people see it again
                self._registry.tracebacks[event.worker.worker_id] = failure.traceback
            # A worker that fails in the same way again need not print it all again.
            if failure.message not in self._shown and failure.traceback:
                self._shown.append(failure.message)
                text += f"\n{inset(failure.traceback)}"
        if event.stack:
            text += f"\nIt was here:\n{inset(event.stack)}"
        self._progress.message(text, "error" if failure else "warning")


def inset(text: str) -> str:
    """Lines of a worker, which must not look like those of the run."""
    return textwrap.indent(text.rstrip(), "  ", lambda _: True)
