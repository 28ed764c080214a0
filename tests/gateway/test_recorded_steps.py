"""What batches hold is what simulators did, step by step."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gateway_world import GatewayWorld, TinyMemory, TinyPolicy, eventually
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.runtime.episodes.batch import EpisodeBatch
from juggler.runtime.episodes.version import Version


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


def play(world: GatewayWorld, seed: int, steps: int, at_once: bool) -> list[Played]:
    """One environment, for so many steps and to the end of the episode.

    Args:
        world: acts.
        seed: of the environment.
        steps: at least.
        at_once: an episode's end and the next one's beginning travel together.
    """
    env, played = Wandering(), [Played()]
    observation, _ = env.reset(seed=seed)
    with world.connect() as session:
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
            if at_once and steps > 0:
                observation, _ = env.reset()
                action = session.step(observation, reward, terminated, truncated, final)
            else:
                assert session.step(final, reward, terminated, truncated) is None
                if steps > 0:
                    observation, _ = env.reset()
                    action = session.step(observation)
    return played[:-1]


def in_threads(count: int, what: Any) -> list[Any]:
    results: dict[int, Any] = {}

    def run(i: int) -> None:
        results[i] = what(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [results[i] for i in range(count)]


def assert_recorded(batches: list[EpisodeBatch], played: list[Played]) -> None:
    """Every step of the batches is one that was played; no episode has a hole or a wrong end."""
    by_first = {tuple(each.observations[0]): each for each in played}
    parts: dict[int, list[Any]] = defaultdict(list)
    for batch in batches:
        for episode in batch.episodes():
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
    def make() -> gymnasium.Env[Any, Any]:
        return Wandering()

    env = SyncVectorEnv([make] * 5, autoreset_mode=AutoresetMode.SAME_STEP)
    with GatewayWorld(rows=5, steps=4) as world:
        world.ask(100)
        observations, _ = env.reset(seed=[1, 2, 3, 4, 5])
        running = [Played([row.copy()]) for row in observations]
        played = []
        with world.connect(environments=5) as session:
            actions = session.step(observations)
            for _ in range(30):
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
                assert actions.shape == (5,)
            world.wait_for(7)
            assert_recorded([batch for batch, _ in world.batches], played + running)
            assert sum(batch.live_steps for batch, _ in world.batches) == 5 * 28


def test_environments_of_one_session_need_not_be_in_step() -> None:
    with GatewayWorld(rows=3, steps=2) as world:
        world.ask(10)
        with world.connect(environments=3) as session:
            session.step(np.zeros((3, 3)))
            for step in range(1, 5):
                ones = np.full((1, 3), step)
                assert session.step(ones, [step], environments=[1]).shape == (1,)
            session.step(np.full((2, 3), 7), [7, 7], environments=[2, 0])
            session.step(np.full((2, 3), 8), [8, 8], environments=[2, 0])
        world.wait_for(1)
        batch, _ = world.batches[0]
        assert batch.rewards.tolist() == [[1, 2], [3, 4], [7, 8]]


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
