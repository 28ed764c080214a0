"""An EnvRunner with real streams, the driver's and learners' ends included."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar, cast

import grpc
import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import Message

from juggler.driver.checkpoint.snapshots import restores
from juggler.envrunner.config import EnvRunnerConfig
from juggler.envrunner.envrunner_worker import EnvRunner
from juggler.envrunner.setup import RANDOM, ActingSetup, EnvRunnerSetup, may_play
from juggler.runtime.actors.attachment import (
    Attachment,
    BusyThreads,
    Contact,
    Detached,
    ReceivedCommand,
)
from juggler.runtime.actors.credentials import CallMetadata, why_refused
from juggler.runtime.actors.endpoints import SERVER_OPTIONS, bind
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.worker import to_json
from juggler.runtime.checkpoints.weights import tree_digest
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.streams.episodes import BatchFrame, EpisodeReceiver
from juggler.runtime.streams.weights_stream import WeightsPublisher
from juggler.runtime.wire.trees import Tree
from juggler.runtime.wire.v1 import attach_pb2, training_pb2

M = TypeVar("M", bound=Message)
PATIENCE = 60.0  # seconds until a test fails; nothing takes as long
PLAYED_BY = {
    "red": "reds",
    "green": "reds",
    "blue": "blues",
}  # agents by the modules that play them


class Driver:
    """The driver's place on the attach stream: commands and messages."""

    run_id, incarnation, worker_id = "run", "incarnation", "envrunner-0"
    held_up_by: Any = None

    def __init__(self) -> None:
        self.inbox: Mailbox[ReceivedCommand | Detached] = Mailbox()
        self._answers: SimpleQueue[Message | BaseException] = SimpleQueue()
        self._commands = 0
        self._threads = BusyThreads()
        self.notes: list[training_pb2.Note] = []

    def tell(self, *commands: Message) -> None:
        for command in commands:
            body = any_pb2.Any()
            body.Pack(command)
            self._commands += 1
            self.inbox.put(ReceivedCommand(self._commands, body))

    def ask(self, command: Message, answer: type[M]) -> M:
        self.tell(command)
        return self.hear(answer)

    def hear(self, answer: type[M]) -> M:
        """The next answer, which is of this kind."""
        said = self._answers.get(timeout=PATIENCE)
        assert isinstance(said, answer), said
        return said

    # What the worker calls.

    def begins(self, command_id: int) -> None:
        pass

    def busy(self) -> AbstractContextManager[None]:
        return self._threads.busy()

    def progresses(self) -> None:
        pass

    def reply(self, command_id: int, body: Message) -> None:
        self._answers.put(body)

    def fail(self, command_id: int, error: BaseException) -> None:
        self._answers.put(error)

    def report(self, note: training_pb2.Note) -> None:
        self.notes.append(note)


class LearnerOf:
    """A learner of one module: publishes weights, and takes batches."""

    def __init__(self, directory: Path, module_id: str) -> None:
        self.module_id, self.worker_id = module_id, f"learner-{module_id}"
        self.address = f"unix:{directory / module_id}"
        self.frames: SimpleQueue[BatchFrame] = SimpleQueue()
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(self._threads, options=SERVER_OPTIONS)
        self.publisher = WeightsPublisher(self._why_refused)
        receiver = EpisodeReceiver(self._take, self._why_refused)
        self._server.add_generic_rpc_handlers((self.publisher.handler(), receiver.handler()))
        bind(self._server, self.address)
        self._server.start()

    def publish(self, update: int) -> Version:
        version = Version(1, update)
        weights = {"scale": np.full((), float(update), np.float32)}
        self.publisher.publish(version, {self.module_id: weights}, self.module_id)
        return version

    def batch(self) -> tuple[Any, EpisodeBatch]:
        """The header and the content of the next batch."""
        frame = self.frames.get(timeout=PATIENCE)
        assert isinstance(frame.tree, dict)
        assert list(frame.tree) == [self.module_id]
        return frame.header, EpisodeBatch.from_tree(frame.tree[self.module_id])

    def message(self) -> training_pb2.Learners:
        learner = training_pb2.Learners.Learner(
            worker_id=self.worker_id, incarnation="one", addresses=[self.address]
        )
        return training_pb2.Learners(module_id=self.module_id, generation=1, learners=[learner])

    def close(self) -> None:
        self.publisher.close()
        self._server.stop(grace=None).wait(PATIENCE)
        self._threads.shutdown(wait=False)

    def _take(self, frame: BatchFrame) -> str:
        self.frames.put(frame)
        return ""

    def _why_refused(self, metadata: CallMetadata) -> str | None:
        return why_refused(metadata, token="secret", run_id="run")


class RunnerWorld:
    """An EnvRunner in a thread, with its driver and learners.

    Args:
        directory: of the learners' sockets.
        agents: by agent, the module that plays it.
        row_age: of every module.
        steps: fragment_steps.
        frozen: what modules play with that are not trained, by id.
        environments: envs_per_runner.
        league: the driver assigns line-ups.
        mapping: the name of the function that draws them.
        keys: of an `EnvRunnerConfig`.
    """

    def __init__(
        self,
        directory: Path,
        agents: Mapping[str, str | list[str]],
        row_age: int = 100,
        steps: int = 4,
        frozen: Mapping[str, Tree] | None = None,
        environments: int = 2,
        league: bool = False,
        mapping: str = "",
        **keys: Any,
    ) -> None:
        self._directory = directory
        self.driver = Driver()
        self._frozen = frozen or {}
        ids = dict.fromkeys(each for said in agents.values() for each in may_play(said))
        self.learners = {
            each: LearnerOf(directory, each) for each in ids if each not in {RANDOM, *self._frozen}
        }
        acting = ActingSetup(
            module=ModuleConfig(module="support.scripted_agents:Scaled"),
            connectors={},
            algorithm="impala",
            off_policy=True,
            row_age=row_age,
        )
        self.setup = EnvRunnerSetup(
            env_runner=EnvRunnerConfig(envs_per_runner=environments, fragment_steps=steps, **keys),
            modules={
                **dict.fromkeys(self.learners, acting),
                **{
                    each: replace(acting, digest=tree_digest(self._frozen[each]))
                    for each in self._frozen
                },
            },
            agents=dict(agents),
            league=league,
            mapping=mapping,
        )
        contact = Contact("", token="secret", local=True)
        self.runner: Any = self._make(cast(Attachment, self.driver), contact)
        self._batch_ids = self._rounds = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _make(self, attachment: Attachment, contact: Contact) -> Any:
        return EnvRunner(attachment, self.driver.inbox, contact)

    def begin(self) -> training_pb2.Ready:
        """Set the runner up, and send it weights of update 0."""
        ready = self.set_up()
        self.introduce()
        return ready

    def introduce(self) -> None:
        """Introduce the runner to the learners, with weights of update 0."""
        for learner in self.learners.values():
            learner.publish(0)
            self.driver.ask(learner.message(), attach_pb2.Done)

    def set_up(self) -> training_pb2.Ready:
        self.driver.tell(training_pb2.Setup(config=to_json(self.setup), seed=7))
        return self.driver.hear(training_pb2.Ready)

    def send_frozen(self, **instead: Tree) -> None:
        """Send the weights of untrained modules, or something else."""
        for module_id, tree in {**self._frozen, **instead}.items():
            for part in restores(module_id, cast(Any, tree), {}):
                self.driver.ask(part, attach_pb2.Done)

    def add_player(self, module_id: str) -> None:
        """A player that learns comes, with weights of update 1."""
        learner = self.learners[module_id] = LearnerOf(self._directory, module_id)
        acting = to_json(next(iter(self.setup.modules.values())))
        added = training_pb2.AddPlayer(module_id=module_id, config=acting)
        self.driver.ask(added, attach_pb2.Done)
        learner.publish(1)
        self.driver.ask(learner.message(), attach_pb2.Done)

    def remove_player(self, module_id: str) -> None:
        self.driver.ask(training_pb2.RemovePlayer(module_id=module_id), attach_pb2.Done)

    def requests(self, **at_least: int) -> list[training_pb2.SampleRequest]:
        """A round's requests, by module with the update to wait for."""
        self._rounds += 1
        requests = []
        for module_id, update in at_least.items():
            self._batch_ids += 1
            requests.append(
                training_pb2.SampleRequest(
                    module_id=module_id,
                    batch_id=self._batch_ids,
                    learner=self.learners[module_id].worker_id,
                    generation=1,
                    at_least=Version(1, update).message(),
                    round=self._rounds,
                    requests_in_round=len(at_least),
                )
            )
        return requests

    def play(self, **at_least: int) -> dict[str, training_pb2.Receipt]:
        """The receipts of a round, by module."""
        self.driver.tell(*self.requests(**at_least))
        receipts = [self.driver.hear(training_pb2.Receipt) for _ in at_least]
        return {receipt.module_id: receipt for receipt in receipts}

    def close(self) -> None:
        self.driver.inbox.put(Detached("over"))
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        for learner in self.learners.values():
            learner.close()

    def _run(self) -> None:
        try:
            self.runner.run()
        except Exception:  # the driver knows of it
            pass
        finally:
            self.runner.close()
