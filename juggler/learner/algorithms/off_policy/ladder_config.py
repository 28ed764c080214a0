"""The key of algorithms whose environments may explore more or less. No torch, because the driver
reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig


@dataclass(kw_only=True)
class LadderConfig(OffPolicyConfig):
    """How much environments explore beside each other."""

    exploration_ladder: float = 0.0
    """How much less some environments explore than others (α of Ape-X): of N environments in all
    EnvRunners, the i-th from 0 has x^(1 + α i / (N - 1)), where x is the number that says how much
    the policy explores (exploration_epsilon or exploration_noise). 0: all have x. With x = 0.4, 7
    is usual."""

    def numbers_of_losses(self) -> list[str]:
        return [key for key in super().numbers_of_losses() if key != "exploration_ladder"]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("exploration_ladder", 0)
