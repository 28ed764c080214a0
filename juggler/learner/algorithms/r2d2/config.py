"""The keys of R2D2. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.off_policy.epsilon_config import EpsilonGreedyConfig


@dataclass(kw_only=True)
class R2d2Config(EpsilonGreedyConfig):
    """Recurrent replay distributed DQN: values of actions by a module with a memory, learned from
    rows of steps that are kept and drawn again and again. For Discrete actions."""

    algorithm: str = "r2d2"
    """This algorithm's name."""

    gamma: float = 0.997
    """Discount of the reward one step later."""

    grad_clip: float | None = 40.0
    """Largest norm of a module's gradient, or of its numbers (see grad_clip_by); none: no limit."""

    batch_size: int = 256
    """Live environment steps that arrive for one update, over all learners of the group."""

    replay_capacity: int = 100_000
    """Steps that each learner keeps, the newest ones, in rows of fragment_steps. Each takes the
    memory of one observation."""

    replay_batch_size: int = 32
    """Kept rows that are drawn for one optimizer step, by each learner of a group."""

    replay_ratio: float = 8.0
    """How often a kept row is drawn on average, while new ones replace old ones. So there is one
    optimizer step for every replay_batch_size / replay_ratio rows that are sampled."""

    n_step: int = 5
    """Steps whose rewards are summed before a value estimates the rest."""

    priority_exponent: float = 0.9
    """How much likelier rows with large errors are drawn (α of prioritized replay): 0 draws all
    alike, 1 in proportion to the error."""

    importance_exponent: float = 0.0
    """How far importance weights make up for that (β): 0 not at all, as in the paper, 1 fully."""

    burn_in: int = 0
    """Steps that only warm up the module's memory, where a row continues an episode: older weights
    made the state that came with the row. Nothing is learned from these steps."""

    def keys_of_kept_steps(self) -> list[str]:
        return []  # rows are kept as they came

    def validate(self) -> None:
        super().validate()
        self.check_at_least("burn_in", 0)

    def validate_rows(self, steps: int) -> None:
        super().validate_rows(steps)
        self.check_burn_in(self.burn_in, steps)
