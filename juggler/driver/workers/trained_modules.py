"""The modules that a run trains, with their learners, in the driver."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from juggler.driver.checkpoint.first_weights import FirstWeights
from juggler.driver.checkpoint.snapshots import (
    begin_commands,
    connectors_of,
    is_without,
    restore_commands,
    settings_for,
)
from juggler.driver.core.core_state import ModuleStart
from juggler.driver.core.events import (
    PeersMet,
    RebuildGroup,
    RunnerPlays,
    StartWithFewer,
    TrainingEnds,
    UnreportedUpdate,
    UsedBatch,
)
from juggler.driver.core.ledger import OpenBatch
from juggler.driver.core.module_core import ModuleCore
from juggler.envrunner.envrunner_program import ENVRUNNER
from juggler.runtime.actors.hub import Worker
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts


class TrainedModules:
    """The trained modules: their learners, and weights to begin with.

    An added module goes to the learner process with the fewest modules, and to every worker that
    plays. An EnvRunner's rounds include it once the EnvRunner has it. A removed module gets no
    further requests; when nothing of it is in flight, its books are closed, and all workers forget
    it.
    """

    def __init__(
        self,
        parts: RunParts,
        resume: Checkpoint | None,
        beginning: Mapping[str, FirstWeights],
    ) -> None:
        self._parts, self._config, self._core = parts, parts.config, parts.core
        self._registry, self._commands, self._resume = parts.registry, parts.commands, resume
        self.modules: dict[str, TrainedModule] = {}  # by id
        # By worker id, its own counts of steps, which must agree with the core's ledger
        self.steps: dict[str, Counter[str]] = defaultdict(Counter)
        for module_id in parts.core.modules:
            self._keep(module_id, beginning.get(module_id))

    def add(self, module_id: str, settings_of: str, first: FirstWeights | None) -> None:
        """Train another module from now on; without `first`, with new weights."""
        registry = self._registry
        registry.add(module_id, settings_of)
        # Its first learner begins alone, and further ones join later.
        settings = settings_for(self._config, settings_of, num_learners=1)
        self._core.add(module_id, ModuleStart(settings, late=True))
        self._keep(module_id, first)
        for learner in registry.hosts(module_id):
            for command in self.modules[module_id].begin(learner, seed=0):
                self._commands.send(learner, command)
        self._parts.frozen_parts.add_player(module_id, registry.acting_setup(module_id))

    def learner_ready(self) -> None:
        """Release the resumed state once each module had a learner."""
        if self._resume and all(each.had_learner for each in self.modules.values()):
            self._resume.release_arrays()
            self._resume = None

    def received(self, worker: Worker, module_id: str) -> None:
        """Note that a worker has received an added module."""
        module = self._core.modules.get(module_id)
        if module is None or worker.role != ENVRUNNER:
            return
        key, steps = (worker.worker_id, worker.incarnation), self._registry.most_steps
        self._core.book(RunnerPlays(*key, steps, module_id))
        if module.members:
            self._commands.send_learners(worker, module_id, module.generation)

    def reset(self, module_id: str, seed: int, first: FirstWeights | None) -> None:
        """Give a module other weights and a new optimizer.

        Learners carry out commands in order, so no update is incomplete. Then their group forms
        again, because EnvRunners get the first weights of each generation.
        """
        module = self._core.modules[module_id]
        reset = self.reset_first(module_id, seed, first)
        for learner in self._registry.learners_of(module_id):
            for command in reset.commands(module_id):
                self._commands.send(learner, command)
        for formed in self._core.book(RebuildGroup(module.generation, module_id)):
            self._commands.carry_out(formed)

    def reset_first(self, module_id: str, seed: int, first: FirstWeights | None) -> ModuleReset:
        """Let future learners of a module reset older states."""
        reset = ModuleReset(self._core.modules[module_id].generation + 1, seed, first)
        self.modules[module_id].last_reset = reset
        return reset

    def can_play(self, module_id: str) -> bool:
        """Return whether a module has current learners and all EnvRunners have it."""
        module = self._core.modules.get(module_id)
        if module is None or not module.members or self._parts.frozen_parts.awaited(module_id):
            return False
        return not self.modules[module_id].precede_reset(module.weights_version)

    def remove(self, module_id: str) -> None:
        """Stop training a module; `forget` follows once it is settled."""
        for command in self._core.book(TrainingEnds(module_id)):
            self._commands.carry_out(command)

    def settled(self) -> list[str]:
        """Return modules without open commands, which can be forgotten."""
        settled = [] if self._parts.checkpoints.under_way else self._core.settled
        return [each for each in settled if not self._commands.pool.has_matching(_about(each))]

    def forget(self, module_id: str) -> None:
        """Close the books of a settled module everywhere."""
        registry = self._registry
        self._core.forget(module_id)
        self._parts.frozen_parts.remove_player(module_id)
        for learner in registry.hosts(module_id):
            self._commands.send(learner, training_pb2.RemoveModule(module_id=module_id))
        registry.remove(module_id)
        del self.modules[module_id]

    def _keep(self, module_id: str, first: FirstWeights | None) -> None:
        """Add a module to the tables."""
        resume, module = self._resume, self._core.modules[module_id]
        if resume is not None and is_without(resume, module_id):
            resume = None
        self.modules[module_id] = TrainedModule(self._parts, module, resume, first, self.steps)


def _about(module_id: str) -> Callable[[Any], bool]:
    return lambda command: getattr(command, "module_id", "") == module_id


#: Time limit for learners in a group. They wait longer for a member that hangs
#: (COLLECTIVE_SECONDS).
PEER_SILENCE_SECONDS = 6.0
#: Pause between the report that learners lost each other and another attempt with the same
#: learners. A learner that died has then left.
_REGROUP_SECONDS = 1.0
_MOST_REASONS = 4  # maximum number of learners whose reasons a warning lists
_WARNING_SECONDS = 60.0  # time between two warnings that learners cannot update together


@dataclass(frozen=True, slots=True, eq=False)
class ModuleReset:
    """A reset of a module: other weights, and a new optimizer."""

    generation: int  # of the first group with these weights
    seed: int  # for parameters missing from `first`
    first: FirstWeights | None  # None: new weights

    def commands(self, module_id: str) -> Iterator[Message]:
        """Make the commands for a learner."""
        yield training_pb2.Reset(module_id=module_id, seed=self.seed)
        if self.first is not None:
            yield from begin_commands(module_id, self.first)


class TrainedModule:
    """The driver's state of a module and its learners, except batches."""

    def __init__(
        self,
        parts: RunParts,
        core: ModuleCore,
        resume: Checkpoint | None,
        first: FirstWeights | None,
        steps: dict[str, Counter[str]],
    ) -> None:
        config, registry = parts.config, parts.registry
        self._steps = steps  # see `TrainedModules`
        self._counted: dict[Worker, Counter[str]] = {}  # what `steps` has of each process
        # By learner that is not ready yet: the version of its weights, and a description; "": the
        # state that the run resumes from.
        self._given: dict[Worker, tuple[Version, str]] = {}
        self._lost: tuple[int, float] | None = None  # a generation that cannot update, and the time
        self._why_lost: dict[str, str] = {}  # by worker id, as reported by each member
        self._last_warning = -_WARNING_SECONDS  # time of the last warning
        self._agreed = (0, 0)  # a generation, and the hash of its state
        # Whether there are or were several learners
        self._several = registry.hosting.processes_of(core.module_id) > 1
        # Messages name the module only if there are several.
        several = len(config.module_ids) > 1 or bool(config.agents.league)
        self._of_module = f" of module {core.module_id}" if several else ""
        # State of the EnvRunners' connectors
        self.connectors = connectors_of(resume, first, core.module_id)
        staleness = config.of(registry.trained[core.module_id]).staleness
        self.stale_runners = StaleRunners(staleness.drop_after, core.module_id if several else "")
        self._patience = config.driver.worker_timeout_seconds
        self._waited_since: float | None = None  # start of the wait for the first learners
        self._core, self._registry = core, registry
        self._checkpoints, self._progress = parts.checkpoints, parts.progress
        self._resume = resume
        self.first = first  # their first weights before the first checkpoint; None: new weights
        self.last_reset: ModuleReset | None = None  # last reset of the module; None: never reset

    def begin_with(self, first: FirstWeights) -> None:
        """Set the first weights before there is a learner."""
        self.first = first
        self.connectors = connectors_of(None, first, self._core.module_id)

    def precede_reset(self, version: Version) -> bool:
        """Return whether weights of this version are older than the last reset."""
        return self.last_reset is not None and version.generation < self.last_reset.generation

    def begin(self, learner: Worker, seed: int) -> Iterator[Message]:
        """Make a learner's first commands for the module.

        Before the first checkpoint, all learners get the same first weights. Members that are
        further ahead hand over their state when they meet. If no member is left, the learner may
        have kept its own weights.
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
        elif self.first is not None:
            yield from begin_commands(module.module_id, self.first)

    @property
    def had_learner(self) -> bool:
        """Whether a learner of this module has ever been ready."""
        return bool(self._registry.meeting_points.get(self._core.module_id))

    def _state_for(self, learner: Worker) -> Checkpoint | None:
        if not self.had_learner:
            if self._resume is not None:
                known = self._resume.version_of(self._core.module_id)
                self._given[learner] = Version(*known), ""
            return self._resume
        state, problems = self._checkpoints.newest_good()
        for problem in problems:
            self._progress.message(problem, "error")
        if state is not None and is_without(state, self._core.module_id):
            state = None
        at_first = self.first.text if self.first else "new weights"
        known = (0, 0) if state is None else state.version_of(self._core.module_id)
        given = at_first if state is None else f"update {known[1]}"
        self._given[learner] = Version(*known), given
        return state

    def reset_again(self, learner: Worker, ready: training_pb2.ModuleReady) -> Iterator[Message]:
        """Yield commands for a learner whose state precedes the last reset."""
        reset, (version, given) = self.last_reset, self._given.get(learner, (self._newest, ""))
        if reset and self.precede_reset(version) and not ready.HasField("handed_over"):
            self._given[learner] = version, given and "its last reset"
            yield from reset.commands(self._core.module_id)

    def ready(self, learner: Worker, ready: training_pb2.ModuleReady) -> Iterator[UnreportedUpdate]:
        """Handle a learner that has its first weights.

        Yields:
            Updates from before it was lost, which may be unreported. Book each in the core before
            taking the next one.
        """
        version, given = self._given.pop(learner, (self._newest, ""))
        if ready.HasField("handed_over"):
            before = self._core.ledger.trained
            for done in ready.last_updates:
                version, used = Version.of(done.version), used_batches(done)
                yield UnreportedUpdate(learner.worker_id, version, used, self._core.module_id)
            # The caller has booked these updates by now.
            trained = self._core.ledger.trained - before
            self._steps[learner.worker_id].update(trained=trained, dropped=0)
            weights = f"its weights{self._of_module} of update {ready.handed_over.update}"
            text = f"{learner.worker_id} is back with {weights}"
            unreported = f", and with {trained} unreported steps trained on"
            self._progress.message(text + (unreported if trained else ""), "info")
        elif given and not self._core.members and version.update < self._newest.update:
            lost = f"the learners' weights{self._of_module} are lost"
            text = f"{lost}: {learner.worker_id} continues from {given}"
            self._progress.message(text, "warning")

    def to_begin_with_fewer(self) -> StartWithFewer | None:
        """Return the event that begins with fewer learners, after a wait."""
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
        # Fewer learners train too, only slower.
        late = _counted(missing) + self._of_module
        text = f"{late} did not connect within {self._patience:.0f} s: the run begins "
        self._progress.message(text + "without them, and admits them when they connect", "warning")
        return StartWithFewer(self._core.module_id)

    @property
    def _newest(self) -> Version:
        return Version(self._core.generation, self._core.weights_version.update)

    def met(self, worker: Worker, formed: training_pb2.GroupFormed) -> PeersMet | None:
        """Handle that a member has met its group; None: no event."""
        if formed.generation != self._core.generation:
            return None
        if formed.peer_lost:
            self.lost(formed.generation, worker.worker_id, formed.peer_lost)
            return None
        generation, state_hash = self._agreed
        if generation == formed.generation and state_hash != formed.state_hash:
            raise ValueError("another state than the other learners of its group")
        self._agreed = (formed.generation, formed.state_hash)
        # The first member's answer stands for the group.
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
        """Note that a member of this generation cannot update with the others."""
        if generation != self._core.generation:
            return
        if self._lost is None:
            self._lost, self._why_lost = (generation, time.monotonic()), {}
        self._why_lost[worker_id] = why

    def to_meet_again(self) -> RebuildGroup | None:
        """Return the event that re-forms a group whose members are disconnected."""
        if self._lost is None or time.monotonic() - self._lost[1] < _REGROUP_SECONDS:
            return None
        generation, self._lost = self._lost[0], None
        if generation == self._core.generation:
            self._warn_of_loss(generation)
        return RebuildGroup(generation, self._core.module_id)

    def _warn_of_loss(self, generation: int) -> None:
        now = time.monotonic()
        if now - self._last_warning < _WARNING_SECONDS:
            return
        self._last_warning = now
        reasons = [f"{name}: {text}" for name, text in sorted(self._why_lost.items())]
        why = "; ".join(reasons[:_MOST_REASONS])
        if (more := len(reasons) - _MOST_REASONS) > 0:
            why += f"; {more} more have lost each other"
        self._progress.message(
            f"learner group {generation}{self._of_module} cannot update together, although all of "
            f"its learners are attached: {why}. It is formed again, and its batches are "
            "dropped. Learners dial each other at the addresses that --bind or --advertise give; "
            "with TLS, certificates must name these",
            "warning",
        )

    def updated(self, learner: Worker, done: training_pb2.UpdateDone) -> None:
        counted = Counter(trained=done.steps_trained, dropped=done.steps_dropped)
        self._steps[learner.worker_id].update(counted)
        self._steps[learner.worker_id].subtract(self._counted.get(learner, {}))
        self._counted[learner] = counted
        if done.peer_lost:
            self.lost(done.version.generation, learner.worker_id, done.peer_lost)

    def left(self, learner: Worker) -> None:
        """Forget a lost learner: its next process counts from zero."""
        self._given.pop(learner, None)
        self._counted.pop(learner, None)


def _counted(missing: int) -> str:
    return f"{missing} more learner{'s' * (missing > 1)}"


def used_batches(done: training_pb2.UpdateDone) -> tuple[UsedBatch, ...]:
    """Return the batches of an update, as the core books them."""
    return tuple(
        UsedBatch(batch.batch_id, batch.live_steps, batch.staleness, batch.dropped)
        for batch in done.batches
    )


_FEWEST = 5  # minimum number of stale batches for a warning
_MOST = 80  # number of batches after which older ones count for half
_MUCH = 0.2  # share of the steps of one EnvRunner
_CHANGE = 0.3


class StaleRunners:
    """Warns of EnvRunners whose steps are often dropped as stale."""

    def __init__(self, max_staleness: int, module_id: str = "") -> None:
        self._max_staleness = max_staleness
        self._of_module = f" for module {module_id}" if module_id else ""
        # By worker id: its last batches, stale ones among them, their steps, and stale steps
        self._lately: dict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
        self._shown: dict[str, float] = {}  # the share in the last warning, by worker id

    def answered(self, used: Iterable[UsedBatch], updating: Mapping[int, OpenBatch]) -> None:
        """Count batches of an answer that is not booked yet."""
        for each in used:
            if (batch := updating.get(each.batch_id)) is not None:
                stale = batch.steps if each.dropped == "stale" else 0
                self._count(batch.runner.worker_id, batch.steps, stale)

    def brought(self, worker_id: str, stale_steps: int) -> None:
        """Count steps that a gateway dropped as too old."""
        if stale_steps:
            self._count(worker_id, stale_steps, stale_steps)

    def _count(self, worker_id: str, steps: int, stale: int) -> None:
        lately = self._lately[worker_id]
        lately += (1, stale > 0, steps, stale)
        if lately[0] >= _MOST:
            lately /= 2

    def left(self, worker_id: str) -> None:
        self._lately.pop(worker_id, None)
        self._shown.pop(worker_id, None)

    def check(self) -> list[str]:
        """Return warnings of EnvRunners with a new share."""
        texts = []
        for worker_id, (_, stale_batches, steps, stale) in self._lately.items():
            share, shown = float(stale / max(1.0, steps)), self._shown.get(worker_id)
            is_new = shown is None and stale_batches >= _FEWEST and share >= _MUCH
            if is_new or (shown is not None and abs(share - shown) >= _CHANGE):
                self._shown[worker_id] = share
                texts.append(self._text(worker_id, share))
        return texts

    def _text(self, worker_id: str, share: float) -> str:
        dropped = (
            f"{share:.0%} of the recent steps of {worker_id}{self._of_module} were dropped as stale"
        )
        if share < _MUCH:
            return f"{dropped}: it is fast enough again"
        return (
            f"{dropped}: more than max_staleness = {self._max_staleness} updates were made while "
            "it sampled. Raise max_staleness, or give it fewer environments or a faster host"
        )
