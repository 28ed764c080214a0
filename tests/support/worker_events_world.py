"""A run whose workers are this test: they say whatever it likes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.beginning import Beginning
from juggler.driver.checkpoint.frozen_modules import FrozenModule
from juggler.driver.checkpoint.snapshots import SnapshotWriter
from juggler.driver.config import RunConfig
from juggler.driver.loop import Loop
from juggler.driver.parts import RunParts
from juggler.driver.record.progress import SilentProgress
from juggler.driver.record.wording import Level
from juggler.driver.run_clock import RunClock
from juggler.driver.upkeep import Upkeep
from juggler.driver.workers.local_workers import LocalWorkers
from juggler.driver.workers.worker_events import WorkerEvents
from juggler.runtime.actors.hub import Hub
from juggler.runtime.actors.hub_events import HubEvent, Joined, Left, Replied, Reported, Worker
from juggler.runtime.actors.mailbox import Mailbox
from juggler.runtime.actors.supervisor import Exited
from juggler.runtime.actors.vitals import Vitals
from juggler.runtime.checkpoints.checkpoint import Checkpoint
from juggler.runtime.episodes.version import DEFAULT_MODULE
from juggler.runtime.wire.v1 import attach_pb2, spaces_pb2, training_pb2
from support.ready import ready_message

ROWS, STEPS = 2, 10
SHAPE = {"envs_per_runner": ROWS, "fragment_steps": STEPS}
SPACE = spaces_pb2.Space(discrete=spaces_pb2.DiscreteSpace(n=2, dtype=5))


class _Hub:
    """Sends nothing, and keeps what it should have sent, whom it should have let go, and after how
    many seconds of silence it loses workers of a role."""

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


class _Told(SilentProgress):
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
    """The parts of a run with one EnvRunner and its learners, which are ready.

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
        beginning: Beginning | None = None,
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
        self.snapshots = SnapshotWriter(self.written, directory, config, clock, None)
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
            self.snapshots,
            clock,
            directory,
            resume,
            only_local=only_local,
            beginning=beginning,
            frozen=frozen,
        )
        self.worker_events = WorkerEvents(self.parts)
        self.lines: list[Mapping[str, Any]] = []
        file = SimpleNamespace(append=self.lines.append, taken=False)
        upkeep = Upkeep(self.parts, cast(Any, file), [], lambda: None)
        nothing = cast(Any, None)  # nobody watches
        self._loop = Loop(self.parts, self.worker_events, Mailbox(), upkeep, nothing)
        self.core = next(iter(self.parts.core.modules.values()))
        self.runner = self.join("envrunner")
        self.get_ready(self.runner)
        self.learners = [self.join("learner", n) for n in range(config.driver.learners)]
        self.learner = self.learners[0]
        for learner in self.learners:
            self.get_ready(learner)

    def hear(self, event: HubEvent) -> None:
        """As the loop does, of one event at a time."""
        self.worker_events.hear(event)
        self.turn()

    def end_process(self, event: Exited) -> None:
        """A local process has ended."""
        self.parts.departures.exited(event)
        self.turn()

    def turn(self) -> None:
        """What the loop does when it has heard all that came."""
        self._loop.issue_updates()
        self._loop.finish_updates()
        if not self.parts.end.reached:
            self._loop.top_up()

    def join(self, role: str, index: int = 0) -> Worker:
        incarnation = f"incarnation-{next(self._incarnations)}"
        name = f"{role}-{index}"
        worker = Worker(name, incarnation, role, index, "host", 1, (), (), self._are_local)
        self.hear(Joined(worker))
        return worker

    def leave(self, worker: Worker, **said: Any) -> None:
        self.hear(Left(worker, "gone", **said))

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
        self.hear(Replied(worker, reply))

    def fail(self, worker: Worker, command_id: int) -> None:
        failure = attach_pb2.Failure(message="cannot")
        reply = attach_pb2.Reply(id=command_id, last=True, failure=failure)
        self.hear(Replied(worker, reply))

    def report(self, worker: Worker, body: Message | any_pb2.Any) -> None:
        _name_the_module(body)
        self.hear(Reported(worker, _packed(body)))

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

    def silences(self) -> dict[str, float]:
        """After which workers are lost, by role, where it has changed."""
        return self._hub.silences

    def ask_for_a_snapshot(self) -> int:
        assert self.parts.checkpointing.begin()
        return self.asked(self.learner, training_pb2.Snapshot)[-1][0]

    def why_dismissed(self, worker: Worker) -> str:
        """Nobody else was let go."""
        assert [who for who, _ in self._hub.dismissed] == [worker] * len(self._hub.dismissed)
        return self._hub.dismissed[0][1] if self._hub.dismissed else ""


class _NobodyIsLocal:
    restarts = 0

    def of_use(self, worker_id: str) -> None:
        pass

    def gave_up_on(self, worker_id: str) -> None:
        pass

    def is_let_go(self, worker_id: str) -> bool:
        return False

    def was_let_go(self, worker_id: str) -> bool:
        return False

    def any_up(self, role: str) -> bool:
        return False

    def start_evaluators(self) -> None:
        pass


def _name_the_module(body: Any) -> None:
    """Most tests leave it open which module a message is about: the run's."""
    if hasattr(body, "module_id"):
        body.module_id = body.module_id or DEFAULT_MODULE


def _packed(body: Message | any_pb2.Any) -> any_pb2.Any:
    if isinstance(body, any_pb2.Any):
        return body
    packed = any_pb2.Any()
    packed.Pack(body)
    return packed
