"""Rules that play CartPole and Pendulum well, and episodes that they have played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np

from juggler.runtime.datasets.dataset import RecordedEpisode

#: Observation and the random numbers of an episode -> an action.
Rule = Callable[[np.ndarray, np.random.Generator], Any]


def balanced(observation: np.ndarray, generator: np.random.Generator) -> int:
    """Holds CartPole's pole for as long as episodes last."""
    x, speed, angle, turning = observation.tolist()
    return int(0.1 * x + 0.3 * speed + 3 * angle + turning > 0)


def swung_up(observation: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Gives Pendulum the energy to get up, and holds it there: -135 on average."""
    cosine, sine, turning = observation.tolist()
    if cosine > 0.85 and abs(turning) < 4:
        torque = -10 * np.arctan2(sine, cosine) - 3 * turning
    else:
        energy = turning**2 / 2 + 15 * cosine  # 15 when it stands upright and still
        torque = 2 * np.sign(turning or 1.0) * (1 if energy < 15.5 else -1)
    return np.clip(np.array([torque], np.float32), -2, 2)


def played(env_id: str, rules: Sequence[Rule]) -> list[RecordedEpisode]:
    """An episode by each of these rules, with seeds from 0 on."""
    env, generator, episodes = gymnasium.make(env_id), np.random.default_rng(0), []
    for seed, rule in enumerate(rules):
        observation, _ = env.reset(seed=seed)
        seen, actions, rewards = [observation], [], []
        terminated = truncated = False
        while not (terminated or truncated):
            actions.append(rule(observation, generator))
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            seen.append(observation)
            rewards.append(reward)
        columns = np.stack(seen), np.array(actions), np.array(rewards, np.float32)
        episodes.append(RecordedEpisode(*columns, terminated))
    env.close()
    return episodes
