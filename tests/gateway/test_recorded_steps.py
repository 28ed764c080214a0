"""What batches hold is what simulators did, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from support.gateway_world import (
    GatewayWorld,
    RawSimulator,
    assert_recorded,
    eventually,
    in_threads,
    play,
    steps_of,
)

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
