"""Data sets of random episodes, written as `juggler record` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from juggler.envrunner.datasets.writing import writing
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map

VECTOR = spaces.Box(-10, 10, (3,), np.float32)
CHOICES = spaces.Discrete(3, start=1)


def random_episode(
    observation_space: gymnasium.Space[Any],
    action_space: gymnasium.Space[Any],
    steps: int,
    *,
    terminated: bool,
    seed: int,
) -> RecordedEpisode:
    """An episode of values that the spaces have."""
    observation_space.seed(seed)
    action_space.seed(seed)

    def drawn(space: gymnasium.Space[Any], count: int) -> Any:
        values = [to_tree(space, space.sample()) for _ in range(count)]
        return tree_map(lambda *each: np.stack(each), *values)  # [count, ...]

    return RecordedEpisode(
        drawn(observation_space, steps + 1),
        drawn(action_space, steps),
        np.random.default_rng(seed).standard_normal(steps).astype(np.float32),
        terminated,
    )


def random_episodes(
    lengths: Sequence[int],
    observation_space: gymnasium.Space[Any] = VECTOR,
    action_space: gymnasium.Space[Any] = CHOICES,
) -> list[RecordedEpisode]:
    """Every other one was cut off."""
    both = observation_space, action_space
    return [
        random_episode(*both, steps, terminated=bool(i % 2), seed=i)
        for i, steps in enumerate(lengths)
    ]


def write(
    place: Path,
    episodes: Sequence[RecordedEpisode],
    observation_space: gymnasium.Space[Any] = VECTOR,
    action_space: gymnasium.Space[Any] = CHOICES,
    env: str | None = None,
) -> Path:
    """A data set of these episodes."""
    spec = None if env is None else gymnasium.spec(env)
    about = observation_space, action_space, spec, {"algorithm_name": "random"}
    with writing(place, "juggler/random-v0", *about) as writer:
        for episode in episodes:
            writer.add(episode)
    return place
