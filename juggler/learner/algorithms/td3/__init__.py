"""TD3: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.spaces import Box

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import WIDE, LadderConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class Td3Config(LadderConfig):
    """Twin delayed DDPG: a deterministic policy and a replay. For Box actions."""

    algorithm: str = "td3"
    loss_metrics: ClassVar = ("value_loss", "policy_loss", "mean_value", "exploration_noise")

    lr: Scheduled = 3e-4
    """Learning rate of policy and values, or a schedule of it."""

    policy_period: int = 2
    """Optimizer steps between two moves of the policy; values move with each."""

    target_period: int = 1
    """Moves of the policy from one move of the target networks to the next."""

    exploration_noise: Scheduled = 0.1
    """Standard deviation of training noise, in halves of the distance between an action's bounds,
    or a schedule of it. Until learning begins, actions are uniform."""

    target_noise: float = 0.2
    """Standard deviation of the noise of the target policy's actions, in the same unit."""

    target_noise_clip: float = 0.5
    """Maximum of that noise, in the same unit."""

    def validate(self) -> None:
        super().validate()
        self.check_at_least("policy_period", 1)
        self.check_schedule("exploration_noise")
        noise = self.exploration_noise
        most = max(each for _, each in noise) if isinstance(noise, list) else noise
        if self.exploration_ladder and most > 1:
            raise ValueError(
                f"exploration_noise = {noise} with exploration_ladder = {self.exploration_ladder}: "
                "powers of noise above 1 are larger, and should be smaller; set it to 1 or less"
            )
        self.check_at_least("target_noise", 0)
        self.check_at_least("target_noise_clip", 0)


class Td3Algorithm(Algorithm):
    config = Td3Config
    module = "juggler:DeterministicActorCritic"
    action_spaces = (Box,)
    off_policy = True
    chosen: ClassVar = {"envs_per_runner": 4, "fragment_steps": 8, "model": WIDE}
    least_batch = 32
    squashes = True
