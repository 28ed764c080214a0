"""Saves the states of driver and learners, and restores them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from juggler.driver.agent_tables import trained_now
from juggler.driver.checkpoint.first_weights import FirstWeights
from juggler.driver.config import RunConfig
from juggler.driver.core.core_state import ModuleSettings, ModuleStart, RemovedModules
from juggler.driver.core.driver_core import DriverCore
from juggler.driver.core.ledger import Count, Counters, LedgerError
from juggler.driver.driver_config import REQUESTS_PER_RUNNER, UPDATES_IN_FLIGHT
from juggler.driver.module_placement import ModulePlacement
from juggler.driver.reporting.metrics import (
    RETURN_WINDOW,
    Candidates,
    Episodes,
    Metrics,
)
from juggler.driver.run_end import Times
from juggler.driver.workers.command_sender import ConnectorState
from juggler.driver.workers.module_setups import spaces_of_environment
from juggler.runtime.checkpoints.checkpoint import (
    CONNECTORS,
    PIPELINES,
    Checkpoint,
    CheckpointError,
    adopt,
    newest_good,
    write,
)
from juggler.runtime.checkpoints.weights import playing_trees
from juggler.runtime.connectors.mergeable_state import State, connector_branch, connector_state
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.wire.frames import FrameReader, encode_frame
from juggler.runtime.wire.trees import Tree, flatten
from juggler.runtime.wire.v1 import training_pb2

if TYPE_CHECKING:
    from juggler.driver.run_parts import RunParts


def core_of(config: RunConfig, resume: Checkpoint | None) -> DriverCore:
    """Make a core that continues a checkpoint's books."""
    trained = trained_now(config, resume.counters if resume else None)
    together = config.agents.trained_together
    hosting = ModulePlacement(config, trained)
    starts = {}
    for module_id, settings_of in trained.items():
        settings = settings_for(config, settings_of, hosting.processes_of(module_id))
        starts[module_id] = ModuleStart(settings)
        if resume is not None and not is_without(resume, module_id):
            books = books_in(resume, module_id)
            starts[module_id] = ModuleStart(settings, *resume.version_of(module_id), books)
    stop_steps = config.driver.stop_steps
    if resume is None:
        return DriverCore(starts, 1, together, stop_steps=stop_steps)
    # A league may have removed modules that shared parts.
    there = [[each for each in ids if each in trained] for ids in together]
    past = past_in(resume, trained)
    next_id = resume.counters["next_id"]
    return DriverCore(starts, next_id, filter(None, there), past, stop_steps)


def settings_for(config: RunConfig, settings_of: str, num_learners: int) -> ModuleSettings:
    """Return a module's limits on requests and updates, from the configured `settings_of`."""
    of_module = config.of(settings_of)
    return ModuleSettings(
        batch_size=of_module.learner.batch_size,
        max_open_updates=of_module.staleness.open_updates,
        weights_interval=of_module.learner.weights_interval,
        requests_per_runner=REQUESTS_PER_RUNNER,
        max_updates_in_flight=UPDATES_IN_FLIGHT,
        num_learners=num_learners,
        synchronous=config.driver.synchronous,
        num_runners=config.driver.num_env_runners,
        waited_for=config.waits_for(settings_of),
    )


def is_without(checkpoint: Checkpoint, module_id: str) -> bool:
    """Return whether a checkpoint is older than a module."""
    return bool(checkpoint.config.get("league")) and module_id not in checkpoint.module_ids


def metrics_of(resume: Checkpoint | None) -> Metrics:
    """New metrics, or a checkpoint's."""
    metrics = Metrics()
    if resume is not None:
        counters = resume.counters
        metrics.episodes_ended(counters["returns"], counters["lengths"])
        metrics.episodes = counters["episodes"]
        for module_id, ended in counters.get("by_module", {}).items():
            metrics.of(module_id).episodes_ended(ended["returns"], ended["lengths"])
            metrics.of(module_id).episodes = ended["episodes"]
        for agent, ended in counters.get("by_agent", {}).items():
            metrics.of_agent(agent).episodes_ended(ended["returns"])
            metrics.of_agent(agent).episodes = ended["episodes"]
        # Older checkpoints lack some of these.
        metrics.candidates = Candidates(**counters.get("candidates", {}))
        for module_id, steps in counters.get("played", {}).items():
            metrics.of(module_id).played = steps
        trained_for = counters.get("training_time", counters["wall_time"])
        metrics.continue_from(trained_for, counters["trained"])
    return metrics


def connectors_of(
    resume: Checkpoint | None, first: FirstWeights | None = None, module_id: str = DEFAULT_MODULE
) -> ConnectorState:
    """Return what a module's connectors have learned so far."""
    if resume is not None:
        return ConnectorState(connector_state(resume, module_id))
    return ConnectorState(first.learned if first else {})


def checkpoint_tree(
    states: Mapping[str, Mapping[str, Tree]], connectors: Mapping[str, State]
) -> dict[str, Tree]:
    """Build the tree of a checkpoint.

    A learner calls its module "default"; in the checkpoint it has its id. Other branches of its
    state, as a user's own core may have, are named "module:name" there, unless the module is
    itself called "default".
    """
    tree: dict[str, Tree] = {}
    pipelines: dict[str, Tree] = {}
    for module_id, state in states.items():
        for key, branch in state.items():
            if key == PIPELINES and isinstance(branch, Mapping):
                pipelines[module_id] = branch.get(DEFAULT_MODULE, {})
                continue
            own = key if module_id == DEFAULT_MODULE else f"{module_id}:{key}"
            name = module_id if key == DEFAULT_MODULE else own
            if name in tree:
                raise ValueError(f"the states of two modules have a branch {name!r}")
            tree[name] = branch
    if pipelines:
        tree[PIPELINES] = pipelines
    # EnvRunners' connectors are not part of a learner's state.
    if learned := connector_branch(connectors):
        tree[CONNECTORS] = learned
    return tree


def restore_commands(module_id: str, checkpoint: Checkpoint) -> Iterator[training_pb2.Restore]:
    """Make the commands that restore a module from a checkpoint."""
    checkpoint.module_id(module_id)
    extra = checkpoint.modules.get(module_id, {}).get("extra", {})
    return restores(module_id, learner_state(module_id, checkpoint), extra)


def learner_state(module_id: str, checkpoint: Checkpoint) -> dict[str, Tree]:
    """Return a module's state as `Learner.restore` takes it."""
    state: dict[str, Tree] = {}
    for name, branch in checkpoint.tree.items():
        key = _key_of_learner(name, module_id, checkpoint)
        if key == PIPELINES and isinstance(branch, Mapping):
            if module_id in branch:
                state[key] = {DEFAULT_MODULE: branch[module_id]}
        elif key is not None:
            state[key] = branch
    return state


def _key_of_learner(name: str, module_id: str, checkpoint: Checkpoint) -> str | None:
    """Return a branch's name at the learner, or None for other modules."""
    if name in (module_id, PIPELINES):
        return DEFAULT_MODULE if name == module_id else name
    if name == CONNECTORS or name in checkpoint.module_ids:
        return None
    owner, colon, key = name.partition(":")
    if colon and owner in checkpoint.module_ids and owner != DEFAULT_MODULE:
        return key if owner == module_id else None
    return name if module_id == DEFAULT_MODULE else None


def begin_commands(module_id: str, first: FirstWeights) -> Iterator[training_pb2.Restore]:
    """Make the commands that give a module weights from elsewhere."""
    return restores(
        module_id,
        {DEFAULT_MODULE: first.weights},
        {},
        last=training_pb2.Restore(
            weights=True,
            whole=first.whole,
            source=first.source,
            selectable=first.selectable,
        ),
    )


def restores(
    module_id: str,
    tree: Mapping[str, Tree],
    extra: Mapping[str, Any],
    last: training_pb2.Restore | None = None,
) -> Iterator[training_pb2.Restore]:
    """Make commands that carry a state; `last` adds fields to the last."""
    header = training_pb2.StateHeader(module_id=module_id, extra=json.dumps(dict(extra)))
    # Arrays are aligned in the payload, which makes it larger than their sum.
    state_bytes = sum(array.nbytes + 64 for _, array in flatten(tree))
    # One chunk at a time: a replay is large.
    for chunk, following in pairwise(chain(encode_frame(header, tree, digest=True), (None,))):
        part = training_pb2.Restore(module_id=module_id, chunk=chunk, state_bytes=state_bytes)
        state_bytes = 0  # only the first command has the size
        if following is None:
            part.MergeFrom(last or training_pb2.Restore())
            part.last = True
        yield part


_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Returns = Annotated[list[float], msgspec.Meta(max_length=RETURN_WINDOW)]
_Lengths = Annotated[list[Count], msgspec.Meta(max_length=RETURN_WINDOW)]


@dataclass(frozen=True)
class _SavedRemovedModules(Counters):
    """Books of removed modules, and the sums of their versions."""

    version: tuple[Count, Count]


@dataclass(frozen=True)
class _OfAgent:
    """The episodes in which an agent acted."""

    episodes: Count
    returns: _Returns


@dataclass(frozen=True)
class _OfModule(_OfAgent):
    """Episodes of a module's agents, or of the run."""

    lengths: _Lengths


@dataclass(frozen=True)
class _Saved(_OfModule, Counters):
    """The driver's share of a checkpoint, made by `counters_of`."""

    next_id: Count
    wall_time: _Seconds
    training_time: _Seconds = 0.0  # older ones have none
    candidates: Candidates = field(default_factory=Candidates)  # older ones have none
    by_module: dict[str, _OfModule] = field(default_factory=dict)  # with several agents
    by_agent: dict[str, _OfAgent] = field(default_factory=dict)  # also with several agents
    played: dict[str, Count] = field(default_factory=dict)  # steps by modules that are not trained
    league: dict[str, Any] = field(default_factory=dict)  # see `League.to_state`
    copies: dict[str, str] = field(default_factory=dict)  # digests of the league's copies, by id
    resets: dict[str, Count] = field(default_factory=dict)  # see `agent_tables.RESETS`
    values: dict[str, dict[str, float | None]] = field(default_factory=dict)  # see `ChangedValues`
    past: _SavedRemovedModules | None = None  # if modules have come and gone


def must_be_sound(checkpoint: Checkpoint) -> None:
    """Check that a run can continue from a checkpoint's counters."""
    path, what = checkpoint.path or Path(), "its counters"
    try:
        saved = msgspec.convert(checkpoint.counters, _Saved)
        saved.check()
        books: list[Counters] = [saved.past] if saved.past else []
        for each in books:
            each.check()
        for module_id in checkpoint.module_ids:
            what = f"the counters of module {module_id!r}"
            books.append(books_in(checkpoint, module_id))
            books[-1].check()
    except (msgspec.ValidationError, LedgerError) as error:
        # A run that continued from unbalanced books would fail at its first line.
        raise CheckpointError(path, f"{what} are invalid: {error}") from None
    added, together = Counters.sum(books), Counters.sum([saved])
    if added != together:
        raise CheckpointError(
            path, f"the counters of its modules add up to {added}, and its own are {together}"
        )


def books_of(counters: Counters) -> dict[str, Any]:
    """Return books in a checkpoint's format."""
    return {**asdict(counters), "dropped": dict(counters.dropped)}


def counters_of(
    books: Iterable[Counters], past: RemovedModules, next_id: int, metrics: Metrics, times: Times
) -> dict[str, Any]:
    """Make the driver's share of a checkpoint; `past`: of modules outside it."""
    before = {**books_of(past.counters), "version": past.version}
    return {
        **books_of(Counters.sum([*books, past.counters])),
        **({"past": before} if past != RemovedModules() else {}),
        "next_id": next_id,
        "wall_time": times.wall,
        "training_time": times.training,
        # The mean return continues from the last episodes.
        **_ended(metrics),
        "lengths": list(metrics.lengths),
        "by_module": {
            name: {**_ended(each), "lengths": list(each.lengths)}
            for name, each in metrics.by_module.items()
            if each.episodes
        },
        "by_agent": {name: _ended(each) for name, each in metrics.by_agent.items()},
        "candidates": asdict(metrics.candidates),
        "played": {name: each.played for name, each in metrics.by_module.items() if each.played},
    }


def _ended(of: Episodes) -> dict[str, Any]:
    return {"episodes": of.episodes, "returns": list(of.returns)}


def books_in(checkpoint: Checkpoint, module_id: str) -> Counters:
    """Return a module's books in a sound checkpoint."""
    return msgspec.convert(checkpoint.counters_of(module_id), Counters)


def past_in(checkpoint: Checkpoint, trained: Container[str]) -> RemovedModules:
    """Return the books of modules that are no longer trained."""
    saved = msgspec.convert(checkpoint.counters, _Saved).past
    past = (
        RemovedModules(Counters.sum([saved]), Version(*saved.version))
        if saved
        else RemovedModules()
    )
    for module_id in checkpoint.modules:
        if module_id not in trained:
            version = Version(*checkpoint.version_of(module_id))
            past = past.and_of(books_in(checkpoint, module_id), version)
    return past


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
        """Absolute path of the checkpoint; "" without one."""
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


def state_reader() -> FrameReader[training_pb2.StateHeader]:
    """Make a reader for the answers to one Snapshot."""
    return FrameReader(training_pb2.StateHeader, _STATE_LIMIT, digests=True)


class Checkpoints:
    """Asks a learner of each module for its state, and writes them.

    Asynchronously, the clock decides when, and training continues. In synchronous mode,
    checkpoints are taken between turns, at multiples of `checkpoint_updates`, and the next turn
    waits until the checkpoint is on the disk. Then all workers restart as in a resumed run,
    without any state that the checkpoint does not hold. So both runs give the same numbers.
    """

    def __init__(
        self,
        parts: RunParts,
        directory: Path,
        written: Callable[[SnapshotWritten], object],
        newest: Path | None,
    ) -> None:
        self.newest = newest  # the newest checkpoint that this run wrote
        self.writing = False  # all of a snapshot has arrived
        self.suspended = False  # no checkpoints are written, because another run has the directory
        self._parts, self._directory, self._written = parts, directory, written
        self._last = parts.core.updates_before  # its checkpoint exists
        self._aside = ""  # where the current snapshot is written
        self._cuts: dict[str, _ModuleCut] = {}  # by module id; {}: the snapshot was abandoned
        self._asked: dict[str, str] = {}  # by module id, the learner that still sends its state
        self._counters: dict[str, Any] = {}
        self._past = RemovedModules()  # books of modules outside the snapshot

    @property
    def under_way(self) -> bool:
        """Whether a learner is sending a snapshot, or one is being written."""
        return self.writing or bool(self._asked)

    @property
    def waits_for(self) -> list[str]:
        """The modules without a learner, which prevent checkpoints."""
        return [each.module_id for each in self._parts.core.in_checkpoints() if not each.members]

    def holds_up(self, update: int) -> bool:
        """Begin a due checkpoint; return whether the next turn has to wait."""
        parts, modules = self._parts, self._parts.core.modules.values()
        if self.under_way or not all(module.members for module in modules):
            return True
        # Each round makes one update of every module.
        rounds = max(module.weights_version.update for module in modules)
        every = parts.config.driver.checkpoint_updates
        if self.suspended or rounds % every or update == self._last:
            return False
        self._last = update
        parts.commands.restart_runners(update)
        for module in modules:
            for member in module.members[1:]:
                seed = parts.registry.seed(parts.registry.ready[member], update=update)
                anew = training_pb2.BeginAnew(module_id=module.module_id, seed=seed)
                parts.commands.send_to(member, anew)
        return self.begin(restarts_at=update)

    def begin(self, aside: str = "", restarts_at: int | None = None) -> bool:
        """Ask each module's first learner for its state, if possible.

        Modules that were just added are left out; so are leaving modules, unless they are needed.
        """
        parts, league = self._parts, self._parts.league
        modules = parts.core.in_checkpoints(league.needed() if league else ())
        if self.suspended or self.under_way or not modules:
            return False
        if not all(module.members for module in modules):
            return False
        self._aside = aside
        ids = [module.module_id for module in modules]
        self._cuts = {
            each: _ModuleCut(parts.registry.trained[each], state_reader()) for each in ids
        }
        # All members of a group have the same state.
        self._asked = {module.module_id: module.members[0] for module in modules}
        for module_id, worker_id in self._asked.items():
            command = training_pb2.Snapshot(module_id=module_id)
            if restarts_at is not None:
                learner = parts.registry.ready[worker_id]
                command.seed = parts.registry.seed(learner, update=restarts_at)
            parts.commands.send_to(worker_id, command)
        return True

    def add_chunk(self, module_id: str, chunk: bytes, last: bool) -> None:
        """Add the next chunk of a module's state.

        A learner's answers arrive in order: at the first chunk, the module's books have exactly
        the updates that the state has. So the books are copied at that moment.
        """
        if not self._cuts:  # abandoned, and another module's learner still sends
            if last:
                self._asked.pop(module_id, None)
            return
        cut, parts = self._cuts[module_id], self._parts
        # Only at the first chunk: later ones may follow later updates.
        if cut.counters is None:
            cut.counters = parts.core.module(module_id).ledger.counters()
            cut.connectors = parts.modules[module_id].connectors.merged
            cut.spaces = spaces_of_environment(parts.registry.spaces[module_id])
            books = [each.counters for each in self._cuts.values() if each.counters is not None]
            # The run's own counters are copied with the module that begins last.
            self._past = parts.core.past_and(beside=self._cuts)
            times = parts.clock.now()
            counters = counters_of(books, self._past, parts.core.next_id, parts.metrics, times)
            league = parts.league.counters() if parts.league else {}
            self._counters = {**counters, **league, **parts.values.to_state()}
        frame = cut.reader.feed(chunk)
        if frame is None:
            return
        assert isinstance(frame.tree, dict)
        cut.header, cut.state = frame.header, frame.tree
        del self._asked[module_id]
        if self._asked:
            return
        # All of it is here.
        checkpoint = self._whole()
        self._cuts = {}
        self.writing = True
        # In a thread, because the driver's loop must not wait for the disk.
        threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint").start()

    def abandon(self, module_id: str) -> None:
        """Abandon a module's state, and with it an unfinished snapshot."""
        if self._asked.pop(module_id, None) is not None:
            self._cuts = {}

    def left(self, worker_id: str) -> None:
        """Abandon the states that a lost learner was sending."""
        for module_id in [each for each, asked in self._asked.items() if asked == worker_id]:
            self.abandon(module_id)

    def done(self, written: SnapshotWritten) -> None:
        self.writing = False
        if not written.aside:
            self.newest = written.path or self.newest

    def newest_good(self) -> tuple[Checkpoint | None, list[str]]:
        """Return this run's newest whole checkpoint, and problems of newer ones."""
        if self.newest is None:
            return None, []
        try:
            return newest_good(self._directory)
        except CheckpointError as error:
            return None, [str(error)]

    def keep(self, candidate: Path) -> str:
        """Make a candidate the newest checkpoint; return what prevents it, or ""."""
        try:
            keep = self._parts.config.driver.keep_checkpoints
            self.newest = adopt(candidate, self._directory, keep)
        except CheckpointError as error:
            return str(error)
        self.discard_aside(candidate.parent.name)
        return ""

    def discard_aside(self, aside: str) -> None:
        """Remove a state set aside, unless it is still being written."""
        if not (self.under_way and self._aside == aside):
            shutil.rmtree(self._directory.with_name(aside), ignore_errors=True)

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
            # A player of a league has the settings of a configured module.
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
            config=self._parts.config.flat(),
            spaces=only["spaces"] if len(modules) == 1 else {},
        )

    def _write(self, checkpoint: Checkpoint) -> None:
        aside = self._aside
        try:
            place = self._directory.with_name(aside) if aside else self._directory
            keep = 1 if aside else self._parts.config.driver.keep_checkpoints
            path = write(place, checkpoint, keep)
        except CheckpointError as error:
            self._written(SnapshotWritten(None, str(error), aside))
        except BaseException as error:
            # Reported first: without this event the run would wait for the checkpoint.
            self._written(SnapshotWritten(None, f"no checkpoint: {error!r}", aside))
            raise
        else:
            (generation, update), steps = checkpoint.version, checkpoint.counters["trained"]
            playing = playing_trees(checkpoint) if aside else {}
            written = SnapshotWritten(path, "", aside, update, steps, generation, playing)
            self._written(written)
