"""Keys of algorithms that keep steps, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from juggler.learner.config import LearnerConfig
from juggler.learner.optim.config import Scheduled
from juggler.runtime.wrong_value import WrongValue

#: The model if none is given.
WIDE = {"hidden_sizes": [256, 256], "activation": "relu"}


@dataclass(kw_only=True)
class KeptConfig(LearnerConfig):
    """Keys of the storage of kept steps."""

    replay_capacity: int = 100_000
    """Number of newest steps that each learner keeps. Each takes the memory of two observations; of
    stacked frames, of one."""

    replay_memory: float | None = None
    """Maximum gigabytes of kept steps of each learner, estimated from the first ones, which may be
    twice as much later; none: replay_capacity alone limits them."""

    replay_directory: str = ""
    """Directory in which each learner keeps steps, in a file without a name; "": memory."""

    save_replay: bool = True
    """Whether checkpoints hold the kept steps. Otherwise resumed runs, and synchronous runs after
    each checkpoint, begin with none."""

    def numbers_of_losses(self) -> list[str]:
        return [key for key in super().numbers_of_losses() if key != "replay_memory"]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("replay_capacity", 1)
        self.check_above("replay_memory", 0)


@dataclass(kw_only=True)
class OffPolicyConfig(KeptConfig):
    """Keys of algorithms with a replay."""

    grad_clip: float | None = None
    """Maximum norm of the gradient of policy and values together, or of what grad_clip_by says;
    none: no limit."""

    batch_size: int = 32
    """Live environment steps that arrive for one update, over all learners."""

    replay_begin: int = 1000
    """Number of steps sampled before learning begins."""

    replay_batch_size: int = 256
    """Number of kept steps in one optimizer step of each learner."""

    replay_ratio: float = 256.0
    """Average number of times a kept step is drawn: one optimizer step for every replay_batch_size
    / replay_ratio sampled steps."""

    n_step: int = 1
    """Number of rewards summed before a value estimates the rest."""

    target_period: int = 1
    """Optimizer steps between two moves of the target network."""

    target_share: float = 0.005
    """Share by which the target network moves to the parameters; 1 copies them."""

    priority_exponent: float = 0.0
    """Exponent of priorities (α): 0 draws all steps alike, 1 in proportion to the error. 0.6 is
    usual."""

    importance_exponent: float = 0.4
    """Exponent of importance weights that correct for priorities (β): 0 not at all, 1 fully. It
    stays constant."""

    def numbers_of_losses(self) -> list[str]:
        # All members of a population share one replay and one exploring policy.
        others = ("gamma", "replay_ratio", "priority_exponent", "importance_exponent")
        return [
            key for key in super().numbers_of_losses() if key not in (*others, "exploration_ladder")
        ]

    def keys_of_kept_steps(self) -> list[str]:
        return ["gamma", "n_step"] if self.save_replay else []  # each step has a sum of n rewards

    def metric_names(self) -> list[str]:
        rows = [f"replay_rows{of}" for of in ("", "_drawn", "_waiting", "_unused")]
        pace = ("replay_steps_missing", "samples_per_insert", "updates_per_step")
        return [*super().metric_names(), *rows, *pace, "stale_priorities"]

    def validate(self) -> None:
        super().validate()
        for key in ("replay_batch_size", "n_step", "target_period"):
            self.check_at_least(key, 1)
        self.check_above("replay_ratio", 0)
        self.check_at_least("replay_begin", 0)
        if self.replay_begin > self.replay_capacity:
            raise ValueError(
                f"replay_begin = {self.replay_begin} with replay_capacity = "
                f"{self.replay_capacity}: a replay never holds that many steps; set it to "
                f"{self.replay_capacity} or less"
            )
        for key in ("target_share", "priority_exponent", "importance_exponent"):
            self.check_within(key, getattr(self, key), 0, 1)
        # Exponents of 0 only turn priorities or weights off.
        if not self.target_share:
            raise WrongValue(
                "target_share",
                f"target_share = {self.target_share}: the target network would never move; set it "
                "above 0, or target_period higher to move it less often",
            )


@dataclass(kw_only=True)
class LadderConfig(OffPolicyConfig):
    """Keys of exploration that differs between environments."""

    exploration_ladder: float = 0.0
    """Exponent α of Ape-X: of N environments, the i-th from 0 explores with x^(1 + α i / (N - 1)),
    where x is exploration_epsilon or exploration_noise. 0: all alike. 7 is usual with x = 0.4."""

    def validate(self) -> None:
        super().validate()
        self.check_at_least("exploration_ladder", 0)


@dataclass(kw_only=True)
class EpsilonGreedyConfig(LadderConfig):
    """Keys of algorithms that learn values of actions from kept steps."""

    loss_metrics: ClassVar = ("value_loss", "mean_value", "mean_error", "epsilon")

    target_share: float = 0.02

    target_acts: bool = True
    """Whether the target network acts, whose choices change more slowly, instead of the trained
    one, as in the paper."""

    exploration_epsilon: Scheduled = field(default_factory=lambda: [(0.0, 1.0), (1e4, 0.05)])
    """Share ε of random actions in training, or a schedule of it."""

    def validate(self) -> None:
        super().validate()
        self.check_share("exploration_epsilon")
