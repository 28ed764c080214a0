"""The keys of IMPALA. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.actor_critic.config import ActorCriticConfig
from juggler.learner.algorithms.off_policy.kept_config import KeptConfig


@dataclass(kw_only=True)
class ImpalaConfig(ActorCriticConfig, KeptConfig):
    """Importance-weighted actor-learner: V-trace on steps that an older policy sampled."""

    algorithm: str = "impala"
    """This algorithm's name."""

    lambda_: float = 1.0
    """How far V-trace's corrections reach: 0 is one step, 1 the whole trajectory."""

    rho_bar: float = 1.0
    """Upper limit of importance weights in a step's own correction of its value (ρ̄)."""

    rho_bar_pg: float = 1.0
    """Upper limit of importance weights in the policy gradient."""

    c_bar: float = 1.0
    """Upper limit of importance weights in corrections carried back to earlier steps (c̄)."""

    replay_share: float = 0.0
    """Share of old steps among those that an update learns from, below 1: 0.5 adds one to every new
    step. Each learner draws them from the newest replay_capacity that it got. New steps are learned
    from first, once; batch_size and max_staleness are about these alone."""

    replay_capacity: int = 20_000
    """Steps that each learner keeps, the newest ones, if replay_share is above 0. Each takes the
    memory of one observation."""

    save_replay: bool = False
    """Whether checkpoints hold the old steps of replay_share. Without them a run that is resumed
    begins with none, and so does a synchronous run after each checkpoint."""

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
                f"replay_share = {self.replay_share:g} asks for {old} old steps beside the "
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
