"""Writes states of learners, as they arrive, to checkpoints on the disk."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from juggler.driver.checkpoint.driver_state import books_of, checkpoint_tree, counters_of
from juggler.driver.config import RunConfig
from juggler.driver.core.core_state import RemovedModules
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.ledger import Counters
from juggler.driver.record.metrics import Metrics
from juggler.driver.result import RunClock
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointError,
    adopt,
    newest_good,
    write,
)
from juggler.runtime.checkpoints.weights import playing_trees
from juggler.runtime.connectors.mergeable_state import State
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.frames import FrameReader
from juggler.runtime.wire.layouts import Limits
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts

_STATE_LIMIT = 64 << 30  # bytes


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """Event: a checkpoint is on the disk, or writing it failed."""

    path: Path | None
    problem: str = ""
    # Directory of the run where it waits for its evaluation; "": it is already a checkpoint
    aside: str = ""
    update: int = 0  # of its weights
    steps: int = 0  # steps trained on then
    generation: int = 0
    # Of a checkpoint set aside, see `playing_trees`
    playing: Mapping[str, Mapping[str, Tree]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return its absolute path."""
        return str(self.path.resolve()) if self.path else ""


@dataclass(slots=True, eq=False)
class _ModuleCut:
    """One module's state from its learner, and its books at that moment."""

    settings_of: str  # the module of the configuration whose settings it has
    reader: FrameReader[training_pb2.StateHeader]
    counters: Counters | None = None
    connectors: State = field(default_factory=dict)
    spaces: Mapping[str, object] = field(default_factory=dict)  # of its agents
    header: training_pb2.StateHeader | None = None
    state: Mapping[str, Tree] | None = None


class SnapshotWriter:
    """Gathers states of all modules, and writes them in a thread.

    Attributes:
        under_way: a requested snapshot is not on the disk yet, or a learner is still sending a
            state for an abandoned one.
        writing: all of it has arrived.
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
        self._aside = ""  # where the current snapshot is written
        self._config = config
        self._clock = clock
        self._cuts: dict[str, _ModuleCut] = {}  # by module id
        self._awaited: set[str] = set()  # modules whose states are not complete
        self._abandoned = False
        self._counters: dict[str, Any] = {}
        self._past = RemovedModules()  # books of modules outside the snapshot

    @property
    def under_way(self) -> bool:
        return self.writing or bool(self._awaited)

    def begin(self, trained: Mapping[str, str], aside: str = "") -> None:
        """Begin a snapshot of these modules.

        Args:
            trained: by module id, the module of the configuration whose settings it has.
        """
        self._aside = aside
        self._abandoned = False
        self._cuts = {
            module_id: _ModuleCut(settings_of, state_reader())
            for module_id, settings_of in trained.items()
        }
        self._awaited = set(self._cuts)

    def add_chunk(
        self,
        module_id: str,
        chunk: bytes,
        last: bool,
        core: DriverCore,
        metrics: Metrics,
        spaces: training_pb2.Ready.Module,
        connectors: State,
        more: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Add the next chunk of a module's state.

        A learner's answers arrive in order: at the first chunk, the module's books have exactly
        the updates that the state has. So the books are copied at that moment.

        Args:
            spaces: of the agents that the module plays.
            more: returns further counters of the run; None: nothing.
        """
        if self._abandoned:  # another module's learner still sends
            self._awaited -= {module_id} if last else set()
            return
        cut = self._cuts[module_id]
        if cut.counters is None:
            cut.counters = core.module(module_id).ledger.counters()
            cut.connectors, cut.spaces = connectors, spaces_of_environment(spaces)
            books = [each.counters for each in self._cuts.values() if each.counters is not None]
            # The run's own counters are copied with the module that begins last.
            self._past = core.past_and(beside=self._cuts)
            times = self._clock.now()
            self._counters = counters_of(books, self._past, core.next_id, metrics, times)
            if more is not None:
                self._counters |= more()
        frame = cut.reader.feed(chunk)
        if frame is None:
            return
        assert isinstance(frame.tree, dict)
        cut.header, cut.state = frame.header, frame.tree
        self._awaited.remove(module_id)
        if self._awaited:
            return
        checkpoint = self._whole()
        self._cuts = {}
        self.writing = True
        threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint").start()

    def _whole(self) -> Checkpoint:
        """Build the checkpoint, now that all of it has arrived."""
        modules: dict[str, Any] = {}
        states: dict[str, Mapping[str, Tree]] = {}
        for module_id, cut in self._cuts.items():
            assert cut.header is not None
            assert cut.state is not None
            assert cut.counters is not None
            version = Version.of(cut.header.version)
            states[module_id] = cut.state
            modules[module_id] = {
                "version": version,
                "extra": json.loads(cut.header.extra),
                "counters": books_of(cut.counters),
                "spaces": cut.spaces,
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
        """Return this run's newest whole checkpoint, and problems of newer ones."""
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
        """Make a candidate the newest checkpoint; return what prevents it, or ""."""
        try:
            self.newest = adopt(candidate, self._directory, self._config.driver.keep_checkpoints)
        except CheckpointError as error:
            return str(error)
        self.discard_aside(candidate.parent.name)
        return ""

    def discard_aside(self, aside: str) -> None:
        """Remove a state set aside, unless it is still being written."""
        if not (self.under_way and self._aside == aside):
            shutil.rmtree(self._directory.with_name(aside), ignore_errors=True)

    def abandon(self, module_id: str) -> None:
        """Abandon a module's state, and with it an unfinished snapshot."""
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


def state_reader() -> FrameReader[training_pb2.StateHeader]:
    """Make a reader for the answers to one Snapshot."""
    return FrameReader(training_pb2.StateHeader, Limits(payload_bytes=_STATE_LIMIT), digests=True)


class Checkpointing:
    """Asks one learner of each module for its state.

    Asynchronously, the clock decides when, and training continues. In synchronous mode,
    checkpoints are taken between turns, at multiples of `checkpoint_updates`, and the next turn
    waits until the checkpoint is on the disk. Then all workers restart as in a resumed run,
    without any state that the checkpoint does not hold. So both runs give the same numbers.

    Attributes:
        suspended: no checkpoints are written, because another run has the directory.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._core, self._registry = parts, parts.core, parts.registry
        self._commands, self._snapshots = parts.commands, parts.snapshots
        self._every = parts.config.driver.checkpoint_updates
        self._last = parts.core.updates_before  # its checkpoint exists
        self._asked: dict[str, str] = {}  # by module id, the learner that sends its state
        self.suspended = False

    @property
    def waits_for(self) -> list[str]:
        """The modules without a learner, which prevent checkpoints."""
        return [each.module_id for each in self._core.in_checkpoints() if not each.members]

    def begin(self, aside: str = "") -> bool:
        """Ask for all states, if that is possible now.

        Args:
            aside: directory of the run for the snapshot; "": among the checkpoints.
        """
        return not self.suspended and self._ask(None, aside)

    def holds_up(self, update: int) -> bool:
        """Begin a due checkpoint; return whether the next turn has to wait."""
        modules = self._core.modules.values()
        if self._snapshots.under_way or not all(module.members for module in modules):
            return True
        # Each round makes one update of every module.
        rounds = max(module.weights_version.update for module in modules)
        if self.suspended or rounds % self._every or update == self._last:
            return False
        self._last = update
        self._commands.restart_runners(update)
        for module in modules:
            for member in module.members[1:]:
                learner = self._registry.ready[member]
                seed = self._registry.seed(learner, update=update)
                anew = training_pb2.BeginAnew(module_id=module.module_id, seed=seed)
                self._commands.send(learner, anew)
        return self._ask(update)

    def left(self, worker_id: str) -> None:
        """Abandon the states that a lost learner was sending."""
        for module_id in [each for each, asked in self._asked.items() if asked == worker_id]:
            del self._asked[module_id]
            self._snapshots.abandon(module_id)

    def _ask(self, restarts_at: int | None, aside: str = "") -> bool:
        """Ask each module's first learner, which may restart at an update.

        Modules that were just added are left out; so are leaving modules, unless they are needed.
        """
        league = self._parts.league
        modules = self._core.in_checkpoints(league.learners.needed() if league else ())
        if not modules or self._snapshots.under_way:
            return False
        if not all(module.members for module in modules):
            return False
        trained = {each.module_id: self._registry.trained[each.module_id] for each in modules}
        self._snapshots.begin(trained, aside)
        self._asked = {module.module_id: module.members[0] for module in modules}
        for module_id, worker_id in self._asked.items():
            command = training_pb2.Snapshot(module_id=module_id)
            if restarts_at is not None:
                learner = self._registry.ready[worker_id]
                command.seed = self._registry.seed(learner, update=restarts_at)
            self._commands.send_to(worker_id, command)
        return True
