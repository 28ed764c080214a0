"""The keys of IQL. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.runtime.wrong_value import WrongValue


@dataclass(kw_only=True)
class IqlConfig(OffPolicyConfig):
    """Implicit Q-learning: learns from a data set to act better than was done there on average, by
    what its rewards say. For Box and Discrete actions."""

    algorithm: str = "iql"
    """This algorithm's name."""

    replay_ratio: float = 8.0
    """How often a kept step is drawn on average, while new ones replace old ones. So there is one
    optimizer step for every replay_batch_size / replay_ratio steps that are read."""

    expectile: float = 0.7
    """Which of the returns that actions of the data set had in an observation its value stands for:
    0.5 is their mean; the nearer to 1, the nearer it is to the best of them."""

    advantage_weight: float = 3.0
    """How much more likely an action becomes that is better than the value (β): 0 imitates all
    actions alike."""

    def metric_names(self) -> list[str]:
        names = ("value_loss", "critic_loss", "policy_loss", "mean_value", "mean_advantage")
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        if not 0.5 <= self.expectile < 1:
            raise WrongValue(
                "expectile", f"expectile = {self.expectile}: must be at least 0.5, below 1"
            )
        self.check_at_least("advantage_weight", 0)
