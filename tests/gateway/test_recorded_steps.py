"""What batches hold is what simulators did, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.gateway_world import (
    GatewayWorld,
    RawSimulator,
    TinyMemory,
    TinyPolicy,
    eventually,
    steps_of,
)
from support.playing import Played, Wandering, assert_recorded, in_threads, play, play_together

from juggler.runtime.episodes.version import Version


@pytest.mark.parametrize("at_once", [True, False])
def test_batches_hold_the_steps_of_simulators_that_are_not_in_step(at_once: bool) -> None:
    with GatewayWorld(rows=3, steps=4) as world:
        world.ask(100)
        played = in_threads(4, lambda i: play(world, i, 40 + 10 * i, at_once))
        everything = [episode for each in played for episode in each]
        steps = sum(len(episode.rewards) for episode in everything)
        eventually(lambda: world.count("steps") == steps)
        batches = [batch for batch, _ in world.batches]
        assert_recorded(batches, everything)
        # Rows that nobody filled up are all that is missing.
        assert sum(batch.live_steps for batch in batches) >= steps - 3 * 4
        returns = sorted(round(each[0], 3) for _, ended in world.batches for each in ended)
        known = sorted(round(sum(episode.rewards), 3) for episode in everything)
        assert set(returns) <= set(known)
        assert world.count("episodes") == len(everything)


def test_log_probabilities_are_those_of_the_weights_that_acted() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        world.ask(100)
        in_threads(2, lambda i: play(world, i, 40, True))
        assert world.player is not None
        policy = TinyPolicy(Wandering.observation_space, Wandering.action_space)
        for batch, _ in world.batches:
            seen = torch.from_numpy(batch.observations[batch.live])
            inputs = policy.forward_exploration({"observations": seen})["action_dist_inputs"]
            given = policy.action_distribution()(inputs)
            expected = given.log_prob(torch.from_numpy(batch.actions[batch.live])).numpy()
            np.testing.assert_allclose(batch.action_logp[batch.live], expected, rtol=1e-5)


def test_a_memory_is_each_environments_own_and_begins_with_its_episode() -> None:
    with GatewayWorld(TinyMemory, rows=2, steps=4) as world:
        world.ask(100)
        played = in_threads(3, lambda i: play(world, i, 40, True))
        by_first = {tuple(e.observations[0]): e for each in played for e in each}
        policy = TinyMemory(Wandering.observation_space, Wandering.action_space)
        started: dict[int, Played] = {}
        seen = 0
        for batch, _ in world.batches:
            for i in np.argsort(batch.segment_offsets, kind="stable"):
                row, start = batch.segment_rows[i], batch.segment_starts[i]
                offset, length = int(batch.segment_offsets[i]), int(batch.segment_lengths[i])
                identity = int(batch.segment_episodes[i])
                if offset == 0:
                    started[identity] = by_first[tuple(batch.observations[row, start])]
                whole = np.array(started[identity].observations, np.float32)
                if start == 0:
                    before = whole[:offset].sum(0)
                    kept = batch.states["module"]["sum"][row]
                    np.testing.assert_allclose(kept, before, atol=1e-5)
                inputs = policy.forward_exploration(
                    {
                        "observations": torch.from_numpy(whole[None, : offset + length]),
                        "states": {"sum": torch.zeros(1, 3)},
                    }
                )["action_dist_inputs"][0, offset:]
                actions = torch.from_numpy(batch.actions[row, start : start + length])
                expected = policy.action_distribution()(inputs).log_prob(actions)
                np.testing.assert_allclose(
                    batch.action_logp[row, start : start + length], expected, rtol=1e-4
                )
                seen += length
        assert seen > 80


class Framed(TinyPolicy):
    """Keeps the stacks of three frames that it was shown."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space)
        self.stacks: list[Any] = []

    def _forward(self, batch: Any) -> Any:
        stacks = batch["observations"]  # [B, 9]
        self.stacks += stacks.reshape(-1, 3, 3).tolist()
        return super()._forward({"observations": stacks[:, -3:]})


def test_what_connectors_add_is_each_environments_own() -> None:
    modules: list[Framed] = []

    def make(observation_space: Any, action_space: Any) -> Framed:
        modules.append(Framed(observation_space, action_space))
        return modules[0]

    pipeline = {"env_to_module": [{"use": "frame_stack", "k": 3}]}
    with GatewayWorld(make, rows=2, steps=4, connectors=pipeline) as world:
        world.ask(100)
        played = in_threads(3, lambda i: play(world, i, 30, True))
        expected = {
            tuple(shown): [episode.observations[max(0, at - back)] for back in (2, 1, 0)]
            for each in played
            for episode in each
            for at, shown in enumerate(episode.observations[:-1])
        }
        stacks = [stack for stack in modules[0].stacks if any(stack[2])]  # not the first pass
        assert len(stacks) == len(expected) > 90
        for stack in stacks:
            np.testing.assert_allclose(stack, expected[tuple(np.float32(stack[2]))])
        assert all("frame_stack" in batch.states["connectors"] for batch, _ in world.batches)


def test_a_session_of_many_environments_records_each_of_them() -> None:
    with GatewayWorld(rows=5, steps=4) as world:
        world.ask(100)
        with world.connect(environments=5) as session:
            played = play_together(session, 5, 30)
            world.wait_for(7)
            assert_recorded([batch for batch, _ in world.batches], played)
            assert sum(batch.live_steps for batch, _ in world.batches) == 5 * 28


def test_environments_of_one_session_need_not_be_in_step() -> None:
    with GatewayWorld(rows=3, steps=2) as world:
        world.ask(10)
        with world.connect(environments=3) as session:
            session.step(np.zeros((3, 3)))
            for step in range(1, 5):
                ones = np.full((1, 3), step)
                assert session.step(ones, [step], environments=[1]).shape == (1,)
            session.step(np.full((2, 3), 7), [7, 7], environments=np.array([2, 0]))
            session.step(np.full((2, 3), 8), [8, 8], environments=[2, 0])
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards.tolist() == [[1, 2], [3, 4], [7, 8]]


def test_a_step_that_took_too_long_is_counted_once() -> None:
    with GatewayWorld(rows=1, steps=4) as world:
        world.ask(2)
        with world.connect() as session:
            world.use(1.0, Version(1, 0))
            session.step(np.zeros(3))
            world.use(1.0, Version(1, 9))
            for _ in range(5):
                session.step(np.ones(3))
            world.wait_for(1)
        assert world.count("steps") == 5
        assert world.count("steps_stale") == 1
        assert world.count("steps_unrecorded") == 0
        assert world.batches[0][0].live_steps == 4


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


def test_environments_of_one_session_do_not_wait_for_each_other_for_ever() -> None:
    with GatewayWorld(rows=2, steps=4) as world:
        world.ask()
        with RawSimulator(world.address) as simulator:
            simulator.greet(environments=2)
            both = np.zeros((2, 3))
            simulator.step(steps_of(1, both))
            over = {"rewards": [1, 2], "terminated": [False, True], "paused": [False, True]}
            simulator.step(steps_of(2, both, **over))
            # One row of the two that are wanted is ready, and the other one goes on beside an
            # environment that is wanted no more.
            for seq in (3, 4):
                answer = simulator.step(steps_of(seq, both, rewards=[seq, 0]))
                assert answer.WhichOneof("message") == "actions"
            simulator.send(steps=steps_of(5, both, rewards=[5, 0]))
            world.wait_for(1)
            eventually(lambda: world.count("steps_waiting") == 1)
            assert len(world.batches) == 1, "nobody asks for another one"
        batch, _ = world.batches[0]
        assert batch.rewards.tolist() == [[2, 0, 0, 0], [1, 3, 4, 5]]


def test_steps_carry_the_weights_that_acted_and_old_rows_are_handed_in_short() -> None:
    with GatewayWorld(rows=1, steps=8) as world:
        world.ask(10)
        with world.connect() as session:
            world.use(1.0, Version(1, 0))
            session.step(np.zeros(3))
            world.use(0.5, Version(1, 1))
            for reward in range(3):
                session.step(np.ones(3), reward)
            assert session.version == (1, 1)
            world.use(0.25, Version(1, 2))
            session.step(np.ones(3), 3)
            assert session.version == (1, 2)
            world.use(0.25, Version(1, 9))
            session.step(np.ones(3), 4)
            world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.live[0].tolist() == [True] * 4 + [False] * 4
        assert batch.rewards[0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
        assert batch.segment_generations.tolist() == [1]
        assert batch.segment_updates.tolist() == [0]
        np.testing.assert_array_equal(batch.last_observations[0], np.ones(3))
        np.testing.assert_array_equal(batch.observations[0, 4:], np.ones((4, 3)))
