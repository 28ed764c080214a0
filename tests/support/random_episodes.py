"""Random episodes, the columns of batches, and data sets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from juggler.envrunner.datasets.dataset_writer import writing
from juggler.runtime.datasets.dataset import RecordedEpisode
from juggler.runtime.wire.structures import to_tree, tree_map
from juggler.runtime.wire.trees import Tree

Space = gymnasium.Space[Any]


@dataclass
class Past:
    """One episode so far, of one environment."""

    observations: list[Tree] = field(default_factory=list)  # the present one included
    actions: list[Tree] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


@dataclass
class Fragment:
    """Columns as in an EpisodeBatch, and what was known at each step."""

    columns: dict[str, Any]
    first: np.ndarray  # [N, T] as the runner knows it
    pasts: list[list[Past]]  # [N][T] before the action
    last_pasts: list[Past | None]  # [N] None where the rest is not learned from
    final_pasts: list[Past]  # [K]


def stacked(trees: list[Tree], axis: int = 0) -> Any:
    return tree_map(lambda *arrays: np.stack(arrays, axis), trees[0], *trees[1:])


def sampled(space: Space, rng: np.random.Generator) -> Tree:
    space.seed(int(rng.integers(1 << 31)))
    return tree_map(np.asarray, to_tree(space, space.sample()))


class _Row:
    """One environment."""

    def __init__(self, observed: Space, acted: Space, rng: np.random.Generator, ends: float):
        self._spaces, self._rng, self._ends = (observed, acted), rng, ends
        self.begin()

    def begin(self) -> None:
        self.past = Past([sampled(self._spaces[0], self._rng)])
        self.first, self.dead = True, False

    def step(self, mode: AutoresetMode) -> tuple[Past, dict[str, Any], Past | None]:
        """The past, the step's columns, and the past at its truncation."""
        known = Past(list(self.past.observations), list(self.past.actions), list(self.past.rewards))
        action = sampled(self._spaces[1], self._rng)
        step = {"observations": known.observations[-1], "actions": action, "first": self.first}
        step |= {"live": not self.dead, "terminated": False, "truncated": False, "rewards": 0.0}
        if self.dead:
            self.begin()
            return known, step, None
        self.first = False
        terminated, truncated = (bool(x) for x in self._rng.random(2) < self._ends)
        reward = float(np.float32(self._rng.normal()))
        self.past.observations.append(sampled(self._spaces[0], self._rng))
        self.past.actions.append(action)
        self.past.rewards.append(reward)
        step |= {"terminated": terminated, "truncated": truncated and not terminated}
        step["rewards"] = reward
        ended = self.past
        if terminated or truncated:
            if mode is AutoresetMode.NEXT_STEP:
                self.dead = True
            else:
                self.begin()
        return known, step, ended if step["truncated"] else None


def fragments(
    observed: Space,
    acted: Space,
    *,
    rows: int,
    steps: int,
    mode: AutoresetMode,
    ends: float,
    seed: int,
) -> Iterator[Fragment]:
    """Fragment after fragment of the same environments."""
    rng = np.random.default_rng(seed)
    environments = [_Row(observed, acted, rng, ends) for _ in range(rows)]
    while True:
        played = [[env.step(mode) for _ in range(steps)] for env in environments]  # [N][T]
        names = ("rewards", "live", "terminated", "truncated")
        columns: dict[str, Any] = {
            name: np.array([[step[name] for _, step, _ in row] for row in played]) for name in names
        }
        columns["rewards"] = columns["rewards"].astype(np.float32)
        for name in ("observations", "actions"):
            columns[name] = stacked([stacked([step[name] for _, step, _ in r]) for r in played])
        columns["last_observations"] = stacked([e.past.observations[-1] for e in environments])
        finals = [
            (row, t, final)
            for row, steps_of_row in enumerate(played)
            for t, (_, _, final) in enumerate(steps_of_row)
            if final is not None
        ]
        columns["final_rows"] = np.array([final[0] for final in finals], np.int64)
        columns["final_steps"] = np.array([final[1] for final in finals], np.int64)
        some = columns["last_observations"]
        columns["final_observations"] = (
            stacked([final[2].observations[-1] for final in finals])
            if finals
            else tree_map(lambda array: array[:0], some)
        )
        goes_on = columns["live"] & ~columns["terminated"] & ~columns["truncated"]
        yield Fragment(
            columns,
            first=np.array([[step["first"] for _, step, _ in row] for row in played]),
            pasts=[[known for known, _, _ in row] for row in played],
            last_pasts=[
                env.past if on else None
                for env, on in zip(environments, goes_on[:, -1], strict=True)
            ],
            final_pasts=[final[2] for final in finals],
        )


def as_tensors(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: tree_map(torch.from_numpy, column) for name, column in columns.items()}


TRUNCATED_IN_MID_ROW, RUNNING, TERMINATED, TRUNCATED_AT_THE_END, FIRST_HALF, SECOND_HALF = range(6)


def columns(**changed: Any) -> dict[str, Any]:
    """Columns of 4 rows of 4 steps, with 6 segments.

    The observation of row r before step t is [r, t]; the final one of an episode truncated there
    is [100 + r, t]. The segments, in the order of the names above:

        row 0: episode 11 is truncated after two steps, episode 12 goes on after the row
        row 1: episode 13, five steps old, terminates after three; then a reset row
        row 2: episode 14 is truncated by its fourth step
        row 3: episode 15 changes from version (1, 7) to (1, 8) in its middle
    """
    rows, steps = 4, 4
    grid = np.moveaxis(np.indices((rows, steps), np.float32), 0, -1)  # [N, T, 2]
    ends = np.zeros((2, rows, steps), np.bool_)
    terminated, truncated = ends  # [N, T]
    terminated[1, 2] = truncated[0, 1] = truncated[2, 3] = True
    live = np.ones((rows, steps), np.bool_)
    live[1, 3] = False
    return {
        "observations": np.ascontiguousarray(grid),
        "actions": np.arange(rows * steps).reshape(rows, steps) % 3,
        "rewards": np.arange(rows * steps, dtype=np.float32).reshape(rows, steps) * live,
        "terminated": terminated,
        "truncated": truncated,
        "live": live,
        "action_logp": np.full((rows, steps), -0.5, np.float32),
        "last_observations": np.array([[row, steps] for row in range(rows)], np.float32),
        "states": {},
        "final_observations": np.array([[100, 1], [102, 3]], np.float32),
        "final_rows": np.array([0, 2], np.int32),
        "final_steps": np.array([1, 3], np.int32),
        "segment_episodes": np.array([11, 12, 13, 14, 15, 15], np.uint64),
        "segment_rows": np.array([0, 0, 1, 2, 3, 3], np.int32),
        "segment_starts": np.array([0, 2, 0, 0, 0, 2], np.int32),
        "segment_lengths": np.array([2, 2, 3, 4, 2, 2], np.int32),
        "segment_offsets": np.array([0, 0, 5, 0, 0, 2], np.int32),
        "segment_generations": np.ones(6, np.uint64),
        "segment_updates": np.array([7, 7, 7, 7, 7, 8], np.uint64),
        **changed,
    }


def column_with(name: str, at: tuple[int, ...], value: Any) -> dict[str, Any]:
    """One of the columns with a changed value, for `columns`."""
    column = columns()[name]
    column[at] = value
    return {name: column}


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
