"""PQN: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class PqnConfig(LearnerConfig):
    """Parallelised Q-network: no replay, no target network. For Discrete actions."""

    algorithm: str = "pqn"
    loss_metrics: ClassVar = ("value_loss", "mean_value", "explained_variance", "epsilon")

    grad_clip: float | None = 10.0

    max_staleness: int = 4

    lambda_: float = 0.65
    """Reach of returns: 0 is one step, 1 the whole trajectory."""

    exploration_epsilon: Scheduled = field(default_factory=lambda: [(0.0, 1.0), (1e5, 0.05)])
    """Share of random actions in training, or a schedule of it."""

    epochs: int = 2
    """Number of passes over each sample."""

    minibatches: int = 2
    """Number of optimizer steps in each pass, each on other rows."""

    def validate(self) -> None:
        super().validate()
        self.check_within("lambda_", self.lambda_, 0, 1)
        self.check_share("exploration_epsilon")
        self.check_at_least("epochs", 1)
        self.check_at_least("minibatches", 1)


class PqnAlgorithm(Algorithm):
    config = PqnConfig
    module = "juggler:QNetwork"
    action_spaces = (Discrete,)
    chosen: ClassVar = {"envs_per_runner": 8, "fragment_steps": 32, "lr": 1e-3}
    least_batch = 256
