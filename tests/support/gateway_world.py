"""A gateway without a run: whoever tests it says when samples are wanted, and gets the batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from gymnasium import spaces

from juggler.client import connect
from juggler.client.connection import AnySession
from juggler.client.spaces import Values
from juggler.gateway import environments, recorder
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.player import Player
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.transport import make_transport
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.tls import Tls
from juggler.runtime.connectors.building import build_runner_pipelines
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb

PATIENCE = 60.0
THREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
TWO_WAYS = spaces.Discrete(2)


@pytest.fixture(autouse=True)
def nobody_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are handed in short where a test says so, not where the machine is busy."""
    for module in (environments, recorder):
        monkeypatch.setattr(module, "STALL_SECONDS", 60.0)


class TinyPolicy(RLModule):
    """Distribution inputs as a function of the observation's three numbers and one weight."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, {})
        outputs = self.action_distribution().inputs_size
        self.register_buffer("weight", torch.sin(torch.arange(3.0 * outputs)).reshape(3, -1))

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]
        while isinstance(seen, dict):
            seen = seen["observation"]
        return {"action_dist_inputs": torch.tanh(seen @ self.weight)}


class TinyMemory(TinyPolicy):
    """The same of the sum of all observations of the episode so far."""

    def get_initial_state(self) -> Any:
        return {"sum": torch.zeros(3)}

    def _forward(self, batch: Any) -> Any:
        sums = batch["states"]["sum"][:, None] + batch["observations"].cumsum(1)  # [B, T, 3]
        inputs = torch.tanh(sums @ self.weight)
        return {"action_dist_inputs": inputs, "states": {"sum": sums[:, -1]}}


class GatewayWorld:
    """A gateway on loopback, in this process.

    Attributes:
        batches: that were made so far, with the episodes that ended.
        learned: by connectors, with each of them.
        told: people, of simulators that come and go.
    """

    def __init__(
        self,
        module: Callable[[Any, Any], RLModule] = TinyPolicy,
        *,
        rows: int = 2,
        steps: int = 4,
        token: str = "",
        connectors: dict[str, Any] | None = None,
        resume_seconds: float = 60.0,
        max_wait: float = 0.0,
        max_batch: int = 64,
        row_age: int = 3,
        refuses_logged: str = "",
        tls: Tls | None = None,
        busy: Callable[[], AbstractContextManager[None]] = nullcontext,
        address: str = "127.0.0.1:0",
    ) -> None:
        self.rows, self.steps = rows, steps
        self.batches: list[tuple[EpisodeBatch, list[tuple[float, int]]]] = []
        self.learned: list[dict[str, Any]] = []
        self.told: list[tuple[str, bool, int, int]] = []
        self.failure: BaseException | None = None
        self.player: Player | None = None
        self._module, self._connectors = module, connectors or {}
        self._row_age = row_age
        self._asked = 0
        self._new: list[tuple[dict[str, Any], Version]] = []
        settings = GatewaySettings(
            max_batch, max_wait, "a run", steps, resume_seconds, refuses_logged
        )
        self._server = GatewayServer(make_transport(token), self, settings, self._failed, busy)
        self.address = self._server.start(address, tls, False)

    def __enter__(self) -> GatewayWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert self.failure is None, self.failure

    def close(self) -> None:
        self._server.close("the test is over")

    # -- what tests do --------------------------------------------------------------------------

    def ask(self, batches: int = 1) -> None:
        self._asked += batches
        self._server.wake()

    def use(self, weight: float, version: Version) -> None:
        """Every weight is this number from now on."""
        if self.player is None:
            self.connect().close()  # tells the spaces
        assert self.player is not None
        names = {"weight": np.full((3, self._inputs), weight, np.float32)}
        self._new.append((names, version))
        self._server.wake()
        eventually(lambda: self.player is not None and self.player.version == version)

    def keep(self, version: Version) -> None:
        """The weights that there are have this version from now on."""
        assert self.player is not None
        weights = self.player._policy.weights()
        self._new.append(({name: each.copy() for name, each in weights.items()}, version))
        self._server.wake()
        eventually(lambda: self.player is not None and self.player.version == version)

    def wait_for(self, batches: int) -> None:
        eventually(lambda: len(self.batches) >= batches or self.failure)
        assert self.failure is None, self.failure

    def connect(self, observations: Any = THREE, actions: Any = TWO_WAYS, **options: Any) -> Any:
        return connect(self.address, observations, actions, **options)

    def count(self, name: str) -> float:
        return self.info().counts.get(name, 0.0)

    def info(self) -> pb.Info:
        with grpc.insecure_channel(self.address) as channel:
            ask = channel.unary_unary(
                "/juggler.simulator.v1.Simulator/GetInfo",
                request_serializer=pb.InfoRequest.SerializeToString,
                response_deserializer=pb.Info.FromString,
            )
            info: pb.Info = ask(pb.InfoRequest(), timeout=PATIENCE)
            return info

    # -- what the server asks for -----------------------------------------------------------------

    def prepare(
        self, module_id: str, agents: int, observation_space: Any, action_space: Any
    ) -> Player:
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(self._connectors), observation_space, action_space
        )
        module = self._module(connectors.module_observation_space, module_to_env.action_space)
        self._inputs = module.action_distribution().inputs_size
        policy = Actor(module, 1, 0, 0, module_to_env, connectors)
        self.player = Player(
            observation_space, action_space, policy, connectors, self.steps, self._row_age
        )
        return self.player

    def holds_up(self, module_id: str) -> bool:
        return True

    def wanted(self, module_id: str) -> int:
        assert self.player is not None
        return (
            self._asked * self.rows
            - len(self.player.environments.rows.complete)
            - self.player.environments.rows_begun
        )

    def tell(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        self.told.append((text, warning, simulators, environments))

    def patience(self) -> float:
        return 1.0

    def go_on(self) -> None:
        while self._new and self.player is not None:
            self.player.use(*self._new.pop(0))
        while (
            self.player is not None
            and self._asked
            and len(self.player.environments.rows.complete) >= self.rows
        ):
            self._asked -= 1
            batch, ended, delta = self.player.batch(self.rows)
            self.learned.append(delta)
            self.batches.append((EpisodeBatch.from_tree(batch.to_tree()), ended))

    def _failed(self, error: BaseException) -> None:
        self.failure = error


class RawSimulator:
    """One stream, and whatever messages a test wants on it."""

    def __init__(self, address: str, token: str = "") -> None:
        self._channel = grpc.insecure_channel(address)
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._answers: Iterator[pb.ToSimulator] = self._channel.stream_stream(
            "/juggler.simulator.v1.Simulator/Session",
            request_serializer=lambda message: (
                message if isinstance(message, bytes) else message.SerializeToString()
            ),
            response_deserializer=pb.ToSimulator.FromString,
        )(
            iter(self._outgoing.get, None),
            metadata=(("authorization", f"Bearer {token}"),),
            timeout=PATIENCE,
        )

    def __enter__(self) -> RawSimulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.say_no_more()
        self._channel.close()

    def say_no_more(self) -> None:
        """Close the sending side."""
        self._outgoing.put(None)

    def send(self, **message: Any) -> None:
        self._outgoing.put(pb.FromSimulator(**message))

    def send_bytes(self, message: bytes) -> None:
        self._outgoing.put(message)

    def hear(self) -> pb.ToSimulator:
        """The next message, but for what gateways say to those who wait for a second."""
        answer = self.hear_anything()
        while answer.notice.kind == pb.Notice.WAITING:
            answer = self.hear_anything()
        return answer

    def hear_anything(self) -> pb.ToSimulator:
        return next(self._answers)

    def greet(self, **changes: Any) -> pb.ToSimulator:
        self.send(hello=hello(**changes))
        return self.hear()

    def step(self, batch: pb.StepBatch) -> pb.ToSimulator:
        self.send(steps=batch)
        return self.hear()


def hello(observations: Any = THREE, actions: Any = TWO_WAYS, **changes: Any) -> pb.Hello:
    agent = pb.Agent(
        observation_space=space_to_message(observations), action_space=space_to_message(actions)
    )
    said = {
        "protocol_min": 1,
        "protocol_max": 1,
        "mode": pb.REMOTE_INFERENCE,
        "environments": 1,
        "agents": [agent],
    }
    return pb.Hello(**{**said, **changes})


def steps_of(seq: int, observations: Any = ((0.0, 0.0, 0.0),), **rows: Any) -> pb.StepBatch:
    """A batch of rows [R, 3]."""
    shown = np.asarray(observations, np.float32)
    tensors = Values(space_to_message(THREE)).tensors(shown)
    return pb.StepBatch(seq=seq, agents=[pb.Rows(observations=tensors, **rows)])


def break_off(session: AnySession) -> None:
    """Lose a session's connection, as if the network were cut."""
    session._connection._channel.close()


def eventually(what: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)
    return result
