"""Simulators that act by themselves, and what batches hold of it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support.gateway_world import (
    THREE,
    TWO_WAYS,
    GatewayWorld,
    TinyMemory,
    TinyPolicy,
    Wandering,
    assert_recorded,
    break_off,
    play,
    play_together,
)

from juggler.client import GatewayError
from juggler.client.session import LocalPolicy
from juggler.gateway import recordings
from juggler.runtime.connectors.mergeable_state import Moments
from juggler.runtime.episodes.batch import MOST_REWARD
from juggler.runtime.episodes.version import Version
from juggler.runtime.install_commands import installing


@pytest.fixture(scope="module")
def world() -> Any:
    """One gateway for all, as the first export takes seconds."""
    with GatewayWorld(rows=1, steps=4) as world:
        yield world


class InPlace(Wandering):
    """Shows each observation in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = np.zeros(3, np.float32)

    def _shown(self) -> Any:
        self._memory[:] = super()._shown()
        return self._memory


def test_each_step_that_came_is_in_a_batch_or_counted_as_dropped(world: GatewayWorld) -> None:
    world.use(0.4, Version(1, 0))
    with world.connect(mode="local", pull=False) as session:
        for _ in range(8):  # a fragment is out, without a request
            session.step(np.ones(3), 1.0)
        world.wait_for_count("recorded_steps_waiting", 4)
        world.use(0.4, Version(1, 4))  # farther off than the 3 that are allowed
        world.wait_for_count("steps_stale", 4)
        world.ask(100)
        session.pull()
        for _ in range(16):
            session.step(np.ones(3), 1.0)
    assert session.steps_stale == 8
    assert world.player is not None
    assert world.count("steps_stale") == 8
    assert session.steps_recorded == world.count("steps_recorded") == 23
    world.changes.wait_for(lambda: live(world) == 23 - 8)


def test_batches_hold_what_was_done_with_the_probabilities_it_was_done_with(
    world: GatewayWorld,
) -> None:
    world.use(0.4, Version(1, 5))
    world.ask(100)
    before, counted = len(world.batches), world.count("steps_recorded")
    played = play(world, 60, 60, kind=InPlace, mode="local")
    steps = sum(len(episode.rewards) for episode in played)
    assert world.count("steps_recorded") - counted == steps
    world.changes.wait_for(lambda: live(world, before) == steps)
    batches = [batch for batch, _ in world.batches[before:]]
    assert_recorded(batches, played)
    policy = TinyPolicy(THREE, TWO_WAYS)
    policy.weight.fill_(0.4)
    for batch in batches:
        seen = torch.from_numpy(batch.observations[batch.live])
        inputs = policy.forward_exploration({"observations": seen})["action_dist_inputs"]
        given = policy.action_distribution()(inputs)
        expected = given.log_prob(torch.from_numpy(batch.actions[batch.live])).numpy()
        np.testing.assert_allclose(batch.action_logp[batch.live], expected, rtol=1e-5)
        assert set(batch.segment_updates.tolist()) == {5}
    returns = [round(each[0], 3) for _, ended in world.batches[before:] for each in ended]
    assert set(returns) <= {round(sum(episode.rewards), 3) for episode in played}


def test_many_environments_act_together(world: GatewayWorld) -> None:
    world.use(0.4, Version(1, 6))
    world.ask(100)
    before = len(world.batches)
    with world.connect(environments=3, mode="local") as session:
        played = play_together(session, 3, 41)
    assert session.steps_recorded == 3 * 41
    world.changes.wait_for(lambda: live(world, before) == 3 * 41)
    for episode in played:  # running ones are cut off where their simulator left
        episode.truncated = not episode.terminated
    assert_recorded([batch for batch, _ in world.batches[before:]], played)


def test_newer_weights_are_told_of_fetched_and_named_with_what_they_did(
    world: GatewayWorld,
) -> None:
    world.use(0.4, Version(1, 10))
    world.ask(100)
    before = len(world.batches)
    with world.connect(mode="local", pull=False, seed=5) as session:
        assert session.version == (1, 10)
        session.step(np.zeros(3))
        world.use(0.5, Version(1, 11))
        for _ in range(6):
            session.step(np.ones(3), 1.0)
        session.flush()
        assert (session.newest, session.version) == ((1, 11), (1, 10))
        assert session.pull() == (1, 11)
        for _ in range(4):
            session.step(np.ones(3), 1.0)
    world.changes.wait_for(lambda: live(world, before) == 10)
    steps: Counter[int] = Counter()
    for batch, _ in world.batches[before:]:
        for version, length in zip(batch.segment_updates, batch.segment_lengths, strict=True):
            steps[int(version)] += int(length)
    # Seven by the old weights; a stretch of a row is as old as its oldest step.
    assert steps == {10: 8, 11: 2}


def test_what_was_on_its_way_when_a_connection_broke_comes_once(world: GatewayWorld) -> None:
    world.use(0.4, Version(1, 20))
    counted = world.count("steps_recorded")
    with world.connect(mode="local") as session:
        for _ in range(10):
            session.step(np.ones(3), 1.0)
        break_off(session)
        world.ask(100)
        for _ in range(10):
            session.step(np.ones(3), 1.0)
    assert session.steps_recorded == world.count("steps_recorded") - counted == 19


def test_a_return_may_be_more_than_a_reward_can_be(world: GatewayWorld) -> None:
    world.use(0.4, Version(1, 30))
    world.ask(10)
    most = MOST_REWARD
    with world.connect(mode="local") as session:
        session.step(np.ones(3))
        session.step(np.ones(3), most)
        session.step(np.ones(3), most, True, False)
    world.changes.wait_for(
        lambda: (2 * most, 2) in [episode for _, ended in world.batches for episode in ended]
    )


@pytest.mark.long
def test_what_a_policy_remembers_is_each_environments_own() -> None:
    with GatewayWorld(TinyMemory, rows=1, steps=2) as world:
        world.use(0.4, Version(1, 0))
        world.ask(100)
        policy = TinyMemory(THREE, TWO_WAYS)
        policy.weight.fill_(0.4)
        with world.connect(mode="local", seed=0) as session:
            shown = [np.full(3, i / 10, np.float32) for i in range(9)]
            for observation in shown:
                session.step(observation, 1.0)
        world.wait_for(4)
        sums = np.cumsum(shown, 0)
        for at, (batch, _) in enumerate(world.batches[:4]):
            before = sums[2 * at - 1] if at else np.zeros(3)
            np.testing.assert_allclose(batch.states["module"]["sum"][0], before, rtol=1e-5)
            inputs = torch.tanh(torch.from_numpy(sums[2 * at : 2 * at + 2]) @ policy.weight)
            given = policy.action_distribution()(inputs)
            expected = given.log_prob(torch.from_numpy(batch.actions[0]))
            np.testing.assert_allclose(batch.action_logp[0], expected, rtol=1e-4)


@pytest.mark.slow
def test_what_connectors_have_learned_goes_with_the_weights() -> None:
    filtered = {"env_to_module": [{"use": "mean_std_filter"}]}
    with GatewayWorld(rows=1, steps=4, connectors=filtered) as world:
        world.use(0.4, Version(1, 0))
        with world.connect(mode="local", pull=False, seed=0) as session:
            world.ask(100)
            moments = Moments(np.array(9.0), np.arange(3.0), np.full(3, 36.0))
            assert world.player is not None
            world.player.policy.connectors.set_state({"mean_std_filter": moments.to_tree()})
            world.use(0.4, Version(1, 1))
            session.pull()
            for i in range(5):
                session.step(np.full(3, i), 1.0)
        world.wait_for(1)
        batch, _ = world.batches[0]
        shown = (np.arange(4.0)[:, None] - np.arange(3.0)) / 2
        np.testing.assert_allclose(batch.observations[0], shown, rtol=1e-6)
        policy = TinyPolicy(THREE, TWO_WAYS)
        policy.weight.fill_(0.4)
        outputs = policy.forward_exploration({"observations": torch.from_numpy(shown).float()})
        given = policy.action_distribution()(outputs["action_dist_inputs"])
        expected = given.log_prob(torch.from_numpy(batch.actions[0]))
        np.testing.assert_allclose(batch.action_logp[0], expected, rtol=1e-4)


def test_a_policy_that_cannot_be_exported_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with GatewayWorld() as world:
        world.use(0.4, Version(1, 0))
        with pytest.raises(GatewayError, match=f"NOT_EXPORTED: .* {re.escape(installing('onnx'))}"):
            world.connect(mode="local")


def test_an_export_that_fails_in_whatever_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such operation")

    monkeypatch.setattr(recordings, "to_onnx", fails)
    with GatewayWorld() as world:
        world.use(0.4, Version(1, 0))
        with pytest.raises(GatewayError, match="NOT_EXPORTED"):
            world.connect(mode="local")


def test_a_missing_onnxruntime_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match="pip install onnxruntime"):
        LocalPolicy(1, None).use(b"", (0, 0))


def live(world: GatewayWorld, since: int = 0) -> int:
    return sum(batch.live_steps for batch, _ in world.batches[since:])
