"""R2D2: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.spaces import Discrete

from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import EpsilonGreedyConfig


@dataclass(kw_only=True)
class R2d2Config(EpsilonGreedyConfig):
    """Recurrent replay DQN: replays rows of steps. For Discrete actions."""

    algorithm: str = "r2d2"

    gamma: float = 0.997

    grad_clip: float | None = 40.0
    """Maximum norm of the gradient; none: no limit."""

    batch_size: int = 256

    replay_capacity: int = 100_000
    """Number of newest steps that each learner keeps, in rows of fragment_steps. Each takes the
    memory of one observation."""

    replay_batch_size: int = 32
    """Number of kept rows in one optimizer step of each learner."""

    replay_ratio: float = 8.0
    """Average number of times a kept row is drawn: one optimizer step for every replay_batch_size /
    replay_ratio sampled rows."""

    n_step: int = 5

    priority_exponent: float = 0.9
    """Exponent of rows' priorities (α): 0 draws all alike, 1 in proportion to the error."""

    importance_exponent: float = 0.0
    """Exponent of importance weights (β): 0 none, as in the paper, 1 fully."""

    burn_in: int = 0
    """Steps that only warm up a recurrent module's state, if a row continues an episode."""

    def keys_of_kept_steps(self) -> list[str]:
        return []  # rows are kept as they came

    def validate(self) -> None:
        super().validate()
        self.check_at_least("burn_in", 0)

    def validate_rows(self, steps: int) -> None:
        super().validate_rows(steps)
        self.check_burn_in(self.burn_in, steps)


class R2d2Algorithm(Algorithm):
    config = R2d2Config
    module = "juggler:QNetwork"
    action_spaces = (Discrete,)
    off_policy = True
    chosen: ClassVar = {
        "envs_per_runner": 8,
        "fragment_steps": 32,
        "lr": 5e-4,
        "model": {"recurrent": "lstm"},
    }
    least_batch = 256
