"""Logged data, and what recordings of any kind may not say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from support.gateway_world import (
    THREE,
    GatewayWorld,
    RawSimulator,
    eventually,
)

from juggler.client import GatewayError
from juggler.client.space_values import Values
from juggler.driver.config import RunConfig
from juggler.driver.workers.worker_registry import WorkerRegistry
from juggler.envrunner.setup import EnvRunnerSetup
from juggler.gateway import module_player, recordings
from juggler.gateway.gateway_worker import _why_not_logged
from juggler.runtime.actors.worker import from_json
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


def test_a_row_to_which_nothing_comes_is_handed_in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_player, "STALL_SECONDS", 0.3)
    with GatewayWorld(rows=1, steps=8) as world:
        world.use(1.0, Version(1, 0))
        world.ask(1)
        with world.connect(mode="logged") as session:
            session.record(FIVE, [0] * 5, [1] * 5, [-1] * 5)
            session.flush()
            world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.live_steps == 5
        assert not batch.truncated.any()


def test_an_episode_that_waits_cuts_none() -> None:
    with GatewayWorld(rows=1, steps=8) as world:
        world.use(1.0, Version(1, 0))
        with world.connect(mode="logged") as session:
            for _ in range(3):  # each message has all that wait looked at
                session.record(FIVE, [0] * 5, [1] * 5, [-1] * 5, terminated=True)
            eventually(lambda: world.count("recorded_steps_waiting") == 15)
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
        (recording(environment=1), "UNKNOWN_ENVIRONMENT", "announced 0 to 0"),
        (recording(agent=1), "UNKNOWN_AGENT", "agent 0 alone"),
        (recording(infos=[1] * 5), "WRONG_SHAPE", "5 infos for 5 steps, and the hello has 0 info"),
        (recording(starts=False), "OUT_OF_ORDER", "is in no episode"),
        (recording(seq=3), "OUT_OF_ORDER", "where 1 comes next"),
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
    assert eventually(lambda: world.count("recorded_steps_waiting") == 0)
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
    worker: Any = type("Worker", (), {"role": "envrunner", "index": 0})
    told = from_json(registry._config_for(worker), EnvRunnerSetup)
    return _why_not_logged(told.modules["default"])
