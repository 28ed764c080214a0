"""Simulators that remember what they did, and whether batches hold the same."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from juggler.runtime.episodes.batch import EpisodeBatch
from support.gateway_world import GatewayWorld


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
    """One environment, for so many steps and to the end of the episode.

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
    """So many environments of one session, so many steps of each; those that run in the end, too.

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
