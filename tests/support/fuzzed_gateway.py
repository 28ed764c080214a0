"""A gateway without network and clock, with books of its own."""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gymnasium import spaces

from juggler.client.space_values import Values
from juggler.envrunner.finiteness import check_finite
from juggler.envrunner.rounds import TrainedResult
from juggler.gateway import gateway_server, module_player, recordings, sessions, step_batches
from juggler.gateway.agents import ModuleAssignment
from juggler.gateway.gateway_server import GatewayServer
from juggler.gateway.module_player import ModulePlayer
from juggler.gateway.recordings import Publisher
from juggler.gateway.session_manager import GatewaySettings
from juggler.gateway.sessions import AgentInterface
from juggler.gateway.transport import Transport
from juggler.runtime.acting.actor import Actor
from juggler.runtime.connectors.config import ConnectorsConfig
from juggler.runtime.connectors.pipelines import build_runner_pipelines
from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb
from support.episode_views import episodes_of
from support.gateway_world import THREE, TinyMemory, TinyPolicy


@dataclass(eq=False)
class Episode:
    """As its simulator saw it.

    Attributes:
        cut: it is over without an end of its own.
        closed: a batch has had a step that was its last.
        id: in batches.
    """

    steps: list[Step] = field(default_factory=list)
    cut: bool = False
    closed: bool = False
    id: int = -1

    @property
    def sent(self) -> list[Step]:
        """What the gateway knows of it."""
        return [step for step in self.steps if step.sent]

    @property
    def total(self) -> tuple[float, int]:
        """Its return, and its length."""
        return sum(step.reward for step in self.steps), len(self.steps)


@dataclass(eq=False)
class Step:
    """One that a simulator took.

    Attributes:
        reward: no other step has it.
        version: of the weights that acted; None: unknown.
        logp: that the simulator gave.
        sent: the gateway got it.
        may_miss: it may be in no batch, but in a counter.
        seen: it is in a batch.
    """

    simulator: Any
    episode: Episode
    offset: int
    observation: Any
    action: int
    reward: float
    after: Any
    version: Version | None
    ends: str = ""
    logp: float | None = None
    sent: bool = False
    may_miss: bool = False
    seen: bool = False


class Books:
    """Of one gateway.

    Args:
        remembers: the policy acts on the sum of what it saw in an episode.
        contexts: connectors add the frame before, and the last action and reward.
        masked: observations have masks.

    Attributes:
        known: steps that simulators took, by their rewards.
        ended: returns and lengths of episodes that were handed out.
        live: steps that were.
        wild: a simulator has sent damaged messages, so its actions are unknown.
        weights: that there were.
    """

    def __init__(self, remembers: bool, contexts: bool, masked: bool) -> None:
        self.remembers, self.contexts, self.masked = remembers, contexts, masked
        self.known: dict[float, Step] = {}
        self.ended: Counter[tuple[float, int]] = Counter()
        self.live = 0
        self.wild = False
        self.weights: dict[Version, Any] = {}

    def legal(self, observation: Any) -> Any:
        """[2] legal actions: the second one for some observations only."""
        return np.array([True, not self.masked or observation[0] > 0])

    def check_batch(self, batch: EpisodeBatch) -> None:
        """It is what simulators did."""
        EpisodeBatch.from_tree(batch.to_tree())
        check_finite(batch)
        self.live += batch.live_steps
        for i, episode in enumerate(episodes_of(batch)):
            found = [self.known.get(float(reward)) for reward in episode.rewards]
            assert self.wild or None not in found, "a step that was never made"
            if None in found or any(step.simulator.wild for step in found):
                continue
            first, last = found[0], found[-1]
            assert first.episode.id in (-1, episode.episode_id)
            first.episode.id = episode.episode_id
            assert found == first.episode.steps[episode.offset : episode.offset + len(found)]
            assert first.version in (None, Version(*episode.version))
            assert episode.terminated == (last.ends == "terminated")
            over = last.episode.cut or last.simulator.may_be_over
            rest = last.episode.sent[episode.offset + len(found) :]  # waited when it was over
            cut = over and not last.ends and all(s.may_miss and not s.seen for s in rest)
            truncated = last.ends == "truncated" or (cut and episode.truncated)
            assert episode.truncated == truncated
            assert not last.episode.closed, "an episode goes on that was truncated"
            last.episode.closed = episode.truncated
            if not episode.terminated:
                np.testing.assert_array_equal(self._plain(episode.last_observation), last.after)
            shown = self._plain(episode.observations)
            for step, observation, action, logp in zip(
                found, shown, episode.actions, episode.action_logp, strict=True
            ):
                assert not step.seen, "a step is in batches twice"
                step.seen = True
                np.testing.assert_array_equal(observation, step.observation)
                assert action == step.action
                expected = self._log_probability(step) if step.logp is None else step.logp
                np.testing.assert_allclose(logp, expected, rtol=1e-3, atol=1e-5)
            if batch.segment_starts[i] == 0:
                self._check_states(batch, int(batch.segment_rows[i]), first)

    def _plain(self, observations: Any) -> Any:
        return observations["observation"] if self.masked else observations

    def _log_probability(self, step: Step) -> Any:
        """Under the weights that acted."""
        seen = [each.observation for each in step.episode.steps[: step.offset + 1]]
        shown = np.sum(seen, 0) if self.remembers else seen[-1]
        inputs = torch.tanh(torch.from_numpy(shown @ self.weights[step.version]))
        inputs[~torch.from_numpy(self.legal(step.observation))] = -torch.inf
        return torch.log_softmax(inputs, 0)[step.action].item()

    def _check_states(self, batch: EpisodeBatch, row: int, first: Step) -> None:
        """That what was known before a row is what came before it."""
        before = first.episode.steps[: first.offset]
        if self.remembers:
            sums = np.sum([step.observation for step in before] or [np.zeros(3)], 0)
            np.testing.assert_allclose(batch.states["module"]["sum"][row], sums, atol=1e-4)
        if self.contexts:
            known = batch.states["connectors"]
            frame = before[-1].observation if before else first.observation
            np.testing.assert_array_equal(known["frame_stack"][row, 0], frame)
            last = known["previous_actions_and_rewards"]
            given = last["previous_action"][row], last["previous_reward"][row]
            assert given == ((before[-1].action, before[-1].reward) if before else (0, 0))


RESUME_SECONDS = 10.0
STALL_SECONDS = 1.0
MOST_UPDATES = 3  # that weights may be behind


class _Bounded:
    """Damaged messages hold any number, but the policy's outputs stay finite."""

    def _forward(self, batch: Any) -> Any:
        seen = batch["observations"]
        seen = seen["observation"] if isinstance(seen, dict) else seen
        return super()._forward({**batch, "observations": seen[..., -3:].clamp(-99, 99)})  # type: ignore[misc]


class BoundedPolicy(_Bounded, TinyPolicy):
    pass


class BoundedMemory(_Bounded, TinyMemory):
    pass


CONTEXTS = {"env_to_module": [{"use": "frame_stack", "k": 2}, "previous_actions_and_rewards"]}
MASKED = spaces.Dict({"observation": THREE, "action_mask": spaces.MultiBinary(2)})
KINDS = (
    (BoundedPolicy, {}, THREE),
    (BoundedMemory, {}, THREE),
    (BoundedPolicy, CONTEXTS, THREE),
    (BoundedPolicy, {}, MASKED),
)


class Stream:
    """Stands for the transport's."""

    def __init__(self) -> None:
        self.session: Any = None
        self.peer, self.dialed = "ipv4:127.0.0.1:1", "127.0.0.1:2"
        self.unread: deque[pb.ToSimulator] = deque()
        self.closed = False

    def send(self, message: bytes) -> None:
        if not self.closed:
            self.unread.append(pb.ToSimulator.FromString(message))

    def close(self) -> None:
        self.closed = True


class FakeTime:
    """Replaces `time` in modules, with a clock that strikes on request."""

    def __init__(self) -> None:
        self.now, self.due = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def read_steps(self, *given: Any) -> Any:
        """As the server has it; they have come now."""
        read = step_batches.read_steps(*given)
        read.arrived = self.now
        return read

    def within(self, seconds: float) -> None:
        self.due = min(self.due, self.now + seconds)

    def close(self) -> None:
        pass


class InstantPublisher(Publisher):
    """The model is never run, so it need not be one."""

    ready = True

    def begin(self, done: Any) -> None:
        done()

    def _with_weights(self) -> bytes:
        return b"a model"


@contextmanager
def fuzzed_gateway(rng: random.Random, several: bool) -> Iterator[FuzzedGateway]:
    """One of any kind.

    Args:
        rng: chooses.
        several: for simulators with several agents.
    """
    time = FakeTime()
    with ExitStack() as stack:
        for module in (gateway_server, module_player, recordings, sessions):
            stack.enter_context(patch.object(module, "time", time))
        stack.enter_context(patch.object(module_player, "STALL_SECONDS", STALL_SECONDS))
        stack.enter_context(patch.object(recordings, "Publisher", InstantPublisher))
        stack.enter_context(patch.object(gateway_server, "read_steps", time.read_steps))
        yield FuzzedGateway(rng, time, several)


class FuzzedGateway(Books):
    """A gateway with fuzzed simulators, and books beside it.

    Attributes:
        messages: that were taken.
        several: simulators may have several agents.
        env_ended: return and length of the environments' episodes that ended, if they may.
        infos: by name, means over the steps of episodes that ended.
    """

    def __init__(self, rng: random.Random, time: FakeTime, several: bool) -> None:
        self.rng, self.time = rng, time
        self.told: list[tuple[str, bool, int, int]] = []
        self.rows, self.asked = rng.choice((1, 1, 2, 3)), 0
        self.steps = rng.choice((1, 2, 4, 7))
        self.module, self.connectors, self.space = rng.choice(KINDS)
        super().__init__(self.module is BoundedMemory, bool(self.connectors), self.space is MASKED)
        self.messages = 0
        self.failures: list[BaseException] = []
        self._new: list[tuple[Any, Version]] = []
        self.player: ModulePlayer | None = None
        wait = rng.choice((0.0, 0.05))
        settings = GatewaySettings(
            rng.choice((1, 3, 64)),
            wait,
            "a run",
            self.steps,
            RESUME_SECONDS,
            casting=ModuleAssignment({"agent *": "default"} if several else {}),
        )
        self.several = several
        self.env_ended: list[tuple[float, int]] = []
        self.infos: dict[str, Counter[float]] = defaultdict(Counter)
        transport = Transport("")
        self.server = GatewayServer(transport, self, settings, self.failures.append)  # type: ignore[arg-type]
        self.server._clock = time  # type: ignore[assignment]

    # -- what happens to it ---------------------------------------------------------------------

    def hear(self, said: list[tuple[Stream, bytes | None]]) -> None:
        """Messages come at once; None: nothing more comes."""
        with self.server.at_work():
            for stream, message in said:
                if message is None:
                    self.server.disconnected(stream)  # type: ignore[arg-type]
                elif not stream.closed:
                    self.messages += 1
                    self.server.received(stream, message)  # type: ignore[arg-type]
            self.server.turn()
        self.wait(0.0)

    def tensors(self, observations: list[Any], masks: bool = True) -> list[pb.NamedTensor]:
        """Observations [R, 3] as simulators send them."""
        shown: Any = np.array(observations, np.float32)  # [R, 3]
        if self.space is MASKED:
            legal = np.array([self.legal(each) for each in shown]) * masks  # [R, 2]
            shown = {"observation": shown, "action_mask": legal.astype(np.int8)}
        return Values(space_to_message(self.space)).tensors(shown)

    def wait(self, seconds: float) -> None:
        """Time passes, and what is due is done."""
        end = self.time.now + seconds
        while self.time.due <= end:
            self.time.now = max(self.time.now, self.time.due) + 1e-6  # never too early by a bit
            self.time.due = self.time.now + 1e9
            self.server._strikes()
            self.check()
        self.time.now = max(self.time.now, end)

    def use(self, version: Version) -> None:
        numbers = [self.rng.uniform(-1, 1) for _ in range(6)]
        self.weights[version] = np.array(numbers, np.float32).reshape(3, 2)
        self._new.append(({"weight": self.weights[version]}, version))
        self.server.wake()

    @property
    def newest(self) -> Version:
        """Weights that were handed in."""
        return max(self.weights, default=Version(0, 0))

    @property
    def most_updates(self) -> int:
        """Updates of possible weights; a new generation may have fewer."""
        assert self.player is not None
        return max(self.player.version.update, self.newest.update)

    # -- what the server asks for -----------------------------------------------------------------

    def prepare(self, module_id: str, agents: int, interface: AgentInterface) -> ModulePlayer:
        connectors, module_to_env = build_runner_pipelines(
            ConnectorsConfig.parse(self.connectors), *interface.spaces
        )
        module = self.module(connectors.module_observation_space, module_to_env.action_space)
        self.weights[Version(0, 0)] = module.weight.numpy().copy()
        policy = Actor(module, 1, 0, self.rng.randrange(99), module_to_env, connectors)
        self.player = ModulePlayer(interface, policy, self.steps, MOST_UPDATES)
        return self.player

    def wanted(self, module_id: str) -> int:
        assert self.player is not None
        kept = self.player
        return self.asked * self.rows - len(kept.rows.complete) - kept.rows_begun

    def report_line(self, text: str, warning: bool, simulators: int, environments: int) -> None:
        self.told.append((text, warning, simulators, environments))

    def after_turn(self) -> None:
        player = self.player
        if player is None:
            return
        while self._new:
            player.load(*self._new.pop(0))
        self.pop_played()
        while self.asked and len(player.rows.complete) >= self.rows:
            self.asked -= 1
            result = player.pop_batch(self.rows)
            assert isinstance(result, TrainedResult), result
            self.ended.update(zip(result.episode_returns, result.episode_lengths, strict=True))
            if result.batch is not None:
                self.check_batch(result.batch)

    def pop_played(self) -> None:
        """Take what came of environments' episodes."""
        played = self.server.manager.pop_played()
        self.env_ended += zip(played.env_returns, played.env_lengths, strict=True)
        for name, episodes in played.infos.items():
            self.infos[name.rpartition("/")[2]].update(each.mean for each in episodes)

    # -- the books ------------------------------------------------------------------------------

    def check(self) -> None:
        """After each step: nothing was raised, and every step is somewhere."""
        if self.failures:
            raise self.failures[0]
        pb.Info.FromString(self.server.info())
        if self.player is None:
            return
        counts, kept = self.server.counts(), self.player
        open_rows = kept.of["row"] >= 0
        accounted = (
            self.live
            + int(kept.of["step"][open_rows].sum())
            + int(kept.rows.columns["lengths"][kept.rows.complete].sum())
            + self.missing(counts)
            + counts["recorded_steps_waiting"]
        )
        assert accounted == counts.get("steps", 0) + counts.get("steps_recorded", 0), counts
        assert kept.rows.begun == int(open_rows.sum()), "a row has no owner"
        everyone = self.server.manager.sessions.by_id.values()
        assert len(kept) == sum(len(s.agents) * s.environments for s in everyone)

    def missing(self, counts: dict[str, float]) -> float:
        return sum(counts.get(f"steps_{name}", 0) for name in ("uncollected", "stale", "lost"))
