"""Logged data, recordings, and batches: what they hold is what simulators did."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from gymnasium import spaces
from support.gateway_world import (
    PATIENCE,
    THREE,
    GatewayWorld,
    Played,
    RawSimulator,
    in_threads,
    play,
    steps_of,
)
from support.random_episodes import random_episodes

from juggler.client import GatewayError
from juggler.client.space_values import Values
from juggler.driver.config import RunConfig
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.gateway import episode_log, recordings
from juggler.gateway.episode_log import EpisodeLog, EpisodeWriter
from juggler.gateway.gateway_worker import _why_not_logged
from juggler.runtime.actors.worker import from_json
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.episodes.version import Version
from juggler.runtime.wire.spaces import space_to_message
from juggler.runtime.wire.v1 import simulator_pb2 as pb

FIVE = np.arange(18, dtype=np.float32).reshape(6, 3)  # [L + 1, 3] of five steps
DONE: dict[str, Any] = {"rewards": [1, 2, 3, 4, 5], "action_logp": [-0.5] * 5}


def test_logged_episodes_become_rows_with_their_probabilities() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        world.use(1.0, Version(1, 7))
        world.ask(10)
        with world.connect(mode="logged") as session:
            logp = np.log([0.1, 0.2, 0.3, 0.4, 0.5])
            session.record(FIVE, [0, 1, 0, 1, 1], [1, 2, 3, 4, 5], logp, terminated=True)
            session.record(FIVE[:4] + 50, [1, 1, 1], [6, 7, 8], logp[:3], truncated=True)
        world.wait_for(1)
        batch, ended = world.batches[0]
        assert batch.rewards.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert batch.terminated.nonzero()[1].tolist() == [0]
        assert batch.truncated.nonzero()[1].tolist() == [3]
        np.testing.assert_array_equal(batch.final_observations, FIVE[3:4] + 50)
        np.testing.assert_array_equal(batch.observations[0], FIVE[:4])
        np.testing.assert_allclose(batch.action_logp[0], logp[:4], rtol=1e-6)
        assert batch.actions.tolist() == [[0, 1, 0, 1], [1, 1, 1, 1]]
        assert batch.segment_offsets.tolist() == [0, 4, 0]
        # What another policy got says nothing of ours, and its age is not known.
        assert ended == []
        assert set(batch.segment_updates.tolist()) == {7}


def test_an_episode_that_waits_cuts_none() -> None:
    with GatewayWorld(rows=1, steps=8) as world:
        world.use(1.0, Version(1, 0))
        with world.connect(mode="logged") as session:
            for _ in range(3):  # each message has all that wait looked at
                session.record(FIVE, [0] * 5, [1] * 5, [-1] * 5, terminated=True)
            world.wait_for_count("recorded_steps_waiting", 15)
            world.ask(2)
            session.flush()
        assert world.count("episodes") == 3
        assert world.count("episodes_cut") == 0


def test_connectors_learn_from_every_observation_once() -> None:
    connectors = {"env_to_module": ["mean_std_filter"]}
    with GatewayWorld(rows=1, steps=5, connectors=connectors) as world:
        world.use(1.0, Version(1, 0))
        world.ask(1)
        with world.connect(mode="logged") as session:
            session.record(FIVE[:4], [0] * 3, [1] * 3, [-1] * 3)
            session.record(FIVE[3:], [0] * 2, [1] * 2, [-1] * 2, starts=False, terminated=True)
        world.wait_for(1)
        moments = world.learned[0]["mean_std_filter"]
        assert moments["count"] == len(FIVE)
        np.testing.assert_allclose(moments["mean"], FIVE.mean(0))


def recording(seq: int = 1, **changes: Any) -> pb.Recording:
    """Five steps, whole and right but for the changes."""
    seen = Values(space_to_message(THREE)).tensors(changes.pop("seen", FIVE))
    acted = Values(space_to_message(spaces.Discrete(9))).tensors(changes.pop("acted", [0] * 5))
    said = {"observations": seen, "actions": acted, "starts": True, **DONE, **changes}
    return pb.Recording(seq=seq, **said)


@pytest.fixture(scope="module")
def world() -> Any:
    with GatewayWorld() as world:
        world.use(1.0, Version(1, 0))
        yield world


HOLE = np.where(np.arange(18).reshape(6, 3) == 7, np.nan, FIVE)


@pytest.mark.parametrize(
    ("said", "code", "text"),
    [
        (recording(seen=HOLE), "NOT_FINITE", "step 2: the observation is NaN"),
        (recording(seen=FIVE[:5]), "WRONG_SHAPE", "[6, 3], as the space says"),
        (recording(acted=[0] * 6), "WRONG_SHAPE", "actions at the root"),
        (
            recording(acted=[0, 0, 2, 0, 0]),
            "WRONG_SHAPE",
            "the action of step 2 holds 2, which is not in its space",
        ),
        (recording(rewards=[]), "WRONG_SHAPE", "without rewards"),
        (recording(rewards=[float("nan")] * 5), "NOT_FINITE", "the reward of step 0 is nan"),
        (recording(action_logp=[float("-inf")] * 5), "NOT_FINITE", "action_logp [0] is -inf"),
        (recording(action_logp=[-1, 0.9, 0, 0, 0]), "NO_LOG_PROBABILITIES", "[1] is 0.89"),
        (recording(action_logp=[]), "NO_LOG_PROBABILITIES", "nothing can be learned"),
        (recording(action_logp=[-1.0]), "NO_LOG_PROBABILITIES", "1 action_logp for 5 steps"),
        (recording(environment=1), "UNKNOWN_ENVIRONMENT", "environment 1: the hello announced"),
        (recording(agent=1), "UNKNOWN_AGENT", "a recording of agent 1: this session has"),
        (recording(infos=[1] * 5), "WRONG_SHAPE", "5 infos for 5 steps, and the hello has 0 info"),
        (recording(starts=False), "OUT_OF_ORDER", "is in no episode"),
        (recording(seq=3), "OUT_OF_ORDER", "but 1 comes next"),
        (
            recording(version=pb.PolicyVersion(generation=1, update=0)),
            "UNKNOWN_VERSION",
            "were never sent",
        ),
        (recording(version=None), "UNKNOWN_VERSION", "without a version"),
    ],
)
def test_a_wrong_recording_ends_its_session(
    world: GatewayWorld, said: pb.Recording, code: str, text: str
) -> None:
    mode = pb.LOCAL_INFERENCE if code == "UNKNOWN_VERSION" else pb.LOGGED_DATA
    recorded = world.count("steps_recorded")
    with RawSimulator(world.address) as simulator:
        assert simulator.greet(mode=mode).HasField("welcome")
        simulator.send(recording=said)
        error = simulator.hear().error
        assert pb.Error.Code.Name(error.code) == code
        assert text in error.message
        assert error.seq == said.seq
    assert world.count("steps_recorded") == recorded


def test_a_policy_that_the_run_does_not_have_is_refused_and_not_another_one_sent() -> None:
    with GatewayWorld() as world, RawSimulator(world.address) as simulator:
        assert simulator.greet(mode=pb.LOCAL_INFERENCE).HasField("welcome")
        simulator.send(policy=pb.PolicyRequest(policy="defalt"))
        error = simulator.hear().error
        assert pb.Error.Code.Name(error.code) == "NOT_SERVED"
        assert "'defalt' is asked for, and this run has 'default'" in error.message


def test_actions_that_a_mask_forbids_are_refused() -> None:
    masked = spaces.Dict(action_mask=spaces.MultiBinary(2), observation=THREE)
    with GatewayWorld(rows=1, steps=4) as world:
        session = world.connect(masked, mode="logged")
        masks = np.array([[1, 1], [0, 1], [1, 1]], np.int8)
        seen = {"observation": FIVE[:3], "action_mask": masks}
        with (
            pytest.raises(GatewayError, match="step 1"),
            session,
        ):
            session.record(seen, [0, 0], [1, 1], [-1, -1])


@pytest.mark.parametrize("mode", [pb.LOGGED_DATA, pb.LOCAL_INFERENCE])
def test_a_session_says_what_its_mode_has(world: GatewayWorld, mode: pb.Mode) -> None:
    with RawSimulator(world.address) as simulator:
        assert simulator.greet(mode=mode).HasField("welcome")
        simulator.send(steps=pb.StepBatch(seq=1))
        error = simulator.hear().error
        assert pb.Error.Code.Name(error.code) == "WRONG_MODE"
        assert f"this session is {pb.Mode.Name(mode)}" in error.message


def test_more_than_can_be_held_is_refused(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "_MOST_WAITING_BYTES", 300)
    session = world.connect(mode="logged")
    session.record(FIVE, [0] * 5, [1] * 5, [-1] * 5, terminated=True)
    session.record(FIVE, [0] * 5, [1] * 5, [-1] * 5, terminated=True)
    with pytest.raises(GatewayError, match="FULL"):
        session.flush()
    session.close()
    world.wait_for_count("recorded_steps_waiting", 0)
    assert 0 < world.count("steps_lost") < 10


def test_ppo_refuses_logged_data_and_says_why() -> None:
    with GatewayWorld(refuses_logged=why_not("ppo")) as world:
        with pytest.raises(GatewayError, match=r"CANNOT_LEARN.*ppo"):
            world.connect(mode="logged")
        assert pb.LOGGED_DATA not in world.info().modes
    assert why_not("impala") == why_not("appo") == ""


def why_not(algorithm: str) -> str:
    """As a gateway of a run with that algorithm says."""
    registry = WorkerRegistry(RunConfig.from_flat({"algorithm": algorithm}))
    about = {"role": "envrunner", "index": 0, "worker_id": "envrunner-0"}
    told = from_json(registry._setup(cast(Any, SimpleNamespace(**about))).config, EnvRunnerSetup)
    return _why_not_logged(told.modules["default"])


# Whole episodes of simulators are recorded as these had them.


FILTERED = {"env_to_module": ["mean_std_filter"]}


def log_of(world: GatewayWorld) -> list[RecordedEpisode]:
    """The episodes that will be recorded there."""
    world.connect().close()  # tells the spaces
    player, found = world.player, []
    assert player is not None
    both = player.policy, player.interface.spaces[1]
    player.episode_log = EpisodeLog(*both, found.append)
    return found


def assert_are(
    found: list[RecordedEpisode], played: list[Played], *, all_is_sent: bool = False
) -> None:
    """The same episodes, in any order.

    Unless all is sent, clients send no observation after a step that terminated.
    """
    by_first = {tuple(np.float32(each.observations[0])): each for each in played}
    assert len(by_first) == len(played) == len(found)
    for episode in found:
        expected = by_first[tuple(episode.observations[0])]
        seen = np.array(expected.observations)
        if expected.terminated and not all_is_sent:
            seen[-1] = seen[-2]
        np.testing.assert_array_equal(episode.observations, seen)
        np.testing.assert_array_equal(episode.actions, expected.actions)
        np.testing.assert_allclose(episode.rewards, expected.rewards, rtol=1e-6)
        assert episode.terminated == expected.terminated


@pytest.mark.parametrize("at_once", [True, False])
def test_what_the_policy_did_is_recorded_whichever_steps_are_learned_from(at_once: bool) -> None:
    with GatewayWorld(rows=3, steps=4, connectors=FILTERED) as world:
        found = log_of(world)
        world.ask(100)
        played = in_threads(4, lambda i: play(world, i, 40 + 10 * i, at_once))
        everything = [episode for each in played for episode in each]
        world.changes.wait_for(lambda: len(found) >= len(everything))
        assert_are(found, everything)


def test_a_last_observation_that_is_ignored_is_not_recorded_either() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        found = log_of(world)
        world.ask(10)
        finals = steps_of(1, ((float("nan"), 0, 0), (7, 7, 7))).agents[0].observations
        shown = ((1, 1, 1), (2, 2, 2))
        with RawSimulator(world.address) as simulator:
            simulator.greet(environments=2)
            simulator.step(steps_of(1, shown))
            ends: dict[str, Any] = {"terminated": [True, False], "truncated": [True, True]}
            last = {"final_rows": [0, 1], "final_observations": finals}
            simulator.step(steps_of(2, shown, **ends, **last))
        first, second = found
        assert first.observations.tolist() == [[1, 1, 1]] * 2
        assert second.observations.tolist() == [[2, 2, 2], [7, 7, 7]]


def test_what_others_did_is_recorded() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        found = log_of(world)
        world.use(1.0, Version(1, 0))
        world.ask(10)
        seen = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
        rest: dict[str, Any] = {"action_logp": [-0.5] * 2}
        with world.connect(mode="logged") as session:
            session.record(seen[:3], [0, 1], [1, 2], **rest)
            session.record(seen[2:5], [1, 1], [3, 4], starts=False, terminated=True, **rest)
            session.record(seen[5:8], [0, 0], [5, 6], truncated=True, **rest)
            session.record(seen[8:11], [0, 0], [5, 6], **rest)  # and leaves
        world.wait_for_count("steps_recorded", 8)
        expected = [
            Played(list(seen[:5]), [0, 1, 1, 1], [1, 2, 3, 4], terminated=True),
            Played(list(seen[5:8]), [0, 0], [5, 6], truncated=True),
        ]
        assert_are(found, expected, all_is_sent=True)


class SlowDisk:
    """Stands for `SampledEpisodes` on a disk that waits until it may write."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.completed = threading.Event()
        self.written: list[Any] = []
        self.ended: list[str] = []
        self.refuses = False

    def add(self, episode: Any) -> None:
        assert self.may_write.wait(PATIENCE)
        if self.refuses:
            raise MemoryError
        self.written.append(episode)

    def complete_if_old(self) -> None:
        pass

    def complete(self) -> None:
        self.written.append("complete")
        self.completed.set()

    def end(self, why: str) -> None:
        self.ended.append(why)


def test_no_turn_waits_for_the_disk_and_all_is_written_at_the_end() -> None:
    disk: Any = SlowDisk()
    writer = EpisodeWriter(disk)
    episodes = random_episodes([3] * 200)
    for episode in episodes:
        writer.add(episode)
    assert disk.written == []
    disk.may_write.set()
    writer.close()
    assert [*episodes, "complete"] == disk.written


def test_an_error_while_episodes_are_written_reaches_the_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode_log, "_MOST_BYTES", 1)
    disk: Any = SlowDisk()
    disk.refuses = True
    disk.may_write.set()
    writer = EpisodeWriter(disk)
    first, second = random_episodes([3] * 2)
    writer.add(first)
    with pytest.raises(MemoryError):
        writer.add(second)
    with pytest.raises(MemoryError):
        writer.close()


def test_a_disk_that_hangs_holds_neither_a_turn_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episode_log, "_MOST_BYTES", 1)
    monkeypatch.setattr(episode_log, "_DISK_SECONDS", 0.01)
    disk: Any = SlowDisk()
    writer = EpisodeWriter(disk)
    first, *others = random_episodes([3] * 3)
    writer.add(first)
    for episode in others:
        writer.add(episode)
    (why,) = disk.ended
    assert "disk" in why
    with pytest.raises(TimeoutError, match="lost"):
        writer.close()
    disk.may_write.set()
    assert disk.completed.wait(PATIENCE)
    assert disk.written == [first, "complete"]


# What batches hold is what simulators did, step by step.


def test_connectors_learn_nothing_from_rows_that_pause() -> None:
    connectors = {"env_to_module": ["mean_std_filter"]}
    with GatewayWorld(rows=2, steps=1, connectors=connectors) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            simulator.greet(environments=2)
            simulator.step(steps_of(1, [[1, 1, 1], [2, 2, 2]]))
            over = {"rewards": [1, 2], "terminated": [False, True], "paused": [False, True]}
            simulator.send(steps=steps_of(2, [[3, 3, 3], [9, 9, 9]], **over))
            world.wait_for(1)
        moments = world.learned[0]["mean_std_filter"]
        assert moments["count"] == 3
        np.testing.assert_allclose(moments["mean"], [2, 2, 2])
