"""From a learner's state on the attach stream to a checkpoint on the disk."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from juggler.driver.checkpoint.books import books_of, counters_of
from juggler.driver.checkpoint.restoring import checkpoint_tree
from juggler.driver.config import RunConfig
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.ledger import Counters
from juggler.driver.core.state import Past
from juggler.driver.record.checkpoints import adopt, write
from juggler.driver.record.metrics import Metrics
from juggler.driver.run_clock import RunClock
from juggler.driver.workers.module_spaces import Spaces
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    newest_good,
)
from juggler.runtime.checkpoints.frozen import playing_trees
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

_STATE_LIMIT = 64 << 30  # bytes


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """A checkpoint is on the disk, or `problem` says why it is not.

    Attributes:
        path: of it.
        aside: the directory of the run where it lies until it is known how well it plays; "": it
            is one of the checkpoints.
        update: that its weights have.
        steps: that the run had trained on.
        generation: of the weights.
        playing: of one that lies aside, as `playing_trees` gives it.
    """

    path: Path | None
    problem: str = ""
    aside: str = ""
    update: int = 0
    steps: int = 0
    generation: int = 0
    playing: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Its path, as any process of this host finds it."""
        return str(self.path.resolve()) if self.path else ""


@dataclass(slots=True, eq=False)
class _ModuleCut:
    """The state of one module on its way from a learner, and the books of that moment."""

    settings_of: str  # the module of the configuration whose settings it has
    reader: FrameReader[training_pb2.StateHeader]
    counters: Counters | None = None
    connectors: State = field(default_factory=dict)
    spaces: Spaces | None = None
    header: training_pb2.StateHeader | None = None
    state: Mapping[str, Tree] | None = None


class SnapshotWriter:
    """Gathers the states of all modules for one checkpoint at a time, and writes it in a thread.

    Attributes:
        under_way: a snapshot was asked for, and it is not on the disk yet; or a learner still
            sends a state for one that was abandoned.
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
        self.newest = newest
        self.writing = False
        self._events = events
        self._directory = directory
        self._aside = ""  # where the one that is under way is to lie
        self._config = config
        self._clock = clock
        self._cuts: dict[str, _ModuleCut] = {}  # by module id
        self._awaited: set[str] = set()  # modules whose learners have yet to send something
        self._abandoned = False
        self._counters: dict[str, Any] = {}
        self._past = Past()  # books of modules that are not in it

    @property
    def under_way(self) -> bool:
        return self.writing or bool(self._awaited)

    def begin(self, trained: Mapping[str, str], aside: str = "") -> None:
        """A snapshot of these modules has been asked for.

        Args:
            trained: by module id, the module of the configuration whose settings it has.
            aside: as in `Checkpointing.begin`.
        """
        self._aside = aside
        self._abandoned = False
        self._cuts = {
            module_id: _ModuleCut(settings_of, state_reader())
            for module_id, settings_of in trained.items()
        }
        self._awaited = set(self._cuts)

    def take(
        self,
        module_id: str,
        chunk: bytes,
        last: bool,
        core: DriverCore,
        metrics: Metrics,
        spaces: Spaces | None,
        connectors: State,
        more: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """The next chunk of a module's state.

        A learner's answers come in order: when the first chunk comes, the module's books have every
        update that the state has, and no other. The books as they are then complete the cut.

        Args:
            module_id: of the module.
            chunk: of a frame.
            last: its sender says that it is the last one.
            core: has the books.
            metrics: of the run.
            spaces: of the agents that the module plays.
            connectors: what the module's connectors have learned.
            more: gives what else the counters of the run have; None: nothing.

        Raises:
            ValueError: the learner sent something else.
        """
        if module_id not in self._awaited:
            raise ValueError("more of a state that was whole")
        if self._abandoned:  # of another module, whose learner still sends
            self._awaited -= {module_id} if last else set()
            return
        cut = self._cuts[module_id]
        if cut.counters is None:
            cut.counters = core.module(module_id).ledger.counters()
            cut.connectors, cut.spaces = connectors, spaces
            books = [each.counters for each in self._cuts.values() if each.counters is not None]
            # Those of the whole run are cut with the module that is the last to begin.
            self._past = core.past_and(beside=self._cuts)
            times = self._clock.now()
            self._counters = counters_of(books, self._past, core.next_id, metrics, times)
            if more is not None:
                self._counters |= more()
        frame = cut.reader.feed(chunk)
        if frame is None:
            if last:
                self.abandon(module_id)
                raise ValueError("a state that ended in the middle")
            return
        if not isinstance(frame.tree, dict):
            raise ValueError("a state must be a branch of modules, not an array")
        if frame.header.module_id != module_id:
            raise ValueError(f"the state of module {frame.header.module_id[:100]!r}")
        _extra(frame.header.extra)
        cut.header, cut.state = frame.header, frame.tree
        self._awaited.remove(module_id)
        if self._awaited:
            return
        checkpoint = self._whole()
        self._cuts = {}
        self.writing = True
        threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint").start()

    def _whole(self) -> Checkpoint:
        """The checkpoint, of which everything is here.

        Raises:
            ValueError: the states do not go together.
        """
        modules: dict[str, Any] = {}
        states: dict[str, Mapping[str, Tree]] = {}
        for module_id, cut in self._cuts.items():
            # A learner is set up with spaces, and all of this came with its state.
            assert cut.header is not None
            assert cut.state is not None
            assert cut.counters is not None
            assert cut.spaces is not None
            version = Version.of(cut.header.version)
            states[module_id] = cut.state
            modules[module_id] = {
                "version": version,
                "extra": _extra(cut.header.extra),
                "counters": books_of(cut.counters),
                "spaces": cut.spaces.to_json(),
            }
            if cut.settings_of != module_id:
                modules[module_id]["settings_of"] = cut.settings_of
        versions = [module["version"] for module in modules.values()] + [self._past.version]
        only = next(iter(modules.values()))
        return Checkpoint(
            version=Version.of_run(versions),
            tree=checkpoint_tree(
                states, {module_id: cut.connectors for module_id, cut in self._cuts.items()}
            ),
            modules=modules,
            counters=self._counters,
            config=self._config.flat(),
            spaces=only["spaces"] if len(modules) == 1 else {},
        )

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint of this run that is whole, and what is wrong with newer ones."""
        if self.newest is None:
            return None, []
        try:
            return newest_good(self._directory)
        except CheckpointError as error:
            return None, [str(error)]

    def done(self, written: SnapshotWritten) -> None:
        self.writing = False
        if not written.aside:
            self.newest = written.path or self.newest

    def keep(self, candidate: Path) -> str:
        """Make a candidate the newest checkpoint of the run. Returns what prevents it, or ""."""
        try:
            self.newest = adopt(candidate, self._directory, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            return str(error)
        self.let_go(candidate.parent.name)
        return ""

    def let_go(self, aside: str) -> None:
        """Nobody wants what lies there any more, unless it is not there yet."""
        if not (self.under_way and self._aside == aside):
            shutil.rmtree(self._directory.with_name(aside), ignore_errors=True)

    def abandon(self, module_id: str) -> None:
        """Whoever was asked for this module's state sends no more of it. What is whole is written
        all the same; else the states of other modules, of which more may come, are in vain."""
        if module_id in self._awaited:
            self._awaited.remove(module_id)
            self._abandoned = True
            self._cuts = {}

    def _write(self, checkpoint: Checkpoint) -> None:
        aside = self._aside
        try:
            if aside:
                path = write(self._directory.with_name(aside), checkpoint, keep=1)
            else:
                path = write(self._directory, checkpoint, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            self._events.put(SnapshotWritten(None, str(error), aside))
        except BaseException as error:
            self._events.put(SnapshotWritten(None, f"no checkpoint: {error!r}", aside))
            raise
        else:
            (generation, update), steps = checkpoint.version, checkpoint.counters["trained"]
            playing = playing_trees(checkpoint) if aside else {}
            written = SnapshotWritten(path, "", aside, update, steps, generation, playing)
            self._events.put(written)


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
