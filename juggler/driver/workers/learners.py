"""The learners of one module: how they meet, what they begin with, and their own books."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.restoring import begin_commands, is_without, restore_commands
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.core.events import BeginWithFewer, MeetAgain, PeersMet, UnheardUpdate
from juggler.driver.core.module_core import ModuleCore
from juggler.driver.record.progress import Progress
from juggler.driver.workers.registry import WorkerRegistry
from juggler.driver.workers.replies import read_unheard_update
from juggler.runtime.actors.hub_events import Worker
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

#: Of learners in a group. They wait for longer for one of theirs that hangs (COLLECTIVE_SECONDS).
PEER_SILENCE_SECONDS = 6.0
#: Between the report that learners lost each other and another attempt with the same ones. One that
#: died has left by then.
_REGROUP_SECONDS = 1.0
#: Of so many learners a warning gives the reasons.
_MOST_REASONS = 4
#: Between two warnings that they cannot update together.
_TELL_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class ModuleReset:
    """Other weights of a module, and a new optimizer.

    Attributes:
        generation: of the first group that has them.
        seed: of what `beginning` leaves out.
        beginning: where the weights are from; None: they are new.
    """

    generation: int
    seed: int
    beginning: Beginning | None

    def commands(self, module_id: str) -> Iterator[Message]:
        """What a learner is told."""
        yield training_pb2.Reset(module_id=module_id, seed=self.seed)
        if self.beginning is not None:
            yield from begin_commands(module_id, self.beginning)


class Learners:
    """What the driver knows of one module's learners beyond their batches, which the core keeps.

    Attributes:
        steps: by worker id, the learner's own counts of steps trained on and dropped, all processes
            of that id together. They must agree with the core's ledger.
        beginning: what they begin with before there is a checkpoint; None: with new weights.
        last_reset: of the module; None: it was never reset.
    """

    def __init__(
        self,
        config: RunConfig,
        core: ModuleCore,
        registry: WorkerRegistry,
        snapshots: SnapshotWriter,
        progress: Progress,
        resume: Checkpoint | None,
        beginning: Beginning | None,
    ) -> None:
        self.steps: dict[str, dict[str, int]] = {}
        self._steps_before: dict[str, dict[str, int]] = {}  # those of processes that are gone
        # To learners that are not ready yet: weights of this version, and what they are, in words;
        # "": what the run goes on from.
        self._given: dict[Worker, tuple[Version, str]] = {}
        self._lost: tuple[int, float] | None = None  # a generation that cannot update, and when
        self._why_lost: dict[str, str] = {}  # by worker id, as each of its members says
        self._told_lost = -_TELL_SECONDS  # when people were told
        self._agreed = (0, 0)  # a generation, and the hash of its state
        self._several = registry.processes_of(core.module_id) > 1  # are here, or have been
        several = len(config.module_ids) > 1 or bool(config.agents.league)
        self._of_module = f" of module {core.module_id}" if several else ""
        self._patience = config.driver.worker_timeout_seconds
        self._waited_since: float | None = None  # for learners that the run is to begin with
        self._core = core
        self._registry = registry
        self._snapshots = snapshots
        self._progress = progress
        without = resume is not None and is_without(resume, core.module_id)
        self._resume = None if without else resume
        self.beginning = beginning
        self.last_reset: ModuleReset | None = None

    def precede_reset(self, version: Version) -> bool:
        """Whether weights of this version are from before the last reset."""
        return self.last_reset is not None and version.generation < self.last_reset.generation

    def begin(self, learner: Worker, seed: int) -> Iterator[Message]:
        """What a learner process is told of the module: its setup, and the newest checkpoint.

        Before there is a checkpoint it gets the weights that the run begins with, so that all
        learners begin with the same weights. Members that have got further hand their state over
        when they meet. If no member is left, the learner may have kept its own weights while it had
        lost this driver.

        Args:
            learner: the process, which is set up.
            seed: from its setup.
        """
        module = self._registry.module_setup(self._core.module_id, seed)
        if self.had_learner and not self._core.members:
            first = self.last_reset.generation if self.last_reset else 0
            oldest = Version(max(self._core.weights_version.generation, first), 0)
            module.oldest_handover.CopyFrom(oldest.message())
        yield module
        state = self._state_for(learner)
        if state is not None:
            yield from restore_commands(module.module_id, state)
        elif self.beginning is not None and module.module_id in self.beginning.weights:
            yield from begin_commands(module.module_id, self.beginning)

    @property
    def had_learner(self) -> bool:
        """A learner of this module has been ready."""
        return bool(self._registry.meeting_points.get(self._core.module_id))

    def _state_for(self, learner: Worker) -> Checkpoint | None:
        if not self.had_learner:
            if self._resume is not None:
                known = self._resume.version_of(self._core.module_id)
                self._given[learner] = Version(*known), ""
            return self._resume
        state, problems = self._snapshots.newest_good()
        for problem in problems:
            self._progress.message(problem, "error")
        if state is not None and is_without(state, self._core.module_id):
            state = None
        at_first = self.beginning.text if self.beginning else "new weights"
        known = (0, 0) if state is None else state.version_of(self._core.module_id)
        given = at_first if state is None else f"update {known[1]}"
        self._given[learner] = Version(*known), given
        return state

    def reset_again(self, learner: Worker, ready: training_pb2.ModuleReady) -> Iterator[Message]:
        """What a learner is told before it is ready, if it begins with what the module had before
        its last reset."""
        reset, (version, given) = self.last_reset, self._given.get(learner, (self._newest, ""))
        if reset and self.precede_reset(version) and not ready.HasField("handed_over"):
            self._given[learner] = version, given and "its last reset"
            yield from reset.commands(self._core.module_id)

    def ready(self, learner: Worker, ready: training_pb2.ModuleReady) -> Iterator[UnheardUpdate]:
        """A learner has what it begins with.

        Yields:
            What it did before it was lost and may not have been heard of. The core is to be told
            before the next one is asked for.

        Raises:
            ValueError: it says what cannot be.
        """
        version, given = self._given.pop(learner, (self._newest, ""))
        if ready.HasField("handed_over"):
            before = self._core.ledger.trained
            for done in ready.last_updates:
                yield read_unheard_update(
                    self._core.module_id, learner.worker_id, done, self._newest
                )
            trained = self._core.ledger.trained - before
            self._kept(learner.worker_id, trained)
            weights = f"its weights{self._of_module} of update {ready.handed_over.update}"
            text = f"{learner.worker_id} is back with {weights}"
            unheard = f", and with {trained} steps trained on that nobody had heard of"
            self._progress.message(text + (unheard if trained else ""), "info")
        elif given and not self._core.members and version.update < self._newest.update:
            lost = f"the learners' weights{self._of_module} are lost"
            text = f"{lost}: {learner.worker_id} goes on from {given}"
            self._progress.message(text, "warning")

    def to_begin_with_fewer(self) -> BeginWithFewer | None:
        """The run has waited for long enough for the learners that it was to begin with."""
        missing = self._core.missing_learners
        if not missing or not self._registry.learners_of(self._core.module_id):
            self._waited_since = None
            return None
        now = time.monotonic()
        if self._waited_since is None:
            self._waited_since = now
            late = _counted(missing) + self._of_module
            text = f"waiting for {late}, for up to {self._patience:.0f} s"
            self._progress.message(text, "info")
        if now - self._waited_since < self._patience:
            return None
        late = _counted(missing) + self._of_module
        text = f"{late} did not come within {self._patience:.0f} s: the run begins "
        self._progress.message(text + "without, and takes them when they come", "warning")
        return BeginWithFewer(self._core.module_id)

    @property
    def _newest(self) -> Version:
        return Version(self._core.generation, self._core.weights_version.update)

    def met(self, worker: Worker, formed: training_pb2.GroupFormed) -> PeersMet | None:
        """A member says whether it can update with the others; None where that is no news.

        Raises:
            ValueError: it has not got what another one has.
        """
        if formed.generation != self._core.generation:
            return None
        if formed.peer_lost:
            self.lost(formed.generation, worker.worker_id, formed.peer_lost)
            return None
        generation, state_hash = self._agreed
        if generation == formed.generation and state_hash != formed.state_hash:
            raise ValueError("another state than that of the learners it is in a group with")
        self._agreed = (formed.generation, formed.state_hash)
        if worker.worker_id != self._core.members[0]:
            return None
        self._several = self._several or len(self._core.members) > 1
        if self._several:
            devices = self._registry.devices
            named = ", ".join(f"{name} on {devices[name]}" for name in self._core.members)
            self._progress.message(
                f"learner group {formed.generation}{self._of_module}: {named}", "info"
            )
        return PeersMet(formed.generation, formed.update, self._core.module_id)

    def lost(self, generation: int, worker_id: str, why: str) -> None:
        """A member of this generation cannot update with the others."""
        if generation != self._core.generation:
            return
        if self._lost is None:
            self._lost, self._why_lost = (generation, time.monotonic()), {}
        self._why_lost[worker_id] = why

    def to_meet_again(self) -> MeetAgain | None:
        """Learners lost each other, and none of them turned out to be gone: that would have been
        told within a moment."""
        if self._lost is None or time.monotonic() - self._lost[1] < _REGROUP_SECONDS:
            return None
        generation, self._lost = self._lost[0], None
        if generation == self._core.generation:
            self._tell_why_lost(generation)
        return MeetAgain(generation, self._core.module_id)

    def _tell_why_lost(self, generation: int) -> None:
        now = time.monotonic()
        if now - self._told_lost < _TELL_SECONDS:
            return
        self._told_lost = now
        reasons = [f"{name}: {text}" for name, text in sorted(self._why_lost.items())]
        why = "; ".join(reasons[:_MOST_REASONS])
        if (more := len(reasons) - _MOST_REASONS) > 0:
            why += f"; {more} more have lost each other"
        self._progress.message(
            f"learner group {generation}{self._of_module} cannot update together, although all of "
            f"its learners are here: {why}. It is formed again, and what was sampled for it is "
            "dropped. Learners dial each other at the addresses that --bind or --advertise give; "
            "with TLS, certificates must name these",
            "warning",
        )

    def updated(self, worker_id: str, done: training_pb2.UpdateDone) -> None:
        before = self._steps_before.get(worker_id, {})
        self.steps[worker_id] = {
            "trained": done.steps_trained + before.get("trained", 0),
            "dropped": done.steps_dropped + before.get("dropped", 0),
        }
        if done.peer_lost:
            self.lost(done.version.generation, worker_id, done.peer_lost)

    def _kept(self, worker_id: str, trained: int) -> None:
        """Steps turned out to have been trained on by its process before this one."""
        for books in (self.steps, self._steps_before):
            books[worker_id] = {"dropped": 0, **books.get(worker_id, {})}
            books[worker_id]["trained"] = books[worker_id].get("trained", 0) + trained

    def left(self, learner: Worker) -> None:
        """Its next process counts from zero."""
        self._given.pop(learner, None)
        self._steps_before[learner.worker_id] = self.steps.get(learner.worker_id, {})


def _counted(missing: int) -> str:
    return f"{missing} more learner{'s' * (missing > 1)}"
