"""What is missing where nothing is learned."""

from __future__ import annotations

from juggler.driver.config import RunConfig
from juggler.driver.conversation import Conversation


class Standstill:
    """Looks every now and then whether the run gets on.

    Args:
        config: of the run.
        workers: who should get on.
    """

    def __init__(self, config: RunConfig, workers: Conversation) -> None:
        self._config = config
        self._workers = workers
        self._trained_at_last_look = 0

    def look(self) -> str:
        """For people: what is missing where nothing was trained on since the last look; else ""."""
        trained, before = self._workers.core.ledger.trained, self._trained_at_last_look
        self._trained_at_last_look = trained
        if trained != before:
            return ""
        seconds = self._config.driver.worker_timeout_seconds
        return f"no update in the last {seconds:.0f} s. {self.what_is_there()}"

    def what_is_there(self) -> str:
        """For people who wait for updates."""
        core, roster = self._workers.core, self._workers.roster
        parts = [roster.describe()]
        if core.missing_learners:
            parts.append(f"waits for learners: {core.missing_learners} more")
        if core.members:
            size = self._config.learner.batch_size
            parts.append(f"an update takes {size} steps, {core.held_steps} are there")
        if roster.last_failure:
            parts.append(f"the last failure: {roster.last_failure}")
        return "; ".join(parts)
