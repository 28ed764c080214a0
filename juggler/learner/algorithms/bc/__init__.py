"""BC: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.config import LearnerConfig


@dataclass(kw_only=True)
class BcConfig(LearnerConfig):
    """Behavioural cloning: imitates the actions of a data set, ignoring rewards."""

    algorithm: str = "bc"
    loss_metrics: ClassVar = ("policy_loss", "entropy")

    entropy_coefficient: float = 1e-3
    """Weight of the policy's entropy in the loss, against ever more certain actions."""

    def validate(self) -> None:
        super().validate()
        self.check_at_least("entropy_coefficient", 0)


class BcAlgorithm(Algorithm):
    config = BcConfig
    offline = True
    # One EnvRunner reads a data set faster than a learner learns from it.
    chosen: ClassVar = {
        "num_env_runners": 1,
        "envs_per_runner": 16,
        "fragment_steps": 16,
        "lr": 1e-3,
    }
    least_batch = 256
