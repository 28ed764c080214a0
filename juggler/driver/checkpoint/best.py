"""The checkpoint that played best in an evaluation, which a run keeps beside its newest ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from juggler.driver.record.checkpoints import adopt, write_synced
from juggler.driver.record.episode_returns import Played
from juggler.runtime.checkpoints.checkpoint import BEST, CheckpointError, newest_first
from juggler.runtime.plain_files import read_json

#: In the checkpoint's directory, beside its own files: how it played.
_EVALUATION_FILE = "evaluation.json"
_RECORDED = ("return_mean", "return_deviation", "episodes", "update", "env_steps_trained")


class BestCheckpoint:
    """The one checkpoint in `RUN/best`, and how it played. A run that is resumed goes on with it.

    Attributes:
        summary: where it is and how it played, for the summary; None: there is none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / BEST
        self.summary: dict[str, Any] | None = _read(self._directory)

    def is_better(self, returns: Sequence[float]) -> bool:
        """Whether these returns have a higher mean than those of the best one so far."""
        best = self.summary
        return best is None or Played.of(returns).mean > best["return_mean"]

    def keep(self, path: Path, returns: Sequence[float], trained: Mapping[str, int]) -> str:
        """Move a checkpoint here, in place of the one before. Returns what prevents it, or "".

        Args:
            path: of the checkpoint, on the same disk.
            returns: of the episodes that it played.
            trained: its "update" and "env_steps_trained".
        """
        played = Played.of(returns)
        record = {
            "return_mean": played.mean,
            "return_deviation": played.deviation,
            "episodes": played.episodes,
            **trained,
        }
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            # Before it gets its place: the two are never apart.
            write_synced(path / _EVALUATION_FILE, json.dumps(record).encode() + b"\n")
            kept = adopt(path, self._directory, keep=1)
        except OSError as error:
            return f"cannot keep the best checkpoint in {self._directory}: {error}"
        except CheckpointError as error:
            return str(error)
        self.summary = {"checkpoint": str(kept), **record}
        return ""


def _read(directory: Path) -> dict[str, Any] | None:
    """The best checkpoint of a run so far; None: there is none, or nobody knows how it played."""
    try:
        path = newest_first(directory)[0]
        record = read_json(path / _EVALUATION_FILE)
        found = {key: record[key] + 0 for key in _RECORDED}
    except (OSError, IndexError, ValueError, TypeError, KeyError):
        return None
    return {"checkpoint": str(path), **found}
