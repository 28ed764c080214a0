"""From a learner's state on the attach stream to a checkpoint on the disk."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from juggler.driver.checkpoint.restoring import counters_of, module_tree, with_connectors
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.record.checkpoints import adopt, write
from juggler.driver.record.metrics import Metrics
from juggler.driver.run_clock import RunClock
from juggler.driver.workers.registry import Spaces
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.checkpoints.checkpoint import (
    CANDIDATE,
    Checkpoint,
    CheckpointError,
    newest_good,
)
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.wire.frames import FrameReader, Limits
from juggler.runtime.wire.v1 import training_pb2

_STATE_LIMIT = 64 << 30  # bytes


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A checkpoint is on the disk, or `problem` says why it is not.

    Attributes:
        path: of it.
        candidate: it lies aside, until it is known how well it plays.
        update: that its weights have.
        steps: that the run had trained on.
    """

    path: Path | None
    problem: str = ""
    candidate: bool = False
    update: int = 0
    steps: int = 0

    @property
    def place(self) -> str:
        """Its path, as any process of this host finds it."""
        return str(self.path.resolve()) if self.path else ""


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
        self._aside = directory.with_name(CANDIDATE)
        self._candidate = False  # the one that is under way is one
        self._config = config
        self._clock = clock
        self._reader = state_reader()
        self._counters: dict[str, Any] | None = None
        self._connectors: State = {}

    def begin(self, candidate: bool = False) -> None:
        """A snapshot has been asked for; that of a candidate is to lie aside."""
        self.under_way = True
        self._candidate = candidate
        self._counters = None
        self._reader = state_reader()

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
        module_id = frame.header.module_id
        version = frame.header.version.generation, frame.header.version.update
        assert spaces is not None  # a learner is set up with them
        if not isinstance(frame.tree, dict):
            raise ValueError("a state must be a branch of modules, not an array")
        checkpoint = Checkpoint(
            version=version,
            tree=with_connectors(module_tree(module_id, frame.tree), self._connectors),
            modules={module_id: {"version": version, "extra": _extra(frame.header.extra)}},
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
        if not written.candidate:
            self.newest = written.path or self.newest

    def keep(self, candidate: Path) -> str:
        """Make a candidate the newest checkpoint of the run. Returns what prevents it, or ""."""
        try:
            self.newest = adopt(candidate, self._directory, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            return str(error)
        self.let_go_of_candidate()
        return ""

    def let_go_of_candidate(self) -> None:
        """Nobody wants it any more, unless it is not there yet."""
        if not (self.under_way and self._candidate):
            shutil.rmtree(self._aside, ignore_errors=True)

    def abandon(self) -> None:
        """Whoever was asked sends no more. What is whole is written all the same."""
        self.under_way = self.writing

    def _write(self, checkpoint: Checkpoint) -> None:
        aside = self._candidate
        try:
            if aside:
                path = write(self._aside, checkpoint, keep=1)
            else:
                path = write(self._directory, checkpoint, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            self._events.put(SnapshotWritten(None, str(error), aside))
        except BaseException as error:
            self._events.put(SnapshotWritten(None, f"no checkpoint: {error!r}", aside))
            raise
        else:
            update, steps = checkpoint.version[1], checkpoint.counters["trained"]
            self._events.put(SnapshotWritten(path, "", aside, update, steps))


def _extra(text: str) -> dict[str, Any]:
    try:
        extra = json.loads(text)
    except RecursionError as error:
        raise ValueError("a state whose JSON is too deep") from error
    if not isinstance(extra, dict):
        raise ValueError(f"a state whose JSON is no object but {type(extra).__name__}")
    return extra


def state_reader() -> FrameReader[training_pb2.StateHeader]:
    """For the answers to one Snapshot."""
    return FrameReader(training_pb2.StateHeader, Limits(payload_bytes=_STATE_LIMIT), digests=True)
