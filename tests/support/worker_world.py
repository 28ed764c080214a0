"""A LearnerWorker with its streams, the driver's and EnvRunner's ends included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest
from google.protobuf import any_pb2
from google.protobuf.message import Message
from gymnasium import spaces

from juggler.learner.algorithms.impala import ImpalaConfig
from juggler.learner.process import hosted_module
from juggler.learner.process.hosted_module import HostedModule
from juggler.learner.process.learner_program import LearnerProgram, LearnerSetup, ModuleSetup
from juggler.learner.process.learner_worker import LearnerServer, LearnerWorker
from juggler.runtime.actors.attachment import Contact, Detached, ReceivedCommand
from juggler.runtime.actors.credentials import call_metadata
from juggler.runtime.actors.hub import Mailbox
from juggler.runtime.actors.worker import to_json
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.config import ModuleConfig
from juggler.runtime.streams.episodes import EpisodeSender
from juggler.runtime.streams.weights_stream import WeightsSubscription
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import attach_pb2, episodes_pb2, training_pb2

M = TypeVar("M", bound=Message)
MakeBatch = Callable[..., EpisodeBatch]
PATIENCE = 60.0  # seconds until a test fails; nothing takes as long
BEGIN = Version(4, 10)  # of the learner's first weights
GENERATION = 5  # of the group that it joins
MAX_STALENESS = 2


class Driver:
    """The driver's place on the attach stream: commands and messages."""

    run_id = "run"
    incarnation = "learner"
    worker_id = "learner-0"

    def __init__(self) -> None:
        self.inbox: Mailbox[ReceivedCommand | Detached] = Mailbox()
        self.arrived: dict[int, int] = {}  # batch id -> live steps
        self.progressed = 0
        self._answers: SimpleQueue[Message | BaseException] = SimpleQueue()

    def ask(self, command: Message, answer: M) -> M:
        self.tell(command)
        return self.hear(answer)

    def tell(self, command: Message) -> None:
        """Does not wait for the answer."""
        body = any_pb2.Any()
        body.Pack(command)
        self.inbox.put(ReceivedCommand(1, body))

    def heard(self) -> Message | BaseException:
        """The next answer, or failure."""
        return self._answers.get(timeout=PATIENCE)

    def hear(self, answer: M) -> M:
        """The next answer, which is of this kind."""
        said = self.heard()
        assert isinstance(said, type(answer)), said
        return said

    # What the worker calls.

    def begins(self, command_id: int) -> None:
        pass

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()

    def progresses(self) -> None:
        self.progressed += 1

    def reply(self, command_id: int, body: Message, *, last: bool = True) -> None:
        self._answers.put(body)

    def reply_packed(self, command_id: int, body: any_pb2.Any, *, last: bool = True) -> None:
        self._answers.put(body)

    def fail(self, command_id: int, error: BaseException) -> None:
        self._answers.put(error)

    def report(self, arrivals: training_pb2.Arrivals) -> None:
        for arrival in arrivals.arrivals:
            assert arrival.batch_id not in self.arrived
            self.arrived[arrival.batch_id] = arrival.live_steps


class World:
    """A worker with real streams, a small module, and their other ends."""

    def __init__(
        self,
        directory: Path,
        make_batch: MakeBatch,
        outlives_failures: bool = False,
        shared: Mapping[str, list[str]] | None = None,
        synchronous: bool = False,
        may_meet: bool = False,
        **config: Any,
    ) -> None:
        """Take keys of the run, and `config` of the learner's keys."""
        self.driver = Driver()
        self.ready: dict[str, training_pb2.ModuleReady] = {}  # what it said of each module
        self._make_batch = make_batch
        attachment: Any = self.driver
        program = LearnerProgram(Contact("", socket_dir=str(directory)))
        server = LearnerServer(program)
        (address,) = self.addresses = server.addresses
        self.worker = LearnerWorker(attachment, self.driver.inbox, program, server)
        self._thread = threading.Thread(target=self.worker.run, daemon=True)
        self._thread.start()
        setup = _setup(outlives_failures, shared or {}, synchronous, may_meet)
        self.driver.ask(setup, attach_pb2.Done())
        self._weights: dict[str, WeightsSubscription] = {}
        self.module = self.add("default", **config)
        self.module.learner.updates = BEGIN.update  # as if it had restored them
        metadata = call_metadata("", "run", "incarnation")
        self._settled: SimpleQueue[tuple[int, str, str]] = SimpleQueue()
        self._sender = EpisodeSender(address, metadata, lambda *settled: self._settled.put(settled))
        self.join(GENERATION)

    def add(self, module_id: str, **config: Any) -> HostedModule:
        """Have a module hosted; an envrunner subscribes to its weights."""
        ready = self.driver.ask(_module(module_id, config), training_pb2.ModuleReady())
        assert ready.module_id == module_id
        self.ready[module_id] = ready
        (address,), metadata = self.addresses, call_metadata("", "run", "incarnation")
        self._weights[module_id] = WeightsSubscription(
            address, metadata, "envrunner-0", module_id=module_id
        )
        return self.worker.modules[module_id]

    def join(self, generation: int, module_id: str = "default") -> None:
        group = training_pb2.Group(
            module_id=module_id, generation=generation, members=["learner-0"]
        )
        self.driver.ask(group, training_pb2.GroupFormed())

    def send(
        self, batch_id: int, update: int, generation: int = GENERATION, module_id: str = "default"
    ) -> tuple[str, str]:
        """Send a batch of these weights' version; return its fate."""
        batch = self._make_batch(4, 8, seed=batch_id)
        header = episodes_pb2.BatchHeader(
            batch_id=batch_id,
            envrunner="envrunner-0",
            generation=generation,
            live_steps=batch.live_steps,
            version=Version(generation, update).message(),
            module_id=module_id,
        )
        return self.send_as(header, batch)

    def send_as(self, header: episodes_pb2.BatchHeader, batch: EpisodeBatch) -> tuple[str, str]:
        """A batch with this header. What became of it."""
        self._sender.send(header, {header.module_id: batch.to_tree()})
        settled, reason, explanation = self._settled.get(timeout=PATIENCE)
        assert settled == header.batch_id
        return reason, explanation

    def update(self, *batch_ids: int, **asked: Any) -> training_pb2.UpdateDone:
        self.ask_for_update(*batch_ids, **asked)
        return self.updated(*batch_ids)

    def ask_for_update(self, *batch_ids: int, **asked: Any) -> None:
        """Does not wait for it. `asked` has further fields of the command."""
        update_id = 77 + batch_ids[0]
        asked = {"module_id": "default", "generation": GENERATION, **asked}
        command = training_pb2.Update(update_id=update_id, batch_ids=batch_ids, **asked)
        self.driver.tell(command)

    def updated(self, *batch_ids: int) -> training_pb2.UpdateDone:
        """The answer to the first unanswered request for an update."""
        done = self.driver.hear(training_pb2.UpdateDone())
        assert done.update_id == 77 + batch_ids[0]
        assert sorted(used.batch_id for used in done.batches) == sorted(batch_ids)
        for used in done.batches:
            was_here = used.dropped != "restart"
            assert used.live_steps == (self.steps(used.batch_id) if was_here else 0)
        return done

    def steps(self, *batch_ids: int) -> int:
        return sum(self.driver.arrived[batch_id] for batch_id in batch_ids)

    def weights_of(self, version: Version, module_id: str = "default") -> np.ndarray:
        """The newest weights, of this version, in one row."""
        weights = self._weights[module_id].wait_for(version, PATIENCE)
        assert weights.version == version
        assert isinstance(weights.tree, dict)
        return np.concatenate([w.ravel() for w in weights.tree[module_id].values()])

    def close(self) -> None:
        self._sender.close()
        for weights in self._weights.values():
            weights.close()
        self.driver.inbox.put(Detached("over"))
        self._thread.join(PATIENCE)
        self.worker.close()


def _setup(
    outlives_failures: bool, shared: Mapping[str, list[str]], synchronous: bool, may_meet: bool
) -> training_pb2.Setup:
    setup = LearnerSetup(
        device="cpu",
        updates_in_flight=2,
        may_meet=may_meet,
        shared=dict(shared),
        synchronous=synchronous,
        outlives_failures=outlives_failures,
    )
    return training_pb2.Setup(config=to_json(setup))


def _module(module_id: str, learner: Mapping[str, Any]) -> training_pb2.AddModule:
    default = {} if "algorithm" in learner else asdict(ImpalaConfig(max_staleness=MAX_STALENESS))
    setup = ModuleSetup(
        learner={**default, **learner},
        module=ModuleConfig(model={"hidden_sizes": [8]}),
        connectors={},
    )
    return training_pb2.AddModule(
        module_id=module_id,
        config=to_json(setup),
        observation_space=space_to_message(spaces.Box(-10, 10, (4,), np.float32)),
        action_space=space_to_message(spaces.Discrete(2)),
    )


def overlap_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers go on beside their updates on the CPU too."""
    monkeypatch.setattr(hosted_module, "is_asynchronous", lambda device: True)
