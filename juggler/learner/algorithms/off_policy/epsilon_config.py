"""The keys of algorithms that keep steps and explore ε-greedily. No torch, because the driver reads
this too."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.learner.algorithms.off_policy.ladder_config import LadderConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class EpsilonGreedyConfig(LadderConfig):
    """The keys of algorithms that learn values of actions from kept steps."""

    target_share: float = 0.02
    """How far the target network moves to the parameters each time: 1 copies them."""

    target_acts: bool = True
    """Whether EnvRunners and policies act with the target network, whose choices change more
    slowly. Without it they act with the trained one, as in the paper."""

    exploration_epsilon: Scheduled = field(default_factory=lambda: [(0.0, 1.0), (1e4, 0.05)])
    """Share ε of training actions that are drawn at random: a number, or a schedule as for lr."""

    def metric_names(self) -> list[str]:
        return [*super().metric_names(), "value_loss", "mean_value", "mean_error", "epsilon"]

    def validate(self) -> None:
        super().validate()
        self.check_share("exploration_epsilon")
