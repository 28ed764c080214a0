"""The keys of DQN. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass, field

from juggler.learner.algorithms.off_policy.config import OffPolicyConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class DqnConfig(OffPolicyConfig):
    """Deep Q-network: values of actions, learned from steps that are kept and drawn again and
    again. For Discrete actions."""

    algorithm: str = "dqn"
    """This algorithm's name."""

    grad_clip: float | None = 10.0
    """Largest norm of a module's gradient, or of its numbers (see grad_clip_by); none: no limit."""

    batch_size: int = 256
    """Live environment steps that arrive for one update, over all learners of the group."""

    replay_ratio: float = 32.0
    """How often a kept step is drawn on average, while new ones replace old ones. So there is one
    optimizer step for every replay_batch_size / replay_ratio steps that are sampled."""

    n_step: int = 3
    """Steps whose rewards are summed before a value estimates the rest."""

    target_share: float = 0.02
    """How far the target network moves to the parameters each time: 1 copies them."""

    target_acts: bool = True
    """Whether EnvRunners and policies act with the target network, whose choices change more
    slowly. Without it they act with the trained one, as in the paper."""

    double: bool = True
    """Whether the trained network chooses the action whose value the target network estimates,
    which overestimates less."""

    exploration_epsilon: Scheduled = field(default_factory=lambda: [(0.0, 1.0), (1e4, 0.05)])
    """Share of training actions that are drawn at random: a number, or a schedule as for lr."""

    def validate(self) -> None:
        super().validate()
        self.check_share("exploration_epsilon")
