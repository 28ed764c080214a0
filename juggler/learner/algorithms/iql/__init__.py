"""IQL: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.spaces import Box, Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import WIDE, OffPolicyConfig
from juggler.runtime.wrong_value import WrongValue


@dataclass(kw_only=True)
class IqlConfig(OffPolicyConfig):
    """Implicit Q-learning: improves on a data set. For Box and Discrete actions."""

    algorithm: str = "iql"
    loss_metrics: ClassVar = (
        *("value_loss", "critic_loss", "policy_loss"),
        *("mean_value", "mean_advantage"),
    )

    replay_ratio: float = 8.0
    """Average number of times a kept step is drawn: one optimizer step for every replay_batch_size
    / replay_ratio steps that are read."""

    expectile: float = 0.7
    """Expectile of the returns in an observation that is its value: 0.5 is the mean, near 1 the
    best."""

    advantage_weight: float = 3.0
    """Weight of advantages when actions are imitated (β): 0 imitates all alike."""

    def validate(self) -> None:
        super().validate()
        if not 0.5 <= self.expectile < 1:
            raise WrongValue(
                "expectile", f"expectile = {self.expectile}: must be at least 0.5, below 1"
            )
        self.check_at_least("advantage_weight", 0)


class IqlAlgorithm(Algorithm):
    config = IqlConfig
    module = "juggler:ImplicitActorCritic"
    action_spaces = (Box, Discrete)
    offline = True
    chosen: ClassVar = {
        "num_env_runners": 1,
        "envs_per_runner": 16,
        "fragment_steps": 16,
        "model": WIDE,
    }
    least_batch = 256
