"""A gateway for simulators with several agents, with its driver and a learner for each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from gymnasium import spaces

from juggler.client import AgentsSession, connect_agents
from juggler.envrunner.program import GatewayAddress
from juggler.gateway.runner import GatewayRunner
from juggler.runtime.actors.attachment import Attachment
from juggler.runtime.actors.setups import to_json
from juggler.runtime.actors.worker import Contact
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1 import training_pb2
from support.runner_world import PATIENCE, RunnerWorld

SEEN = spaces.Box(-np.inf, np.inf, (2,), np.float32)
THREE_WAYS = spaces.Discrete(3)
#: A simulator's agents with those spaces.
SPACES = (SEEN, THREE_WAYS)


def see(*numbers: float) -> Any:
    return np.array(numbers, np.float32)


class AgentsWorld(RunnerWorld):
    """
    Args:
        directory: of the learners' sockets.
        agents: by agent, the module that plays it.
        gateway: where it is told to listen.
        local: the driver started it.
        worker_id: its own.
        keys: of a `RunnerWorld`.

    Attributes:
        address: where simulators dial.
        notes: what the driver was told for people.
    """

    def __init__(
        self,
        directory: Path,
        agents: Mapping[str, str],
        gateway: str = "127.0.0.1:0",
        local: bool = True,
        worker_id: str = "envrunner-0",
        **keys: Any,
    ) -> None:
        self._gateway, self._local, self._worker_id = gateway, local, worker_id
        self.notes: SimpleQueue[str] = SimpleQueue()
        self._early: list[training_pb2.Receipt] = []  # of later rounds
        super().__init__(directory, agents, **keys)
        self.driver.tell(training_pb2.Setup(config=to_json(self.setup), seed=7))
        while " takes simulators at " not in (note := f" {self.notes.get(timeout=PATIENCE)}"):
            pass
        self.address = note.partition(" at ")[2].partition(";")[0]

    def _make(self, attachment: Attachment, contact: Contact) -> Any:
        self.driver.report = lambda note: self.notes.put(note.text)  # type: ignore[method-assign]
        self.driver.worker_id = self._worker_id
        gateway, contact = GatewayAddress(self._gateway), replace(contact, local=self._local)
        return GatewayRunner(attachment, self.driver.inbox, contact, gateway)

    def connect(self, *names: str, **options: Any) -> AgentsSession:
        return connect_agents(self.address, dict.fromkeys(names, SPACES), **options)

    def begin(self) -> training_pb2.Ready:
        """Take part, once simulators have told the spaces."""
        ready = self.driver.hear(training_pb2.Ready)
        self.introduce()
        return ready

    def ask(self, *module_ids: str, rounds: int = 1) -> None:
        """Ask for rounds."""
        for _ in range(rounds):
            self.driver.tell(*self.requests(**dict.fromkeys(module_ids, 0)))

    def receipts(self, *module_ids: str) -> dict[str, training_pb2.Receipt]:
        """The next one of each module. A module may be a round ahead of the others."""
        found: dict[str, training_pb2.Receipt] = {}
        early, self._early = self._early, []
        while found.keys() != {*module_ids}:
            receipt = early.pop(0) if early else self.driver.hear(training_pb2.Receipt)
            assert receipt.module_id in module_ids
            if receipt.module_id in found:
                self._early.append(receipt)
            else:
                found[receipt.module_id] = receipt
        self._early += early
        return found

    def batch(self, module_id: str) -> EpisodeBatch:
        return self.learners[module_id].batch()[1]

    def counts(self) -> dict[str, float]:
        """What has happened at the gateway."""
        counts: dict[str, float] = self.runner._server.counts()
        return counts


def hello_of(*names: str, space: Any = SEEN, **changes: Any) -> pb.Hello:
    """The first message of a simulator with these agents."""
    agents = [
        pb.Agent(
            id=name,
            observation_space=space_to_message(space),
            action_space=space_to_message(THREE_WAYS),
        )
        for name in names
    ]
    said = {"mode": pb.REMOTE_INFERENCE, "environments": 1, "agents": agents}
    return pb.Hello(protocol_min=1, protocol_max=1, **{**said, **changes})
