"""What a tracker of experiments has to do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

#: Where runs are recorded whose tracker was told of no other place.
PROJECT = "juggler"


class Tracker(Protocol):
    """Records one run elsewhere. `start` is called first, in the thread of the run; all else by one
    thread, which nobody waits for but the end of the run."""

    def start(self, run_dir: Path, config: Mapping[str, Any], known_as: str) -> str:
        """Begin to record.

        Args:
            run_dir: of the run.
            config: its configuration, flat.
            known_as: what this returned when the run began, if it is resumed; "": it is new.

        Returns:
            The tracker's name for the run.
        """

    def metrics(self, numbers: Mapping[str, float], env_steps: int) -> None:
        """Record a line of metrics.

        Args:
            numbers: the numbers, by keys of a flat line.
            env_steps: environment steps sampled.
        """

    def checkpoint(self, name: str, path: Path) -> None:
        """Record a checkpoint.

        Args:
            name: "newest" or "best".
            path: its directory, which may be gone when this returns.
        """

    def summary(self, summary: Mapping[str, Any]) -> None:
        """The run is over: record how it ended. Its last checkpoints may follow, which can take
        longer than anybody waits.

        Args:
            summary: the content of `summary.json`.
        """

    def finish(self) -> None:
        """Everything was recorded: close everything."""
