"""The keys of TD3. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.ladder_config import LadderConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class Td3Config(LadderConfig):
    """Twin delayed deep deterministic policy gradient: a policy that chooses one action for each
    observation, learned from steps that are kept and drawn again and again. For Box actions."""

    algorithm: str = "td3"
    """This algorithm's name."""

    lr: Scheduled = 3e-4
    """Learning rate of the policy and the values: a number, or a schedule, [step, value] pairs by
    rising step, of environment steps trained on."""

    policy_period: int = 2
    """Optimizer steps from one move of the policy to the next; values move with each."""

    target_period: int = 1
    """Moves of the policy from one move of the target networks to the next."""

    exploration_noise: Scheduled = 0.1
    """Standard deviation of the noise that is added to training actions, in halves of the distance
    between their bounds: a number, or a schedule as for lr. Until learning begins, actions are
    drawn uniformly between their bounds instead."""

    target_noise: float = 0.2
    """Standard deviation of the noise that is added to the target policy's actions, in the same
    unit: an action's target value is that of actions near it."""

    target_noise_clip: float = 0.5
    """The largest such noise, in the same unit."""

    def metric_names(self) -> list[str]:
        names = ("value_loss", "policy_loss", "mean_value", "exploration_noise")
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("policy_period", 1)
        self.check_schedule("exploration_noise")
        noise = self.exploration_noise
        most = max(each for _, each in noise) if isinstance(noise, list) else noise
        if self.exploration_ladder and most > 1:
            raise ValueError(
                f"exploration_noise = {noise} with exploration_ladder = {self.exploration_ladder}: "
                "powers of noise above 1 are larger, and are to be smaller; set it to 1 or less"
            )
        self.check_at_least("target_noise", 0)
        self.check_at_least("target_noise_clip", 0)
