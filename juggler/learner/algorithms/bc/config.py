"""The keys of BC. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.config import LearnerConfig


@dataclass(kw_only=True)
class BcConfig(LearnerConfig):
    """Behavioural cloning: learns from a data set to act as was done there. Rewards make no
    difference."""

    algorithm: str = "bc"
    """This algorithm's name."""

    entropy_coefficient: float = 1e-3
    """Weight of the policy's entropy in the loss. It keeps a policy of numbers, whose actions a
    data set repeats exactly, from becoming ever more certain of them."""

    def metric_names(self) -> list[str]:
        return [*super().metric_names(), "policy_loss", "entropy"]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("entropy_coefficient", 0)
