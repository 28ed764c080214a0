"""Simulators that act by themselves: what they hand in is what batches hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gateway_world import THREE, TWO_WAYS, GatewayWorld, TinyMemory, TinyPolicy, eventually
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from test_recorded_steps import Played, Wandering, assert_recorded

from juggler.client import GatewayError
from juggler.client.model import Model
from juggler.runtime.episodes.version import Version


@pytest.fixture(scope="module")
def world() -> Any:
    """One gateway for all, as the first export takes seconds."""
    with GatewayWorld(rows=2, steps=4) as world:
        yield world


def act(world: GatewayWorld, steps: int, **options: Any) -> list[Played]:
    """One environment, for so many steps and to the end of the episode."""
    env, played = Wandering(), [Played()]
    observation, _ = env.reset(seed=steps)
    with world.connect(mode="local", **options) as session:
        action = session.step(observation)
        while steps > 0 or played[-1].observations:
            episode = played[-1]
            episode.observations.append(observation)
            episode.actions.append(action)
            observation, reward, terminated, truncated, _ = env.step(action)
            episode.rewards.append(reward)
            steps -= 1
            if not (terminated or truncated):
                action = session.step(observation, reward)
                continue
            episode.observations.append(observation)
            episode.terminated, episode.truncated = terminated, truncated
            played.append(Played())
            final = observation
            observation, _ = env.reset()
            if steps > 0:
                action = session.step(observation, reward, terminated, truncated, final)
            else:
                assert session.step(final, reward, terminated, truncated) is None
    return played[:-1]


def test_batches_hold_what_was_done_with_the_probabilities_it_was_done_with(
    world: GatewayWorld,
) -> None:
    world.use(0.4, Version(1, 0))
    world.ask(100)
    before, counted = len(world.batches), world.count("steps_recorded")
    played = act(world, 60)
    steps = sum(len(episode.rewards) for episode in played)
    assert world.count("steps_recorded") - counted == steps
    eventually(lambda: live(world, before) >= steps - 4)
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
        assert set(batch.segment_updates.tolist()) == {0}
    returns = [round(each[0], 3) for _, ended in world.batches[before:] for each in ended]
    assert set(returns) <= {round(sum(episode.rewards), 3) for episode in played}


def live(world: GatewayWorld, since: int = 0) -> int:
    return sum(batch.live_steps for batch, _ in world.batches[since:])
