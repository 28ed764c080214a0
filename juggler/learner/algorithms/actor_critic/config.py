"""What an actor-critic is told about learning. No torch: the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import OptimizerSpec, Scheduled


@dataclass(kw_only=True)
class ActorCriticConfig(LearnerConfig):
    """What every algorithm with a policy and a value function has to know."""

    value_lr_scale: float = 1.0
    """How many times as fast as the policy the value function learns: the learning rate of the
    parameters that a module has for it alone (its `training_only`), divided by lr. Their gradient
    is then clipped by itself. Parameters that `optimizers` names are not concerned. Where policy
    and value function share their layers, these are the parameters of the value head."""

    entropy_coefficient: Scheduled = 0.01
    """Weight of the policy's entropy in the loss: a number, or a schedule as for lr."""

    value_coefficient: float = 0.5
    """Weight of the value function's loss."""

    burn_in: int = 0
    """Steps in which a module with a state warms it up where a row goes on with an episode, since
    older weights made the state that came with the row. Nothing is learned from these steps."""

    def validate(self) -> None:
        super().validate()
        self.check_schedule("entropy_coefficient")
        self.check_above("value_lr_scale", 0)
        self.check_at_least("burn_in", 0)
        self.check_at_least("value_coefficient", 0)

    def validate_rows(self, steps: int) -> None:
        if self.burn_in >= steps:
            raise ValueError(
                f"burn_in = {self.burn_in}: must be below fragment_steps = {steps}, or a row that "
                "goes on with an episode leaves nothing to learn from"
            )

    def optimizer_specs(self) -> list[OptimizerSpec]:
        rest, *named = super().optimizer_specs()
        if self.value_lr_scale == 1:
            return [rest, *named]
        values = OptimizerSpec("", (), self, "lr", self.value_lr_scale, training_only=True)
        return [rest, values, *named]
