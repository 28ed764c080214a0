"""From a learner's state on the attach stream to a checkpoint on the disk."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.record.checkpoints import write
from juggler.driver.record.metrics import Metrics
from juggler.driver.restoring import counters_of, with_connectors
from juggler.driver.roster import Spaces
from juggler.driver.run_clock import RunClock
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, newest_good
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.wire.frames import FrameReader, Limits
from juggler.runtime.wire.v1 import training_pb2

_STATE_LIMIT = 64 << 30  # bytes


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A checkpoint is on the disk, or `problem` says why it is not."""

    path: Path | None
    problem: str = ""


class SnapshotWriter:
    """Gathers one snapshot at a time, and writes it in a thread.

    Attributes:
        under_way: a snapshot was asked for and is not on the disk yet.
        writing: all of it is here.
        newest: the newest checkpoint that this run wrote.
    """

    def __init__(
        self,
        events: Mailbox[Any],
        directory: Path,
        config: RunConfig,
        clock: RunClock,
        newest: Path | None,
    ) -> None:
        self.under_way = False
        self.newest = newest
        self.writing = False
        self._events = events
        self._directory = directory
        self._config = config
        self._clock = clock
        self._reader = _new_reader()
        self._counters: dict[str, Any] | None = None
        self._connectors: State = {}

    def begin(self) -> None:
        """A snapshot has been asked for."""
        self.under_way = True
        self._counters = None
        self._reader = _new_reader()

    def take(
        self,
        chunk: bytes,
        last: bool,
        core: DriverCore,
        metrics: Metrics,
        spaces: Spaces | None,
        connectors: State,
    ) -> None:
        """The next chunk of the state; `last` where its sender says so.

        A learner's answers come in order: when the first chunk comes, the books have every update
        that the state has, and no other. The books as they are then complete the cut.

        Raises:
            ValueError: the learner sent something else.
        """
        if self.writing:
            raise ValueError("more of a state that was whole")
        if self._counters is None:
            self._counters = counters_of(core, metrics, self._clock.now())
            self._connectors = connectors
        frame = self._reader.feed(chunk)
        if frame is None:
            if last:
                self.abandon()
                raise ValueError("a state that ended in the middle")
            return
        version = frame.header.version
        assert spaces is not None  # a learner is set up with them
        if not isinstance(frame.tree, dict):
            raise ValueError("a state must be a branch of modules, not an array")
        checkpoint = Checkpoint(
            version=(version.generation, version.update),
            tree=with_connectors(frame.tree, self._connectors),
            extra=_extra(frame.header.extra),
            counters=self._counters,
            config=self._config.flat(),
            spaces=spaces.to_json(),
        )
        self.writing = True
        threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint").start()

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint of this run that is whole, and what is wrong with newer ones."""
        if self.newest is None:
            return None, []
        try:
            return newest_good(self._directory)
        except CheckpointError as error:
            return None, [str(error)]

    def done(self, written: SnapshotWritten) -> None:
        self.under_way = self.writing = False
        self.newest = written.path or self.newest

    def abandon(self) -> None:
        """Whoever was asked sends no more. What is whole is written all the same."""
        self.under_way = self.writing

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            path = write(self._directory, checkpoint, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            self._events.put(SnapshotWritten(None, str(error)))
        except BaseException as error:
            self._events.put(SnapshotWritten(None, f"no checkpoint: {error!r}"))
            raise
        else:
            self._events.put(SnapshotWritten(path))


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except RecursionError as error:
        raise ValueError("a state whose JSON is too deep") from error
    if not isinstance(extra, dict):
        raise ValueError(f"a state whose JSON is no object but {type(extra).__name__}")
    return extra


def _new_reader() -> FrameReader[training_pb2.StateHeader]:
    return FrameReader(training_pb2.StateHeader, Limits(payload_bytes=_STATE_LIMIT), digests=True)
