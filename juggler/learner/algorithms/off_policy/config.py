"""The keys of algorithms that keep steps. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from juggler.learner.algorithms.off_policy.kept_config import KeptConfig
from juggler.learner.data.replay.rules import Remover, Rules, Selector
from juggler.runtime.wrong_value import WrongValue


@dataclass(kw_only=True)
class OffPolicyConfig(KeptConfig):
    """The keys of every algorithm that keeps steps and draws them again and again."""

    grad_clip: float | None = None
    """Largest norm of a module's gradient, or of its numbers (see grad_clip_by); none: no limit.
    One norm limits the gradients of the policy and the values together."""

    batch_size: int = 32
    """Live environment steps that arrive for one update, over all learners of the group."""

    replay_selector: Selector = "random"
    """Which kept steps are drawn: random ones, alike or by priority_exponent; the oldest ones first
    (fifo), or the newest ones (lifo). The last two need max_times_sampled."""

    replay_remover: Remover = "fifo"
    """Which kept steps leave for new ones when there is no room: the oldest ones (fifo), the newest
    ones (lifo), random ones, or those of the lowest priority."""

    max_times_sampled: int = 0
    """How often a kept step is drawn before it leaves; 0: any number of times. With one learner
    only."""

    replay_begin: int = 1000
    """Steps that are sampled before learning begins. With max_times_sampled, learning waits
    whenever fewer are left."""

    replay_batch_size: int = 256
    """Kept steps that are drawn for one optimizer step, by each learner of a group."""

    replay_ratio: float = 256.0
    """How often a kept step is drawn on average, while new ones replace old ones. So there is one
    optimizer step for every replay_batch_size / replay_ratio steps that are sampled."""

    n_step: int = 1
    """Steps whose rewards are summed before a value estimates the rest."""

    target_period: int = 1
    """Optimizer steps between two moves of the target network."""

    target_share: float = 0.005
    """How far the target network moves to the parameters each time: 1 copies them."""

    priority_exponent: float = 0.0
    """How much likelier steps with large errors are drawn (α of prioritized replay): 0 draws all
    alike, 1 in proportion to the error. 0.6 is usual."""

    importance_exponent: float = 0.4
    """How far importance weights make up for that (β): 0 not at all, 1 fully. It does not grow in
    the course of a run, since a run need not know when it will end."""

    def numbers_of_losses(self) -> list[str]:
        # One replay draws for all members of a population.
        of_replay = ("gamma", "replay_ratio", "priority_exponent", "importance_exponent")
        return [key for key in super().numbers_of_losses() if key not in of_replay]

    def keys_of_kept_steps(self) -> list[str]:
        return ["gamma", "n_step"] if self.save_replay else []  # each has the sum of n rewards

    def metric_names(self) -> list[str]:
        rows = [f"replay_rows{of}" for of in ("", "_drawn", "_waiting", "_unused")]
        pace = ("replay_steps_missing", "samples_per_insert", "updates_per_step")
        return [*super().metric_names(), *rows, *pace, "stale_priorities"]

    def validate(self) -> None:
        super().validate()
        self.check_one_of("replay_selector", get_args(Selector))
        self.check_one_of("replay_remover", get_args(Remover))
        self.check_at_least("max_times_sampled", 0)
        for key in ("replay_batch_size", "n_step", "target_period"):
            self.check_at_least(key, 1)
        self.check_above("replay_ratio", 0)
        self.check_at_least("replay_begin", 0)
        if self.replay_begin > self.replay_capacity:
            raise ValueError(
                f"replay_begin = {self.replay_begin} with replay_capacity = "
                f"{self.replay_capacity}: so many steps are never kept; set it to "
                f"{self.replay_capacity} or less"
            )
        in_order = self.replay_selector != "random"
        if in_order and not self.max_times_sampled and self.replay_ratio > 1:
            raise ValueError(
                f"replay_selector = {self.replay_selector!r} draws the same step again and again: "
                "set max_times_sampled to 1 or more, after which it leaves, and replay_ratio, "
                f"which is {self.replay_ratio:g}, to that or less"
            )
        self.replay_rules().check()
        if 0 < self.max_times_sampled < self.replay_ratio:
            raise ValueError(
                f"replay_ratio = {self.replay_ratio:g} with max_times_sampled = "
                f"{self.max_times_sampled}: a step leaves before it is drawn so often; set "
                f"replay_ratio to {self.max_times_sampled} or less"
            )
        for key in ("target_share", "priority_exponent", "importance_exponent"):
            self.check_within(key, getattr(self, key), 0, 1)
        if not self.target_share:
            raise WrongValue(
                "target_share",
                f"target_share = {self.target_share}: the target network would never move; set it "
                "above 0, or target_period higher to move it less often",
            )

    def replay_rules(self) -> Rules:
        """How kept steps are drawn, and how they leave."""
        return Rules(
            self.replay_selector,
            self.replay_remover,
            self.max_times_sampled,
            self.priority_exponent,
        )
