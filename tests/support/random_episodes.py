"""Fragments of random episodes as a runner sees them, with what a slow loop remembers of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

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
    last_pasts: list[Past | None]  # [N] None where nobody learns from what follows
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
        """What was known, the step's columns, and what was known at its truncation."""
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
