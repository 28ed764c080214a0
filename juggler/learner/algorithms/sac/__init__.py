"""SAC: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.spaces import Box, Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import WIDE, OffPolicyConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class SacConfig(OffPolicyConfig):
    """Soft actor-critic, entropy-regularized, with a replay. For Box and Discrete actions."""

    algorithm: str = "sac"
    loss_metrics: ClassVar = ("value_loss", "policy_loss", "mean_value", "entropy", "temperature")

    lr: Scheduled = 3e-4
    """Learning rate of policy, values and temperature, or a schedule of it."""

    temperature: float | None = None
    """Weight of the policy's entropy relative to rewards (α); none: learned, starting at 1, to
    reach target_entropy."""

    target_entropy: float | None = None
    """Entropy in nats that a learned temperature aims at, with a Box scaled to -1 and 1; none:
    minus the number of elements of a Box, or half of the maximum for legal Discrete actions."""

    def validate(self) -> None:
        super().validate()
        self.check_above("temperature", 0)
        if self.temperature is not None and self.target_entropy is not None:
            raise ValueError(
                f"target_entropy = {self.target_entropy} with temperature = {self.temperature}: "
                "a temperature that is given is not learned; leave one of them out"
            )


class SacAlgorithm(Algorithm):
    config = SacConfig
    module = "juggler:SoftActorCritic"
    action_spaces = (Box, Discrete)
    off_policy = True
    lacks: ClassVar = {
        "exploration_ladder": "its policy is as random as the temperature lets it be, and explores "
        "by that; leave it out, or set temperature or target_entropy for all environments"
    }
    chosen: ClassVar = {"envs_per_runner": 4, "fragment_steps": 8, "model": WIDE}
    least_batch = 32
    squashes = True
