"""APPO: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.impala import ImpalaConfig


@dataclass(kw_only=True)
class AppoConfig(ImpalaConfig):
    """Asynchronous PPO: IMPALA with a clipped objective and reused batches."""

    algorithm: str = "appo"

    clip: float = 0.2
    """Distance from 1 beyond which an action's probability ratio to the target network gains
    nothing more (ε)."""

    behaviour_clip: float = 2.0
    """Maximum ratio of the sampling policy's probability of an action to the target network's."""

    target_period: int = 4
    """Optimizer steps between two copies of the parameters to the target network."""

    buffer_batches: int = 4
    """Number of newest batches that the learner keeps."""

    batch_uses: int = 2
    """Number of times that each batch is learned from, while it is kept."""

    target_kl: float | None = None
    """Target KL divergence from the target network's policy. The weight of the divergence is
    doubled if it is above 1.5 times this, and halved if it is below two thirds of this; none: it is
    not in the loss."""

    kl_coefficient: float = 1.0
    """Initial weight of that divergence in the loss."""

    def metric_names(self) -> list[str]:
        names = () if self.target_kl is None else ("kl_from_target",)
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        for key in ("target_period", "buffer_batches", "batch_uses"):
            self.check_at_least(key, 1)
        for key in ("clip", "behaviour_clip", "kl_coefficient", "target_kl"):
            self.check_above(key, 0)
        if self.target_kl is not None and self.target_period < 2:
            raise ValueError(
                f"target_kl = {self.target_kl} with target_period = {self.target_period}: a "
                "target network that is updated after every step has no divergence; set "
                "target_period = 2 or more"
            )


class AppoAlgorithm(Algorithm):
    config = AppoConfig
    off_policy = True
    chosen: ClassVar = {
        "envs_per_runner": 8,
        "fragment_steps": 16,
        "lr": 1e-3,
        "value_lr_scale": 3.0,
        "lambda_": 0.95,
        "grad_clip": 0.5,
        "batch_uses": 4,
    }
    # To learn Pendulum at all, APPO must use steps more often, and older ones too.
    chosen_for: ClassVar = {
        "a Box action": {
            "fragment_steps": 8,
            "batch_uses": 8,
            "buffer_batches": 16,
            "target_period": 16,
            "entropy_coefficient": 0.0,
            "gamma": 0.95,
            "batch_size": 64,
        }
    }
    least_batch = 128
