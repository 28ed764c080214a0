"""A reward for new observations: a core around another core.

    python examples/intrinsic_reward.py

The deep sea (Osband et al. 2019, "Behaviour Suite for Reinforcement Learning") is a grid. A diver
sinks one row with each step, to the left or to the right. The treasure is found only by going right
every time, and each step to the right costs a little. A policy that explores at random finds the
treasure once in 2^19 dives, and has learned long before that going right does not pay.

`Curious` adds a bonus to each reward that is larger for newer observations: √(φᵀ C⁻¹ φ) for
features φ, with C the sum of φφᵀ over all observations so far. For one-hot φ this is 1/√visits. It
is the elliptical bonus of Henaff et al. 2022, "Exploration via Elliptical Episodic Bonuses", here
over all episodes. C is part of the core's state, beside the state of the inner core. In some
seconds this finds the treasure in every dive; the same algorithm without the bonus never finds it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from juggler import (
    Actor,
    ActorCritic,
    AroundCore,
    AroundState,
    Columns,
    Impala,
    ImpalaConfig,
    Learner,
    LearnerCore,
    Metrics,
    Sampler,
    Seam,
    strip_to_acting,
)

DEPTH = 20
OBSERVATIONS = gymnasium.spaces.Box(0, 1, (DEPTH * DEPTH,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(2)


class Curious(AroundCore):
    """Trains like the inner core, with a bonus for rare observations."""

    kind = "bonus"

    def __init__(self, inner: LearnerCore[Any], features: int, scale: float) -> None:
        super().__init__(inner)
        self.features, self.scale = features, scale

    def own_state(self, seed: int) -> dict[str, Any]:
        return {"seen": torch.eye(self.features)}  # [F, F]

    def learned(
        self, state: AroundState, sample: Columns, seam: Seam
    ) -> tuple[dict[str, Any], Columns, Metrics]:
        features = live_features(sample)  # [N, T, F]
        found = torch.einsum("ntf,ntg->fg", features, features)  # [F, F]
        seen = state["own"]["seen"] + seam.sums(found)  # [F, F]
        return {"seen": seen}, self.rewarded(seen, sample), {}

    def rewarded(self, seen: Tensor, sample: Columns) -> Columns:
        inverse = torch.linalg.inv_ex(seen).inverse  # [F, F]
        features = live_features(sample)  # [N, T, F]
        bonus = (features @ inverse * features).sum(-1).sqrt()  # [N, T]
        return {**sample, "rewards": sample["rewards"] + self.scale * bonus}


def live_features(columns: Any) -> Tensor:
    """Observations [N, T, F]; 0 in steps that only reset the environment."""
    features: Tensor = columns["observations"] * columns["live"].unsqueeze(-1)  # [N, T, F]
    return features


class DeepSea(gymnasium.Env[Any, Any]):
    """A grid in which a diver seeks a treasure, observed one-hot."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self.row = self.column = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.column = max(0, self.column + (1 if action else -1))
        self.row += 1
        done = self.row == DEPTH - 1
        reward = float(done and self.column == DEPTH - 1) - (0.01 / DEPTH if action else 0)
        return self._look(), reward, done, False, {}

    def _look(self) -> Any:
        seen = np.zeros((DEPTH, DEPTH), np.float32)
        seen[self.row, self.column] = 1
        return seen.ravel()  # [DEPTH * DEPTH]


make_module = partial(ActorCritic, OBSERVATIONS, ACTIONS, {"hidden_sizes": [64]})


def train(core: LearnerCore[Any], updates: int) -> list[float]:
    """The mean return of the episodes in each update."""
    learner = Learner(core, seed=0)
    module = make_module()
    strip_to_acting(module)
    policy = Actor(module, rows=16, steps=24, seed=0)
    sampler = Sampler(SyncVectorEnv([DeepSea] * 16), policy, steps=24, seed=0)
    returns = []
    for update in range(updates):
        policy.load(learner.get_weights())
        fragment = sampler.sample((1, update))
        learner.update_from_episodes([fragment.batch])
        returns.append(float(np.mean(fragment.episode_returns)))
    return returns


def main() -> None:
    config = ImpalaConfig(lr=3e-3, gamma=0.97, entropy_coefficient=0.003)
    plain = Impala(make_module, config)
    for core in (plain, Curious(plain, features=DEPTH * DEPTH, scale=0.1)):
        returns = train(core, updates=240)
        means = np.array(returns).reshape(8, -1).mean(1)
        print(f"{core.name:17s} return", "  ".join(f"{each:6.3f}" for each in means), flush=True)


if __name__ == "__main__":
    main()
