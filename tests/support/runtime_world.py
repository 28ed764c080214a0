"""A run in simulated time, above the sockets.

The hub, attachments, the driver's loop and its books of workers, EnvRunners with their deliveries,
and the way in which learners meet are those of the package. What carries messages, environments
and a learner's computations are simulated. A history is drawn from a seed. When something that
must hold does not, a `Violation` has the seed and what happened last.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from juggler.driver.config import RunConfig
from juggler.driver.core import events
from juggler.driver.loop import Loop
from juggler.driver.reporting.wording import Progress
from juggler.driver.run_end import RunClock
from juggler.driver.run_parts import RunParts
from juggler.driver.workers.trained_modules import PEER_SILENCE_SECONDS
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.envrunner import envrunner_worker, learner_streams
from juggler.envrunner.rounds import PlayedRound, TrainedResult
from juggler.learner.group import peers
from juggler.learner.group.peers import PeerLost, Peers
from juggler.learner.learner import Learner
from juggler.learner.process import hosted_module as membership
from juggler.learner.process.hosted_module import HostedModule, Membership
from juggler.runtime.actors import attachment, hub
from juggler.runtime.actors.attachment import AttachError, Contact
from juggler.runtime.actors.hub import Hub, HubSettings, Mailbox, WorkerLeft
from juggler.runtime.actors.worker import CommandLoop
from juggler.runtime.episodes.version import DEFAULT_MODULE, Version
from juggler.runtime.streams.weights_stream import Weights
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2, training_pb2
from support.simulation import (
    BY_PROCESS,
    STARTED,
    Line,
    Process,
    SimulatedLoop,
    Simulation,
    Violation,
    Worker,
    active,
    me,
    simulated,
    simulated_modules,
)
from support.workers_world import ready_message

ROWS, STEPS = 2, 10
SPACE = spaces_pb2.Space(discrete=spaces_pb2.DiscreteSpace(n=2, dtype=5))
HEARTBEAT, SILENCE = 2.0, 10.0
#: A worker that could not say anything for so long may be lost.
EXCUSED = 3.0
#: Within so long after the last fault, all is as it should be.
HEALED = 50.0


@dataclass(frozen=True)
class History:
    """What may happen.

    Attributes:
        runners: number of EnvRunners.
        learners: of the module.
        faults: number of faults, drawn from `kinds`.
        kinds: names of methods of `RuntimeWorld`.
        duplicates: share of messages from workers that come twice.
        slow_saves: the most seconds that a learner takes to save its state.
        batch_size: of an update.
        hang: seconds without progress after which a worker is lost.
    """

    runners: int = 2
    learners: int = 1
    faults: int = 4
    kinds: tuple[str, ...] = ()
    duplicates: float = 0.0
    slow_saves: float = 0.1
    batch_size: int = 20
    hang: float = 20.0


class RuntimeWorld:
    """One history."""

    def __init__(self, simulation: Simulation, history: History, directory: Path) -> None:
        self.simulation, self.random, self.history = simulation, simulation.random, history
        self.happened: deque[str] = deque(maxlen=40)
        self.driver = Process("driver")
        self.workers: dict[str, Worker] = {}  # by worker id, those whose process runs
        self.by_incarnation: dict[str, Worker] = {}
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.partitioned: dict[str, float] = {}  # worker id -> until when
        self.lines: list[Line] = []
        self.books = _Books()
        self._closing = False
        loop = SimulatedLoop(simulation, self.driver)
        self._mailbox: Mailbox[Any] = Mailbox()
        settings = HubSettings(
            run_id="run",
            roles=("envrunner", "learner", "evaluator"),
            heartbeat_seconds=HEARTBEAT,
            silence_seconds=SILENCE,
            hang_seconds=history.hang,
        )
        self.hub = Hub(settings, self._mailbox, loop)
        loop.create_task(self.hub.watch())
        self.asyncio_loop = loop
        config = _config(history)
        self.parts = RunParts(
            config,
            self.hub,
            cast(Any, self),
            Progress(),
            RunClock(0.0),
            directory,
            directory,
            lambda _: None,
            only_local=True,
        )
        if history.learners > 1:
            self.hub.lose_after("learner", PEER_SILENCE_SECONDS)
        self._worker_events = WorkerEvents(self.parts)
        periodic_work = SimpleNamespace(at_steps=lambda: None)
        nothing = cast(Any, None)
        self._loop = Loop(
            self.parts, self._worker_events, self._mailbox, cast(Any, periodic_work), nothing
        )
        self.core = self.parts.core
        self._watch_books()
        put = self._mailbox.put
        self._turn_comes = False

        def came(event: Any) -> None:
            put(event)
            self._drive_within(0.0)

        self._mailbox.put = came  # type: ignore[method-assign]
        self._drive_within(0.5)
        for role, count in (("learner", history.learners), ("envrunner", history.runners)):
            for index in range(count):
                self.start(role, index)

    # -- the run ---------------------------------------------------------------------------------

    def play(self) -> None:
        """Let faults happen, and look whether the run is healthy after them."""
        simulation, history = self.simulation, self.history
        simulation.run(20.0, lambda: self.core.trained)
        for _ in range(history.faults):
            simulation.run(self.random.uniform(0.0, 6.0))
            kind = self.random.choice(history.kinds)
            self.note(kind)
            getattr(self, kind)()
        simulation.run(self._until_quiet())
        self.note("no more faults")
        before = self.core.trained
        wanted = before + 3 * history.batch_size
        healed = HEALED + 12 * history.slow_saves
        if not simulation.run(healed, lambda: self.core.trained >= wanted and not self._waits()):
            raise Violation(
                f"the run stands still: {self.core.trained - before} steps. {self._waits()}"
            )
        if self.parts.end.reached:
            raise Violation(f"the run has ended: {self.parts.end.reason}")

    def _waits(self) -> str:
        """Which EnvRunner has brought nothing for long."""
        waiting = self.parts.commands.pool.waiting(training_pb2.SampleRequest)
        return ", ".join(w.worker_id for w, (_, s) in waiting.items() if s > HEALED / 2)

    def _until_quiet(self) -> float:
        return (
            max([0.0, *(until - self.simulation.now for until in self.partitioned.values())]) + 0.1
        )

    def _drive_within(self, seconds: float) -> None:
        if not self._turn_comes:
            self._turn_comes = seconds == 0.0
            self.simulation.at(seconds, self._drive, self.driver)

    def _drive(self) -> None:
        """A turn of the driver's loop."""
        came, self._turn_comes = self._turn_comes, False
        loop = self._loop
        loop.gather(0.0)
        loop.issue_updates()
        loop.finish_updates()
        if not self.parts.end.reached:
            loop.top_up()
        self.core.counters().check()
        if not came:
            self._drive_within(0.5)

    def note(self, text: str) -> None:
        self.happened.append(f"{self.simulation.now - STARTED:.2f} {text}")

    # -- faults ----------------------------------------------------------------------------------

    def a_worker_is_killed(self) -> None:
        worker = self._any()
        worker.excuse("killed")
        self.end(worker)

    def a_learner_is_killed(self) -> None:
        worker = self._any("learner")
        worker.excuse("killed")
        self.end(worker)

    def a_connection_breaks(self) -> None:
        worker = self._any()
        worker.excuse("its connection broke")
        worker.line and worker.line.break_off()

    def a_worker_stands_still(self) -> None:
        worker, seconds = self._any(), self.random.choice([0.5, 2.5, 8.0, 25.0])
        self._stands_still(worker.process, seconds)

    def an_environment_hangs(self) -> None:
        """Until the driver misses its progress."""
        worker = self._any("envrunner")
        worker.excuse("its environment hangs")
        worker.hangs = True

    def the_driver_stands_still(self) -> None:
        for line in self.lines:  # whose answers it does not read before it runs again
            line.ping()
        self._stands_still(self.driver, self.random.choice([1.0, 9.0, 31.0]))

    def the_network_is_cut_for_a_while(self) -> None:
        """Messages to and from a host come late."""
        worker, seconds = self._any(), self.random.choice([0.5, 2.0, 5.0, 12.0])
        if seconds >= EXCUSED - HEARTBEAT:
            worker.excuse("its network was cut")
        self.partitioned[worker.worker_id] = self.simulation.now + seconds

    def the_wall_clock_jumps(self) -> None:
        self.simulation.wall += self.random.choice([-3600.0, 3600.0])

    def a_stream_of_batches_breaks(self) -> None:
        for sender in self._any("envrunner").senders:
            sender.break_off()

    def _stands_still(self, process: Process, seconds: float) -> None:
        if process.stopped:
            return
        worker = next((w for w in self.workers.values() if w.process is process), None)
        if worker is not None and seconds >= EXCUSED - HEARTBEAT:
            worker.excuse("it stood still")
            for other in self.workers.values():  # one of its group may wait for it
                if worker.role == other.role == "learner":
                    other.excuse("another one stood still")
        self.simulation.stop(process)
        self.simulation.run(seconds)
        if worker is not None and seconds > 2 * SILENCE and worker in self.workers.values():
            raise Violation(f"the driver does not miss {worker.worker_id}")
        if process.alive:
            self.note(f"{process.name} runs again after {seconds} s")
            self.simulation.resume(process)

    def _any(self, role: str = "") -> Worker:
        ids = sorted(each for each in self.workers if each.startswith(role))
        if not ids:
            self.simulation.run(20.0, lambda: any(each.startswith(role) for each in self.workers))
            return self._any(role)
        return self.workers[self.random.choice(ids)]

    # -- processes -------------------------------------------------------------------------------

    def start(self, role: str, index: int) -> None:
        worker = (_Runner if role == "envrunner" else _Learner)(self, role, index)
        BY_PROCESS[id(worker.process)] = worker
        self.workers[worker.worker_id] = self.by_incarnation[worker.incarnation] = worker
        self.simulation.thread(partial(self._live, worker), worker.process)

    def end(self, worker: Worker) -> None:
        """The process ends, however; the next one starts soon."""
        if not worker.process.alive:
            return
        self.simulation.kill(worker.process)
        if worker.line is not None:
            worker.line.is_gone()
        worker.gone()
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
        if not self._closing:
            delay = self.random.uniform(0.2, 2.0)
            self.simulation.at(delay, partial(self._start_again, worker))

    def _start_again(self, worker: Worker) -> None:
        if worker.worker_id not in self.workers:
            self.start(worker.role, worker.index)

    def _live(self, worker: Worker) -> None:
        try:
            reason = worker.run()
        except AttachError as error:
            reason = str(error)
        except Exception as error:  # reported to the driver
            reason = f"failed: {error!r}"
            raise
        finally:
            if worker.process.alive:
                self.simulation.at(0.0, partial(self.end, worker))
        if worker.process.alive:
            self.note(f"{worker.worker_id} ended: {reason}")
            if not worker.process.excuses and not reason.startswith("the driver ended"):
                raise Violation(f"{worker.worker_id} ended without a cause: {reason}")

    # -- what the driver asks of local processes --------------------------------------------------

    restarts = 0

    @property
    def supervisor(self) -> RuntimeWorld:
        return self

    def kill(self, worker_id: str, pid: int, after: float, abort: bool) -> None:
        worker = self.workers.get(worker_id)
        if worker is not None and worker.pid == pid:
            self.simulation.at(after, partial(self.end, worker))

    def of_use(self, worker_id: str) -> None: ...

    def is_dismissed(self, worker_id: str) -> bool:
        return False

    def start_evaluators(self) -> None: ...

    # -- oracles ---------------------------------------------------------------------------------

    def _watch_books(self) -> None:
        book = self.core.book

        def watched(event: events.Event) -> Any:
            before = self.core.counters().sampled
            commands = book(event)
            self.books.check(event, self.core.counters().sampled - before)
            return commands

        self.core.book = watched  # type: ignore[method-assign]
        hear = self._worker_events.handle

        def heard(event: Any) -> None:
            if isinstance(event, WorkerLeft):
                self.note(f"{event.worker.worker_id} left: {event.reason}")
                worker = self.by_incarnation[event.worker.incarnation]
                if not worker.process.excuses:
                    raise Violation(f"{worker.worker_id} is lost without a cause: {event.reason}")
            hear(event)

        self._worker_events.handle = heard  # type: ignore[method-assign]

    def latency(self, worker: Worker) -> float:
        late = self.random.uniform(0.001, 0.3) if self.random.random() < 0.1 else 0.001
        cut = self.partitioned.get(worker.worker_id, 0.0) - self.simulation.now
        return max(cut, 0.0) + late


@dataclass
class _Books:
    """Steps that were sampled, by what EnvRunners have made."""

    made: dict[int, tuple[int, int]] = field(default_factory=dict)  # live and stale steps
    counted: set[int] = field(default_factory=set)
    passed_over: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)

    def check(self, event: events.Event, sampled: int) -> None:
        """How many more steps were booked as sampled because of an event."""
        most = 0
        if isinstance(event, events.SampleReceived | events.BatchArrived):
            live, stale = self.made.get(event.batch_id, (0, 0))
            if event.batch_id not in self.counted:
                most += live
            if sampled >= live > 0:
                self.counted.add(event.batch_id)
            if isinstance(event, events.SampleReceived) and event.batch_id not in self.passed_over:
                self.passed_over.add(event.batch_id)
                most += stale
        if sampled > most:
            raise Violation(f"{sampled} steps sampled, of at most {most}: {event}")


# -- EnvRunners ------------------------------------------------------------------------------


class _Runner(Worker):
    def run(self) -> str:
        inbox: Any = Mailbox()
        attached = self.attach(inbox)
        contact = Contact("simulated", local=True)
        runner = envrunner_worker.EnvRunner(attached, inbox, contact)
        reason = runner.run()
        attached.farewell(reason)
        runner.close()
        return reason

    def gone(self) -> None:
        for sender in self.senders:
            sender.closed = True


class _Batch(SimpleNamespace):
    def to_tree(self) -> dict[str, Any]:
        return {}


class _Stage:
    """Environments that take their time, and a module that needs nothing."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def ready(self) -> list[training_pb2.Ready.Module]:
        message = ready_message(observation_space=SPACE, action_space=SPACE, rows=ROWS, steps=STEPS)
        return list(message.modules)

    def load(self, module_id: str, weights: Any) -> None: ...

    def close(self) -> None: ...

    def play(self, collected: Any, versions: Any) -> PlayedRound:
        world = self._worker.world
        hangs = 1e6 if self._worker.hangs else 0.0
        world.simulation.wait(lambda: False, hangs + world.random.uniform(0.3, 1.5))
        live, stale = world.random.randint(1, ROWS * STEPS), world.random.choice([0, 0, 3])
        one = TrainedResult(
            cast(Any, _Batch(live_steps=live, stale=stale)),
            versions[DEFAULT_MODULE],
            [1.0],
            [5],
            stale_steps=stale,
        )
        return PlayedRound(dict.fromkeys(collected, one), {})


class _Sender:
    """The EnvRunner's end of its batches' way to a learner."""

    def __init__(
        self, address: str, _: Any, settled: Callable[[int, str, str], None], *__: Any
    ) -> None:
        self._worker = me(active())
        self._world, self._settled = self._worker.world, settled
        self._learner = self._world.by_incarnation[address.removeprefix("unix:")]
        self._open: set[int] = set()
        self._last = 0.0
        self.closed = False
        self._worker.senders.append(self)
        cast(_Learner, self._learner).from_runners.append(self)

    def send(self, header: Any, tree: Any) -> None:
        world, simulation = self._world, self._world.simulation
        world.books.made[header.batch_id] = header.live_steps, 3
        self._open.add(header.batch_id)
        if self.closed or not self._learner.process.alive:
            return simulation.at(0.001, partial(self._lose, header.batch_id), self._worker.process)
        late = max(world.latency(self._worker), world.latency(self._learner))
        self._last = max(self._last, simulation.now + late)
        take = partial(self._arrive, header.batch_id, header.live_steps, Version.of(header.version))
        simulation.at(self._last - simulation.now, take, self._learner.process)
        return None

    def close(self) -> None:
        self.closed = True
        self.break_off()

    def break_off(self) -> None:
        """What is not acknowledged is lost."""
        for batch_id in list(self._open):
            self._world.simulation.at(0.001, partial(self._lose, batch_id), self._worker.process)

    def _arrive(self, batch_id: int, live: int, version: Version) -> None:
        cast(_Learner, self._learner).take(batch_id, live, version)
        back = self._world.latency(self._worker)
        self._world.simulation.at(
            back, partial(self._settle, batch_id, "", ""), self._worker.process
        )

    def _lose(self, batch_id: int) -> None:
        self._settle(batch_id, "learner_lost", "the learner is gone")

    def _settle(self, batch_id: int, dropped: str, why: str) -> None:
        if batch_id in self._open:
            self._open.remove(batch_id)
            self._settled(batch_id, dropped, why)


class _Subscription:
    """The EnvRunner's end of weights."""

    def __init__(self, address: str, *_: Any, **__: Any) -> None:
        self.address = address
        self._worker = me(active())
        self._learner = cast(
            _Learner, self._worker.world.by_incarnation[address.removeprefix("unix:")]
        )
        self._learner.subscribers.append(self)
        self.newest: Weights | None = None
        self.closed, self.answered = False, self._learner.process.alive
        if self._learner.published is not None:
            self.bring(self._learner.published)

    def bring(self, version: Version) -> None:
        world = self._worker.world
        # In a stream of its own: weights may come behind what the driver says of them.
        late = world.latency(self._worker) + world.random.choice([0.0, 0.0, 0.2, 1.0])
        world.simulation.at(late, partial(self._take, version), self._worker.process)

    def _take(self, version: Version) -> None:
        lost = not self._learner.process.alive
        if not self.closed and not lost and (not self.newest or version > self.newest.version):
            self.newest = Weights(version, {DEFAULT_MODULE: {}})

    def wait_for(self, version: Version, timeout: float) -> Weights:
        come = lambda: self.newest is not None and self.newest.version >= version  # noqa: E731
        if not self._worker.world.simulation.wait(come, timeout):
            raise TimeoutError("no weights.")
        assert self.newest is not None
        return self.newest

    def close(self) -> None:
        self.closed = True


# -- learners --------------------------------------------------------------------------------


class _Learner(Worker):
    """A learner whose state is its number of updates; saving takes time."""

    join: Any = Learner.join
    leave: Any = Learner.leave
    why_alone: Any = Learner.why_alone
    sums: Any = Learner.sums
    _peers: Any = None

    def __init__(self, world: RuntimeWorld, role: str, index: int) -> None:
        super().__init__(world, role, index)
        self.core = cast(Any, SimpleNamespace(trains_in_groups=True))
        self.data = cast(Any, SimpleNamespace(draw_apart=lambda _: None))
        self.state, self.updates = None, 0
        self.device = torch.device("cpu")
        self.published: Version | None = None
        self.subscribers: list[_Subscription] = []
        self.from_runners: list[_Sender] = []
        self._batches: dict[int, Any] = {}
        # What `HostedModule._book` reads and counts.
        config = SimpleNamespace(max_staleness=10)
        self._books = SimpleNamespace(
            learner=SimpleNamespace(config=config), _steps_trained=0, _steps_dropped=0
        )
        self._generation = 0
        progresses = lambda: self._attached.progresses()  # noqa: E731
        self._membership = Membership(self.worker_id, "127.0.0.1", progresses=progresses)
        self._saves = world.random.choice([0.0, world.history.slow_saves])

    def run(self) -> str:
        inbox: Any = Mailbox()
        self._attached = self.attach(inbox)
        self._loop = loop = CommandLoop(self._attached, inbox)
        done = lambda *_: attach_pb2.Done()  # noqa: E731
        loop.on(training_pb2.Setup, done)
        loop.on(training_pb2.Restore, done)
        loop.on(training_pb2.AddModule, self._add)
        loop.on(training_pb2.Group, self._group)
        loop.on(training_pb2.Update, self._update)
        loop.on(training_pb2.Discard, self._discard)
        reason = loop.run()
        self._attached.farewell(reason)
        return reason

    def gone(self) -> None:
        for sender in self.from_runners:
            sender.break_off()

    def take(self, batch_id: int, live: int, version: Version) -> None:
        staleness = lambda update: max(0, update - version.update)  # noqa: E731
        held = SimpleNamespace(batch_id=batch_id, live_steps=live, staleness=staleness)
        self._batches[batch_id] = held
        arrival = training_pb2.Arrival(batch_id=batch_id, live_steps=live)
        self._attached.report(training_pb2.Arrivals(module_id=DEFAULT_MODULE, arrivals=[arrival]))

    def _add(self, _: int, command: training_pb2.AddModule) -> training_pb2.ModuleReady:
        point = f"meeting:{self.incarnation}"
        return training_pb2.ModuleReady(module_id=command.module_id, meeting_point=point)

    def _group(self, _: int, group: training_pb2.Group) -> training_pb2.GroupFormed:
        superseded = partial(self._loop.waits, training_pb2.Group)
        formed = self._membership.form(group, cast(Any, self), superseded)
        self._generation = group.generation
        came = formed.peer_lost or "formed"
        self.world.note(f"{self.worker_id}: group {group.generation}: {came}")
        if not formed.peer_lost:
            self._publish()
        return formed

    def _update(self, _: int, update: training_pb2.Update) -> training_pb2.UpdateDone:
        world = self.world
        done = training_pb2.UpdateDone(module_id=update.module_id, update_id=update.update_id)
        batches = [self._batches.pop(i) for i in update.batch_ids if i in self._batches]
        here = {each.batch_id for each in batches}
        before = self.updates
        world.simulation.wait(lambda: False, world.random.uniform(0.01, 0.3))
        if not self._membership.lost:
            try:
                self.sums(torch.ones(1))
                self.updates += 1
            except PeerLost as error:
                self._membership.lose(cast(Any, self), str(error))
        done.peer_lost = self._membership.lost
        missing = [i for i in update.batch_ids if i not in here]
        HostedModule._book(
            cast(Any, self._books), done, cast(Any, batches), missing, before, is_kept=False
        )
        for used in done.batches:
            if not used.dropped:
                if used.batch_id in world.books.trained:
                    raise Violation(f"batch {used.batch_id} is trained on twice")
                world.books.trained.add(used.batch_id)
        if not done.peer_lost:
            self._publish()
        done.version.CopyFrom(Version(self._generation, self.updates).message())
        done.steps_trained = self._books._steps_trained
        done.steps_dropped = self._books._steps_dropped
        return done

    def _discard(self, _: int, command: training_pb2.Discard) -> attach_pb2.Done:
        dropped = [self._batches.pop(i) for i in command.batch_ids if i in self._batches]
        self._books._steps_dropped += sum(each.live_steps for each in dropped)
        return attach_pb2.Done()

    def _publish(self) -> None:
        self.published = Version(self._generation, self.updates)
        for each in self.subscribers:
            each.bring(self.published)

    # As a member of a group.

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        self.world.simulation.wait(lambda: False, self._saves)
        return {"updates": np.array(self.updates)}, {}

    def restore(self, tree: Any, extras: Any) -> None:
        self.world.simulation.wait(lambda: False, self._saves)
        self.updates = int(tree["updates"])

    def forget(self) -> None: ...


class _Meeting:
    """What the learners of a generation have said to each other."""

    def __init__(self) -> None:
        self.here: dict[int, Process] = {}
        self.said: dict[tuple[int, int], Any] = {}  # by operation and rank
        self.left = False


class _Peers(Peers):
    """Learners that meet in the world; a silent one is lost."""

    def __init__(
        self, point: str, generation: int, rank: int, size: int, _: str, superseded: Any, __: Any
    ) -> None:
        super().__init__(rank, size)
        self._me = me(active())
        self._world, self._superseded = self._me.world, superseded
        meetings = self._world.meetings
        self._meeting = meetings.setdefault((point, generation), _Meeting())
        self._operation = 0
        self._meeting.here[rank] = self._me.process
        self._wait(lambda: len(self._meeting.here) == size, "did not come")

    def _sum_on_host(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x.clone())).sum(0)

    def _exchange(self, mine: Any) -> list[Any]:
        said, operation = self._meeting.said, self._operation
        self._operation += 1
        said[operation, self.rank] = mine
        all_said = lambda: all((operation, r) in said for r in range(self.size))  # noqa: E731
        self._wait(all_said, "said nothing")
        return [said[operation, rank] for rank in range(self.size)]

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        simulation, meeting = self._world.simulation, self._meeting
        end = simulation.now + peers.COLLECTIVE_SECONDS

        def why() -> bool:
            dead = any(not each.alive for each in meeting.here.values())
            return ready() or meeting.left or dead or self._superseded()

        # Now and then: whether another group is to form takes a look into the inbox.
        while not why():
            if simulation.now >= end:
                break
            simulation.wait(lambda: ready() or meeting.left, 0.5)
        if not ready():
            raise PeerLost(f"a learner {what}")

    def close(self) -> None:
        self._meeting.left = True


# -- histories -------------------------------------------------------------------------------


@cache
def _config(history: History) -> RunConfig:
    return RunConfig.from_flat(
        {
            "envs_per_runner": ROWS,
            "fragment_steps": STEPS,
            "batch_size": history.batch_size,
            "num_env_runners": history.runners,
            "num_learners": history.learners,
            "worker_timeout_seconds": 20,
        }
    )


@contextmanager
def simulated_run() -> Iterator[None]:
    """The package's modules live in simulated time, with simulated streams."""
    nothing: Any = lambda *_: None  # noqa: E731
    zero: Any = lambda *_: 0.0  # noqa: E731
    processors = os.sched_getaffinity(0)
    with simulated_modules(), ExitStack() as stack:
        # Threads hand over to each other faster on one processor.
        stack.callback(os.sched_setaffinity, 0, processors)
        os.sched_setaffinity(0, {sorted(processors)[os.getpid() % len(processors)]})
        for module, name, instead in (
            (attachment, "thread_waited", zero),
            (hub, "seconds_waited", zero),
            (attachment, "resident_bytes", lambda: 0),
            (attachment, "os", SimpleNamespace(getpid=lambda: me(active()).pid)),
            (envrunner_worker, "build_stage", lambda *_: _stage()),
            (envrunner_worker, "seed_process", nothing),
            (learner_streams, "EpisodeSender", _Sender),
            (learner_streams, "WeightsSubscription", _Subscription),
            (membership, "GlooPeers", _Peers),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


def _stage() -> _Stage:
    return _Stage(me(active()))


def play(history: History, seed: int, directory: Path) -> list[str]:
    """Play the history of a seed, within `simulated_run` -> what happened last.

    Raises:
        Violation: something does not hold that must. It has the seed and what happened.
    """
    with simulated(Simulation(seed)) as simulation:
        world = RuntimeWorld(simulation, history, directory)
        try:
            world.play()
        except BaseException as error:
            log = "\n  ".join(world.happened)
            raise Violation(f"{error!r}\nseed {seed} of {history}:\n  {log}") from error
        finally:
            BY_PROCESS.clear()
        return list(world.happened)


def search(history: History, seeds: Iterable[int], directory: Path) -> None:
    """Play the histories of these seeds, within `simulated_run`.

    Raises:
        Violation: of the first that fails, with as few of its faults as make it fail.
    """
    for seed in seeds:
        try:
            play(history, seed, directory)
        except Violation:
            for faults in range(1, history.faults):
                play(replace(history, faults=faults), seed, directory)
            raise
