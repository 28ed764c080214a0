"""Keys of actor-critics, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import OptimizerSpec, Scheduled


@dataclass(kw_only=True)
class ActorCriticConfig(LearnerConfig):
    """Keys of algorithms with a policy and a value function."""

    loss_metrics: ClassVar = (
        *("policy_loss", "value_loss", "entropy"),
        *("kl", "clip_fraction", "explained_variance"),
    )

    value_lr_scale: float = 1.0
    """Factor of lr for parameters of the value function alone (a module's `training_only`; with
    shared layers, the value head) that `optimizers` does not name. Unless 1, they are clipped
    separately."""

    entropy_coefficient: Scheduled = 0.01
    """Weight of the policy's entropy in the loss, or a schedule of it."""

    value_coefficient: float = 0.5
    """Weight of the value function's loss."""

    burn_in: int = 0
    """Steps that only warm up a recurrent module's state, if a row continues an episode."""

    def metric_names(self) -> list[str]:
        names = ("intrinsic_value_loss",) if self.intrinsic else ()
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        self.check_schedule("entropy_coefficient")
        self.check_above("value_lr_scale", 0)
        self.check_at_least("burn_in", 0)
        self.check_at_least("value_coefficient", 0)

    def validate_rows(self, steps: int) -> None:
        self.check_burn_in(self.burn_in, steps)

    def optimizer_specs(self) -> list[OptimizerSpec]:
        rest, *named = super().optimizer_specs()
        if self.value_lr_scale == 1:
            return [rest, *named]
        values = OptimizerSpec("", (), self, "lr", self.value_lr_scale, training_only=True)
        return [rest, values, *named]
