"""The keys of SAC. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class SacConfig(OffPolicyConfig):
    """Soft actor-critic: a policy that is as random as its task allows, learned from steps that are
    kept and drawn again and again. For Box and Discrete actions."""

    algorithm: str = "sac"
    """This algorithm's name."""

    lr: Scheduled = 3e-4
    """Learning rate of the policy, the values and the temperature: a number, or a schedule,
    [step, value] pairs by rising step, of environment steps trained on."""

    temperature: float | None = None
    """Weight of the policy's entropy beside rewards (α); none: it is learned, from 1 on, so that
    the entropy becomes target_entropy."""

    target_entropy: float | None = None
    """The entropy of the policy, in nats, that a learned temperature aims at: that of a Box action
    as if its bounds were -1 and 1. none: minus the number of elements of a Box action, or half of
    the largest entropy of the Discrete actions that are legal."""

    def metric_names(self) -> list[str]:
        names = ("value_loss", "policy_loss", "mean_value", "entropy", "temperature")
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        if self.temperature is not None:
            self.check_above("temperature", 0)
        if self.temperature is not None and self.target_entropy is not None:
            raise ValueError(
                f"target_entropy = {self.target_entropy} with temperature = {self.temperature}: "
                "a temperature that is given is not learned; leave one of them out"
            )
