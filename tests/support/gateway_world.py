"""Gateways without a run, and simulators that remember what they did.

A test says when samples are wanted, and gets the batches; or it has the messages of a driver and a
learner for each module.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.client import AgentsSession, connect, connect_agents
from juggler.client.connection import GatewayConnection
from juggler.client.space_values import Values
from juggler.envrunner.envrunner_program import GatewayAddress
from juggler.envrunner.rounds import TrainedResult
from juggler.gateway import module_player
from juggler.gateway.curriculum import Curriculum
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.gateway_worker import GatewayRunner
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import AgentInterface
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor
from juggler.runtime.actors.attachment import Attachment, Contact
from juggler.runtime.actors.tls import Tls
from juggler.runtime.actors.worker import to_json
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.modules.rl_module import RLModule
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from juggler.runtime.wire.v1 import training_pb2
from support.changes import Changes
from support.episode_views import episodes_of
from support.runner_world import RunnerWorld

PATIENCE = 60.0
THREE = spaces.Box(-np.inf, np.inf, (3,), np.float32)
TWO_WAYS = spaces.Discrete(2)


@pytest.fixture(autouse=True)
def nobody_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are handed in early on request only, not under load."""
    monkeypatch.setattr(module_player, "STALL_SECONDS", 60.0)


class TinyPolicy(RLModule):
    """Distribution inputs from three observed numbers and one weight."""

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
    """The same from the sum of all observations of the episode."""

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
        changes: of the gateway's state.
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
        curriculum: Curriculum | None = None,
        evaluates: bool = False,
    ) -> None:
        self.rows, self.steps = rows, steps
        self.batches: list[tuple[EpisodeBatch, list[tuple[float, int]]]] = []
        self.learned: list[dict[str, Any]] = []
        self.told: list[tuple[str, bool, int, int]] = []
        self.failure: BaseException | None = None
        self.player: ModulePlayer | None = None
        self._module, self._connectors = module, connectors or {}
        self._row_age = row_age
        self._asked = 0
        self._new: list[tuple[dict[str, Any], Version]] = []
        self.changes = Changes()
        settings = GatewaySettings(
            max_batch,
            max_wait,
            "a run",
            steps,
            resume_seconds,
            refuses_logged,
            curriculum=curriculum or Curriculum(),
            evaluates=evaluates,
        )
        self._server = GatewayServer(
            Transport(token), self, settings, self._failed, lambda: self.changes.after(busy())
        )
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
        self.changes.wait_for(lambda: self.player is not None and self.player.version == version)

    def keep(self, version: Version) -> None:
        """The weights that there are have this version from now on."""
        assert self.player is not None
        weights = self.player.policy.weights()
        self._new.append(({name: each.copy() for name, each in weights.items()}, version))
        self._server.wake()
        self.changes.wait_for(lambda: self.player is not None and self.player.version == version)

    def wait_for(self, batches: int) -> None:
        self.changes.wait_for(lambda: len(self.batches) >= batches or self.failure)
        assert self.failure is None, self.failure

    def wait_for_count(self, name: str, number: float) -> None:
        def counted() -> bool:
            with self._server.between_turns():  # to ask as a simulator does would be a change
                return self._server.counts().get(name, 0.0) == number

        self.changes.wait_for(counted, f"{name} is not {number}")

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

    def prepare(self, module_id: str, agents: int, interface: AgentInterface) -> ModulePlayer:
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(self._connectors), *interface.spaces
        )
        module = self._module(connectors.module_observation_space, module_to_env.action_space)
        self._inputs = module.action_distribution().inputs_size
        policy = Actor(module, 1, 0, 0, module_to_env, connectors)
        self.player = ModulePlayer(interface, policy, self.steps, self._row_age)
        return self.player

    def wanted(self, module_id: str) -> int:
        assert self.player is not None
        return self._asked * self.rows - len(self.player.rows.complete) - self.player.rows_begun

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        self.told.append((text, warning, simulators, environments))

    def after_turn(self) -> None:
        while self._new and self.player is not None:
            self.player.load(*self._new.pop(0))
        while (
            self.player is not None and self._asked and len(self.player.rows.complete) >= self.rows
        ):
            self._asked -= 1
            result = self.player.pop_batch(self.rows)
            assert isinstance(result, TrainedResult), result
            assert result.batch is not None
            self.learned.append(result.connector_delta)
            ended = zip(result.episode_returns, result.episode_lengths, strict=True)
            self.batches.append((EpisodeBatch.from_tree(result.batch.to_tree()), [*ended]))

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        self.changes.note()


class RawSimulator:
    """One stream, with any messages of a test."""

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
        """The next message, without gateways' messages to clients that wait."""
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


def break_off(session: GatewayConnection) -> None:
    """Lose a session's connection, as if the network were cut."""
    session._channel.close()


SEEN = spaces.Box(-np.inf, np.inf, (2,), np.float32)
THREE_WAYS = spaces.Discrete(3)
#: A simulator's agents with those spaces.
SPACES = (SEEN, THREE_WAYS)


def see(*numbers: float) -> Any:
    return np.array(numbers, np.float32)


class AgentsWorld(RunnerWorld):
    """A gateway with simulators of several agents, and its learners.

    Args:
        directory: of the learners' sockets.
        agents: by agent, the module that plays it.
        gateway: where it is told to listen.
        local: the driver started it.
        worker_id: its own.
        alone: simulators have one agent, which the only module plays.
        keys: of a `RunnerWorld`.

    Attributes:
        address: where simulators dial.
        notes: what the driver was told for people.
        changes: of the gateway's state.
    """

    def __init__(
        self,
        directory: Path,
        agents: Mapping[str, str | list[str]],
        gateway: str = "127.0.0.1:0",
        local: bool = True,
        worker_id: str = "envrunner-0",
        alone: bool = False,
        **keys: Any,
    ) -> None:
        self._gateway, self._local, self._worker_id = gateway, local, worker_id
        self.notes: SimpleQueue[str] = SimpleQueue()
        self._early: list[training_pb2.Receipt] = []  # of later rounds
        super().__init__(directory, agents, **keys)
        if alone:
            self.setup = replace(self.setup, agents={})
        self.send_frozen()
        self.driver.tell(training_pb2.Setup(config=to_json(self.setup), seed=7))
        while " takes simulators at " not in (note := f" {self.notes.get(timeout=PATIENCE)}"):
            pass
        self.address = note.partition(" at ")[2].partition(";")[0]

    def _make(self, attachment: Attachment, contact: Contact) -> Any:
        self.driver.report = lambda note: self.notes.put(note.text)  # type: ignore[method-assign]
        self.driver.worker_id = self._worker_id
        self.changes, busy = Changes(), self.driver.busy
        self.driver.busy = lambda: self.changes.after(busy())  # type: ignore[method-assign]
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
        """The next receipt of each module, perhaps a round ahead."""
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


def row_alone(agents: Sequence[str], generator: np.random.Generator) -> dict[str, str]:
    """A mapping that knows one agent."""
    return {"row": "zero"}


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


class Wandering(gymnasium.Env):
    """Episodes of known lengths and ends; observations that no other step has."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)
    lengths = ((3, True), (5, False), (1, False), (9, True))

    def __init__(self) -> None:
        self._episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._step = self._episode + 1, 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._step += 1
        length, terminates = self.lengths[self._episode % len(self.lengths)]
        over = self._step == length
        reward = float(action) + self._step / 10
        return self._shown(), reward, over and terminates, over and not terminates, {}

    def _shown(self) -> Any:
        place = self.np_random.normal()
        return np.array([self._episode, self._step, place], np.float32) / 10


@dataclass
class Played:
    """One episode as its simulator saw it."""

    observations: list[Any] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    terminated: bool = False
    truncated: bool = False


def play(
    world: GatewayWorld,
    seed: int,
    steps: int,
    at_once: bool = True,
    kind: type[Wandering] = Wandering,
    **options: Any,
) -> list[Played]:
    """One environment, for N steps and to the end of the episode.

    Args:
        world: has the gateway.
        seed: of the environment.
        steps: at least.
        at_once: an episode's end and the next one's beginning travel together.
        kind: of environment.
        options: of the session.
    """
    env, played = kind(), [Played()]
    observation, _ = env.reset(seed=seed)
    with world.connect(**options) as session:
        action = session.step(observation)
        while steps > 0 or played[-1].observations:
            episode = played[-1]
            episode.observations.append(observation.copy())
            episode.actions.append(action)
            observation, reward, terminated, truncated, _ = env.step(action)
            episode.rewards.append(reward)
            steps -= 1
            if not (terminated or truncated):
                action = session.step(observation, reward)
                continue
            final = observation.copy()
            episode.observations.append(final)
            episode.terminated, episode.truncated = terminated, truncated
            played.append(Played())
            if at_once and steps > 0:
                observation, _ = env.reset()
                action = session.step(observation, reward, terminated, truncated, final)
            else:
                assert session.step(final, reward, terminated, truncated) is None
                if steps > 0:
                    observation, _ = env.reset()
                    action = session.step(observation)
    return played[:-1]


def play_together(session: Any, count: int, steps: int) -> list[Played]:
    """N environments of one session, N steps of each; including unfinished ones.

    Args:
        session: of that many environments.
    """
    env = SyncVectorEnv([Wandering] * count, autoreset_mode=AutoresetMode.SAME_STEP)
    observations, _ = env.reset(seed=list(range(1, count + 1)))
    running, played = [Played([row.copy()]) for row in observations], []
    actions = session.step(observations)
    for _ in range(steps):
        observations, rewards, terminated, truncated, infos = env.step(actions)
        finals = infos.get("final_obs")
        for i, episode in enumerate(running):
            episode.actions.append(actions[i])
            episode.rewards.append(rewards[i])
            over = terminated[i] or truncated[i]
            episode.observations.append((finals if over else observations)[i].copy())
            if over:
                episode.terminated, episode.truncated = terminated[i], truncated[i]
                played.append(episode)
                running[i] = Played([observations[i].copy()])
        actions = session.step(observations, rewards, terminated, truncated, finals)
        assert actions.shape == (count,)
    return played + running


def in_threads(count: int, what: Any) -> list[Any]:
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = what(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[i] for i in range(count)]


def assert_recorded(batches: list[EpisodeBatch], played: list[Played]) -> None:
    """Check that batches hold the played steps, without gaps or wrong ends."""
    by_first = {tuple(each.observations[0]): each for each in played}
    parts: dict[int, list[Any]] = defaultdict(list)
    for batch in batches:
        for episode in episodes_of(batch):
            parts[episode.episode_id].append(episode)
    assert parts
    for pieces in parts.values():
        pieces.sort(key=lambda piece: piece.offset)
        expected = by_first[tuple(pieces[0].observations[0])]
        at = 0
        for piece in pieces:
            assert piece.offset == at
            stop = at + len(piece)
            np.testing.assert_array_equal(piece.observations, expected.observations[at:stop])
            np.testing.assert_array_equal(piece.actions, expected.actions[at:stop])
            np.testing.assert_array_equal(
                piece.rewards, np.array(expected.rewards[at:stop], np.float32)
            )
            over = stop == len(expected.rewards)
            assert piece.terminated == (over and expected.terminated)
            assert piece.truncated == (over and expected.truncated)
            if not piece.terminated:
                np.testing.assert_array_equal(piece.last_observation, expected.observations[stop])
            at = stop
