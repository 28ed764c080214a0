"""IMPALA: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from juggler.learner.algorithms.actor_critic import ActorCriticConfig
from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.algorithms.off_policy import KeptConfig


@dataclass(kw_only=True)
class ImpalaConfig(ActorCriticConfig, KeptConfig):
    """Importance-weighted actor-learner: V-trace on steps that an older policy sampled."""

    algorithm: str = "impala"

    lambda_: float = 1.0
    """Reach of V-trace's corrections: 0 is one step, 1 the whole trajectory."""

    rho_bar: float = 1.0
    """Maximum importance weight in a step's own correction of its value (ρ̄)."""

    rho_bar_pg: float = 1.0
    """Maximum importance weight in the policy gradient."""

    c_bar: float = 1.0
    """Maximum importance weight in corrections carried back to earlier steps (c̄)."""

    replay_share: float = 0.0
    """Share of old steps in an update, below 1: 0.5 adds one to every new step. batch_size and
    max_staleness are about new steps."""

    replay_capacity: int = 20_000
    """Number of newest steps that each learner keeps for replay_share. Each takes the memory of one
    observation."""

    save_replay: bool = False
    """Whether checkpoints hold the old steps of replay_share. Otherwise resumed runs, and
    synchronous runs after each checkpoint, begin with none."""

    def numbers_of_losses(self) -> list[str]:
        # One source of data draws for all members of a population.
        return [key for key in super().numbers_of_losses() if key != "replay_share"]

    def metric_names(self) -> list[str]:
        names = ("replayed_steps", "replay_age") if self.replay_share else ()
        return [*super().metric_names(), *names]

    def validate_rows(self, steps: int) -> None:
        super().validate_rows(steps)
        if self.replay_share and self.replay_capacity < steps:
            raise ValueError(
                f"replay_capacity = {self.replay_capacity}: must be at least fragment_steps = "
                f"{steps}, or no row can be kept"
            )

    def doubts(self) -> list[str]:
        old = round(self.batch_size * self.replay_share / (1 - self.replay_share))
        doubts = super().doubts()
        if self.replay_share and old > self.replay_capacity:
            doubts.append(
                f"replay_share = {self.replay_share:g} asks for {old} old steps with the "
                f"{self.batch_size} new ones of an update, and replay_capacity = "
                f"{self.replay_capacity} steps are kept: an update has no more than these"
            )
        return doubts

    def validate(self) -> None:
        super().validate()
        self.check_within("lambda_", self.lambda_, 0, 1)
        self.check_within("replay_share", self.replay_share, 0, 1, below=True)
        for key in ("rho_bar", "rho_bar_pg", "c_bar"):
            self.check_above(key, 0)
        if self.rho_bar < self.c_bar:
            raise ValueError(
                f"rho_bar = {self.rho_bar}: must be at least c_bar = {self.c_bar}, "
                "as V-trace requires"
            )


class ImpalaAlgorithm(Algorithm):
    config = ImpalaConfig
    off_policy = True
    chosen: ClassVar = {
        "envs_per_runner": 8,
        # IMPALA uses each step once, so its optimizer needs short fragments and small batches to
        # make enough steps.
        "fragment_steps": 8,
        "lr": 2e-3,
        # A solved run collapses if its value function lags behind the policy: see "What
        # was learned" in benchmarks/sample-efficiency.md.
        "value_lr_scale": 3.0,
        "lambda_": 0.95,
        "grad_clip": 0.5,
        # Normalized rewards make advantages small, and any entropy bonus large relative to them.
        "entropy_coefficient": 0.0,
    }
    chosen_for: ClassVar = {
        "a vector of floats": {"lr": 5e-4, "value_lr_scale": 6.0},
        # Without the entropy bonus, Catch's policy converged before its values were learned.
        "an image": {"lr": 1e-3, "entropy_coefficient": 0.01},
        # With values learned three times as fast as the policy, CliffWalking's goal was rarely
        # found.
        "a Discrete": {"value_lr_scale": 1.0},
    }
    least_batch = 64
