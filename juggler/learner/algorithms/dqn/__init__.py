"""DQN: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import WIDE, EpsilonGreedyConfig


@dataclass(kw_only=True)
class DqnConfig(EpsilonGreedyConfig):
    """Deep Q-network: learns action values from a replay. For Discrete actions."""

    algorithm: str = "dqn"

    grad_clip: float | None = 10.0
    """Maximum norm of the gradient; none: no limit."""

    batch_size: int = 256

    replay_ratio: float = 32.0

    n_step: int = 3

    double: bool = True
    """Whether the trained network chooses the action whose value the target network estimates."""


class DqnAlgorithm(Algorithm):
    config = DqnConfig
    module = "juggler:QNetwork"
    action_spaces = (Discrete,)
    off_policy = True
    chosen: ClassVar = {"envs_per_runner": 8, "fragment_steps": 16, "lr": 5e-4, "model": WIDE}
    least_batch = 128
