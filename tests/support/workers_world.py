"""A driver without processes: scripted workers and recorded commands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.first_weights import FirstWeights, FrozenModule
from juggler.driver.checkpoint.snapshots import SnapshotWritten
from juggler.driver.config import RunConfig
from juggler.driver.league.builders import register_builder
from juggler.driver.league.league_builder import LeagueBuilder
from juggler.driver.league.roster import FreezePlayer
from juggler.driver.loop import Loop
from juggler.driver.periodic_work import PeriodicWork
from juggler.driver.reporting.wording import Level, Progress
from juggler.driver.run_end import RunClock
from juggler.driver.run_parts import InheritedState, RunParts
from juggler.driver.workers.league_run import LeagueRun
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.runtime.actors.hub import (
    Hub,
    HubEvent,
    Mailbox,
    Vitals,
    Worker,
    WorkerJoined,
    WorkerLeft,
    WorkerReplied,
    WorkerReported,
)
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.checkpoints.checkpoint import Checkpoint, read
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.frames import encode_frame
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2, training_pb2

ROWS, STEPS = 2, 10
SHAPE = {"envs_per_runner": ROWS, "fragment_steps": STEPS}
SPACE = spaces_pb2.Space(discrete=spaces_pb2.DiscreteSpace(n=2, dtype=5))


class _Hub:
    """Sends nothing; records commands, dismissals and times of silence."""

    def __init__(self) -> None:
        self.sent: list[tuple[Worker, int, Message]] = []
        self.dismissed: list[tuple[Worker, str]] = []
        self.silences: dict[str, float] = {}
        self.resident: dict[str, int] = {}

    def send(self, worker: Worker, command_id: int, body: Message) -> bool:
        self.sent.append((worker, command_id, body))
        return True

    def vitals(self) -> dict[str, Vitals]:
        return {each: Vitals(0.0, size, 0, 0.0) for each, size in self.resident.items()}

    def lose_after(self, role: str, silence: float) -> None:
        self.silences[role] = silence

    def dismiss(self, worker: Worker, reason: str) -> None:
        self.dismissed.append((worker, reason))


class _Told(Progress):
    """Keeps what people are told.

    Attributes:
        messages: oldest first.
        levels: of these.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.levels: list[Level] = []

    def message(self, text: str, level: Level = "info") -> None:
        self.messages.append(text)
        self.levels.append(level)


class WorkersWorld:
    """The parts of a run with one EnvRunner and its learners.

    Attributes:
        core: of the first module that is trained.
        learner: the first one.
        told: has what people were told.
        lines: of metrics, those at marks of steps.
        kept_bytes: that each learner says it will keep of steps.
        resident: bytes of memory that each process has, by worker id.
    """

    kept_bytes = 0

    def __init__(
        self,
        directory: Path,
        beginning: Mapping[str, FirstWeights] | None = None,
        only_local: bool = False,
        frozen: Mapping[str, FrozenModule] | None = None,
        resume: Checkpoint | None = None,
        local: LocalWorkers | None = None,
        **keys: Any,
    ) -> None:
        self._incarnations = itertools.count()
        self._hub = _Hub()
        self.resident = self._hub.resident
        self.written: Mailbox[Any] = Mailbox()
        config = RunConfig.from_flat({**SHAPE, "batch_size": 20, "num_env_runners": 1, **keys})
        clock = RunClock(0.0)
        # Without any, no process here is local, so the local workers are asked for nothing.
        self._are_local = local is not None
        local = local or cast(LocalWorkers, _NobodyIsLocal())
        hub = cast(Hub, self._hub)
        self.told = _Told()
        self.parts = RunParts(
            config,
            hub,
            local,
            self.told,
            clock,
            directory,
            directory,
            self.written.put,
            InheritedState(resume, beginning or {}, frozen or {}),
            only_local=only_local,
        )
        self.worker_events = WorkerEvents(self.parts)
        self.lines: list[Mapping[str, Any]] = []

        def keep(line: Mapping[str, Any], _: Progress) -> bool:
            self.lines.append(line)
            return False

        file = SimpleNamespace(write_line=keep, taken=False)
        periodic_work = PeriodicWork(self.parts, cast(Any, file), [], lambda: None)
        nothing = cast(Any, None)  # no watcher
        self._loop = Loop(self.parts, self.worker_events, Mailbox(), periodic_work, nothing)
        self.core = next(iter(self.parts.core.modules.values()))
        self.runner = self.join("envrunner")
        self.get_ready(self.runner)
        self.learners = [self.join("learner", n) for n in range(config.driver.learners)]
        self.learner = self.learners[0]
        for learner in self.learners:
            self.get_ready(learner)

    def hear(self, event: HubEvent) -> None:
        """As the loop does, of one event at a time."""
        self.worker_events.handle(event)
        self.turn()

    def end_process(self, event: Exited) -> None:
        """A local process has ended."""
        self.parts.departures.exited(event)
        self.turn()

    def turn(self) -> None:
        """What the loop does after all messages."""
        self._loop.issue_updates()
        self._loop.finish_updates()
        if not self.parts.end.reached:
            self._loop.top_up()

    def join(self, role: str, index: int = 0) -> Worker:
        incarnation = f"incarnation-{next(self._incarnations)}"
        name = f"{role}-{index}"
        worker = Worker(name, incarnation, role, index, "host", 1, (), (), self._are_local)
        self.hear(WorkerJoined(worker))
        return worker

    def joined(self, role: str = "evaluator", index: int = 0) -> Worker:
        """A worker that has attached and is ready."""
        worker = self.join(role, index)
        self.get_ready(worker)
        return worker

    def on_disk(self) -> SnapshotWritten:
        """The writer's report to the driver about a complete state."""
        (written,) = self.written.gather(timeout=30)
        self.parts.checkpoints.done(written)
        return written

    def snapshots_asked(self) -> int:
        return len(self.asked(self.learner, training_pb2.Snapshot))

    def leave(self, worker: Worker, **said: Any) -> None:
        self.hear(WorkerLeft(worker, "gone", **said))

    def get_ready(self, worker: Worker, *module_ids: str) -> None:
        """It does what it is set up for.

        Args:
            worker: that has been told its setup.
            module_ids: that an EnvRunner was told of; (): all that there are now.
        """
        if worker.role == "learner":
            for command_id, module in self.asked(worker, training_pb2.AddModule):
                ready = training_pb2.ModuleReady(
                    module_id=module.module_id, kept_bytes=self.kept_bytes
                )
                self.reply(worker, command_id, ready)
            return
        answered = 0
        while len(parts := self.asked(worker, training_pb2.Restore)) > answered:
            assert not self.asked(worker, training_pb2.Setup), "its weights come first"
            self.reply(worker, parts[answered][0], attach_pb2.Done())
            answered += 1
        (setup,) = self.asked(worker, training_pb2.Setup)
        shape = {"rows": ROWS, "steps": STEPS}
        ready = ready_message(
            *(module_ids or self.parts.core.modules),
            observation_space=SPACE,
            action_space=SPACE,
            **shape,
        )
        self.reply(worker, setup[0], ready)

    def asked(self, worker: Worker, kind: type[Message]) -> list[tuple[int, Any]]:
        """(command id, command) of every command of that kind to that worker."""
        return [
            (i, body) for who, i, body in self._hub.sent if who is worker and type(body) is kind
        ]

    def reply(
        self, worker: Worker, command_id: int, body: Message | any_pb2.Any, *, last: bool = True
    ) -> None:
        _name_the_module(body)
        reply = attach_pb2.Reply(id=command_id, last=last, body=_packed(body))
        self.hear(WorkerReplied(worker, reply))

    def fail(self, worker: Worker, command_id: int) -> None:
        failure = attach_pb2.Failure(message="cannot")
        reply = attach_pb2.Reply(id=command_id, last=True, failure=failure)
        self.hear(WorkerReplied(worker, reply))

    def report(self, worker: Worker, body: Message | any_pb2.Any) -> None:
        _name_the_module(body)
        self.hear(WorkerReported(worker, _packed(body)))

    def sample(self, number: int = 0, **said: Any) -> None:
        """The runner answers its first request, or that of another number."""
        command_id, request = self.asked(self.runner, training_pb2.SampleRequest)[number]
        receipt = {
            "batch_id": request.batch_id,
            "learner": "learner-0",
            "live_steps": ROWS * STEPS,
            **said,
        }
        self.reply(self.runner, command_id, training_pb2.Receipt(**receipt))

    def meet(self, module_id: str = DEFAULT_MODULE) -> None:
        """The first learner of a module has its group."""
        groups = self.asked(self.learner, training_pb2.Group)
        command_id, group = [each for each in groups if each[1].module_id == module_id][-1]
        formed = {"module_id": module_id, "generation": group.generation, "state_hash": 1}
        self.reply(self.learner, command_id, training_pb2.GroupFormed(**formed))

    def silences(self) -> dict[str, float]:
        """After which workers are lost, by role, where it has changed."""
        return self._hub.silences

    def ask_for_a_snapshot(self) -> int:
        assert self.parts.checkpoints.begin()
        return self.asked(self.learner, training_pb2.Snapshot)[-1][0]

    def why_dismissed(self, worker: Worker) -> str:
        """No other worker was released."""
        assert [who for who, _ in self._hub.dismissed] == [worker] * len(self._hub.dismissed)
        return self._hub.dismissed[0][1] if self._hub.dismissed else ""


class _NothingIsSupervised:
    restarts = 0

    def of_use(self, worker_id: str) -> None:
        pass


class _NobodyIsLocal:
    supervisor = _NothingIsSupervised()

    def gave_up_on(self, worker_id: str) -> None:
        pass

    def is_dismissed(self, worker_id: str) -> bool:
        return False

    def was_dismissed(self, worker_id: str) -> bool:
        return False

    def any_up(self, role: str) -> bool:
        return False

    def start_evaluators(self) -> None:
        pass


def _name_the_module(body: Any) -> None:
    """Messages without a module are about the run's only one."""
    if hasattr(body, "module_id"):
        body.module_id = body.module_id or DEFAULT_MODULE


def _packed(body: Message | any_pb2.Any) -> any_pb2.Any:
    if isinstance(body, any_pb2.Any):
        return body
    packed = any_pb2.Any()
    packed.Pack(body)
    return packed


def synchronous(directory: Path, **keys: Any) -> WorkersWorld:
    """A round of two requests, which the runner may hold at once."""
    return WorkersWorld(directory, synchronous=True, batch_size=40, checkpoint_updates=2, **keys)


def requests(world: WorkersWorld) -> list[tuple[int, training_pb2.SampleRequest]]:
    return world.asked(world.runner, training_pb2.SampleRequest)


def answer_requests(world: WorkersWorld, **said: Any) -> None:
    for command_id, request in requests(world)[-2:]:
        receipt = {"batch_id": request.batch_id, "learner": "learner-0", "live_steps": 20, **said}
        world.reply(world.runner, command_id, training_pb2.Receipt(**receipt))


def play_a_round(world: WorkersWorld, **said: Any) -> None:
    """Both requests and the update are answered."""
    answer_requests(world, **said)
    command_id, update = world.asked(world.learner, training_pb2.Update)[-1]
    version = {"generation": update.generation, "update": world.parts.core.updates + 1}
    used = [{"batch_id": batch_id, "live_steps": 20} for batch_id in update.batch_ids]
    done = training_pb2.UpdateDone(update_id=update.update_id, version=version, batches=used)
    world.reply(world.learner, command_id, done)


def answer_the_snapshot(
    world: WorkersWorld, module_id: str = "default", state: Mapping[str, Tree] | None = None
) -> None:
    command_id, _ = world.asked(world.learner, training_pb2.Snapshot)[-1]
    update = world.parts.core.updates
    header = training_pb2.StateHeader(
        module_id=module_id, version={"generation": 1, "update": update}, extra="{}"
    )
    (chunk,) = encode_frame(header, state or {"a": np.zeros(3)}, digest=True)
    world.reply(world.learner, command_id, any_pb2.Any(value=chunk))


def begin_an_evaluation(
    world: WorkersWorld, module_id: str = "default", state: Mapping[str, Tree] | None = None
) -> SnapshotWritten:
    """An evaluation is due, and an evaluator has the checkpoint."""
    evaluations = world.parts.evaluations
    evaluations.want()
    evaluations.begin()
    answer_the_snapshot(world, module_id, state)
    written = world.on_disk()
    evaluations.written(written)
    return written


def ready_message(*module_ids: str, **keys: Any) -> training_pb2.Ready:
    """A Ready of each module, or of the run's only one."""
    modules = [
        training_pb2.Ready.Module(module_id=module_id, **keys)
        for module_id in module_ids or (DEFAULT_MODULE,)
    ]
    return training_pb2.Ready(modules=modules)


@dataclass(kw_only=True)
class Asked(LeagueBuilder):
    """Asks for what the test wants."""

    wanted: ClassVar[list[Any]] = []

    def build(self, results: Any) -> list[Any]:
        wanted, self.wanted[:] = list(self.wanted), []
        return wanted


class World(WorkersWorld):
    """A league of one main, with one learner and one EnvRunner.

    Args:
        directory: of the run.
        keys: as of `WorkersWorld`.
    """

    def __init__(self, directory: Path, **keys: Any) -> None:
        table = {"builder": register_builder(Asked), "evaluation_probability": 0.0}
        agents = {"row": ["main-0"], "column": ["main-0"]}
        super().__init__(directory, agents=agents, league=table, **keys)
        self.meet("main-0")

    @property
    def league(self) -> LeagueRun:
        found = self.parts.league
        assert found is not None
        return found

    def want(self, *commands: Any) -> None:
        """The builder is asked, once the main was trained."""
        Asked.wanted.extend(commands)
        self.league.trained("main-0", 1)

    def copies_asked_for(self) -> list[int]:
        """Commands to the learner, the oldest first."""
        return [number for number, _ in self.asked(self.learner, training_pb2.Snapshot)]

    def send_weights(self, command_id: int, module_id: str = "main-0", scale: float = 1) -> None:
        header = training_pb2.StateHeader(module_id=module_id, extra="{}")
        tree = {"default": {"scale": np.full(300, scale, np.float32)}}
        chunks = list(encode_frame(header, tree, digest=True, chunk_bytes=1000))
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            self.reply(self.learner, command_id, any_pb2.Any(value=chunk), last=last)

    def copy(self, scale: float = 1) -> None:
        """The main is copied, and the EnvRunner has the copy."""
        self.want(FreezePlayer("main-0"))
        self.send_weights(self.copies_asked_for()[-1], scale=scale)
        self.take_parts()

    def take_parts(self, worker: Worker | None = None) -> None:
        """An EnvRunner has what it was sent, part by part."""
        worker = worker or self.runner
        for kind in (training_pb2.Restore, training_pb2.AddPlayer):
            for command_id, _ in self.asked(worker, kind):
                self.reply(worker, command_id, attach_pb2.Done())

    def plays(self, player: str) -> bool:
        return self.league.league.roster.players[player].plays


class Changing(World):
    """A league whose learner and EnvRunner do what they are asked to."""

    def __init__(self, directory: Path, **keys: Any) -> None:
        self.answered: set[int] = set()
        super().__init__(directory, **keys)

    def modules_asked_for(self) -> dict[str, training_pb2.AddModule]:
        return {
            each.module_id: each for _, each in self.asked(self.learner, training_pb2.AddModule)
        }

    def has_been_added(self, player: str) -> None:
        """The learner hosts a player, and the EnvRunner has it."""
        for command_id, module in self.asked(self.learner, training_pb2.AddModule):
            if module.module_id == player:
                ready = training_pb2.ModuleReady(module_id=player)
                self.reply(self.learner, command_id, ready)
        self.meet(player)
        self.take_parts()

    def requests(self) -> list[tuple[int, Any]]:
        """Requests that the EnvRunner has not answered."""
        asked = self.asked(self.runner, training_pb2.SampleRequest)
        return [each for each in asked if each[0] not in self.answered]

    def play(self) -> None:
        """Answer all requests that there are now, with 20 steps each."""
        for command_id, request in self.requests():
            self.answered.add(command_id)
            receipt = training_pb2.Receipt(
                module_id=request.module_id,
                batch_id=request.batch_id,
                learner=request.learner,
                live_steps=20,
                version=request.at_least,
            )
            self.reply(self.runner, command_id, receipt)

    def train(self) -> None:
        """Answer all present updates; return the answers in a word."""
        for worker in (self.runner, self.learner):
            for kind in (training_pb2.Learners, training_pb2.Discard, training_pb2.RemovePlayer):
                for command_id, _ in self.asked(worker, kind):
                    self.reply(worker, command_id, attach_pb2.Done())
        for command_id, update in self.asked(self.learner, training_pb2.Update):
            if command_id not in self.answered:
                self.answered.add(command_id)
                self.made(command_id, update)

    def play_and_train(self) -> None:
        for _ in range(4):
            self.play()
            self.train()

    def made(self, command_id: int, update: training_pb2.Update) -> None:
        module = self.parts.core.modules[update.module_id]
        done = training_pb2.UpdateDone(module_id=update.module_id, update_id=update.update_id)
        done.version.generation = update.generation
        done.version.update = module.weights_version.update + 1
        for batch_id in update.batch_ids:
            done.batches.add(batch_id=batch_id, live_steps=20)
        self.reply(self.learner, command_id, done)

    def told_to(self, worker: Worker, kind: Any) -> list[str]:
        return [each.module_id for _, each in self.asked(worker, kind)]

    def told_in_order(self, learner: Worker) -> list[str]:
        """Commands that change the main's weights, in their order."""
        kinds = (training_pb2.Restore, training_pb2.Reset, training_pb2.Group)
        told = [(number, kind) for kind in kinds for number, _ in self.asked(learner, kind)]
        return [kind.__name__ for _, kind in sorted(told, key=lambda each: each[0])]

    def restored(self, learner: Worker) -> list[training_pb2.Restore]:
        """What a learner was sent of states and weights."""
        return [each for _, each in self.asked(learner, training_pb2.Restore)]

    def checkpoint(self, before_the_last: Callable[[], None] = lambda: None) -> Checkpoint:
        """A checkpoint of these modules' states; the first comes last."""
        assert self.parts.checkpoints.begin()
        states = self.asked(self.learner, training_pb2.Snapshot)
        states = [each for each in states if not each[1].whole and each[0] not in self.answered]
        for command_id, asked in reversed(states):
            self.answered.add(command_id)
            if command_id == states[0][0]:
                before_the_last()
            module = self.parts.core.modules[asked.module_id]
            version = module.weights_version.message()
            header = training_pb2.StateHeader(
                module_id=asked.module_id, version=version, extra="{}"
            )
            state = {"default": {"parameters": {"scale": np.ones(3, np.float32)}, "buffers": {}}}
            for chunk in encode_frame(header, state, digest=True):
                self.reply(self.learner, command_id, any_pb2.Any(value=chunk))
        (written,) = self.written.gather(5.0)
        self.parts.checkpoints.done(written)
        assert written.path is not None, written.problem
        return read(written.path)


def resumed(directory: Path, saved: Checkpoint, **keys: Any) -> Changing:
    """A resumed run; only the main has its learner yet."""
    return Changing(directory, resume=saved, **keys)
