"""The keys of DQN. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.epsilon_config import EpsilonGreedyConfig


@dataclass(kw_only=True)
class DqnConfig(EpsilonGreedyConfig):
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

    double: bool = True
    """Whether the trained network chooses the action whose value the target network estimates,
    which overestimates less."""
