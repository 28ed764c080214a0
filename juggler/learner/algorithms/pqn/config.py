"""The keys of PQN. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class PqnConfig(LearnerConfig):
    """Parallelised Q-network: values of actions, learned from many environments at once, without a
    replay buffer or a target network. For Discrete actions."""

    algorithm: str = "pqn"
    """This algorithm's name."""

    grad_clip: float | None = 10.0
    """Largest norm of a module's gradient, or of its numbers (see grad_clip_by); none: no limit."""

    max_staleness: int = 4
    """Updates that weights may be behind when steps that they sampled are trained on. Older steps
    are dropped. To keep batches fresh, requests stop once half as many updates are queued."""

    lambda_: float = 0.65
    """How far returns look: 0 is one step, 1 the whole trajectory."""

    exploration_epsilon: Scheduled = field(default_factory=lambda: [(0.0, 1.0), (1e5, 0.05)])
    """Share of training actions that are drawn at random: a number, or a schedule as for lr."""

    epochs: int = 2
    """Passes over each sample."""

    minibatches: int = 2
    """Optimizer steps in each pass, each on other rows of the sample."""

    def metric_names(self) -> list[str]:
        names = ("value_loss", "mean_value", "explained_variance", "epsilon")
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        self.check_within("lambda_", self.lambda_, 0, 1)
        self.check_share("exploration_epsilon")
        self.check_at_least("epochs", 1)
        self.check_at_least("minibatches", 1)
