"""The keys of IMPALA. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.actor_critic.config import ActorCriticConfig


@dataclass(kw_only=True)
class ImpalaConfig(ActorCriticConfig):
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

    def validate(self) -> None:
        super().validate()
        self.check_within("lambda_", self.lambda_, 0, 1)
        for key in ("rho_bar", "rho_bar_pg", "c_bar"):
            self.check_above(key, 0)
        if self.rho_bar < self.c_bar:
            raise ValueError(
                f"rho_bar = {self.rho_bar}: must be at least c_bar = {self.c_bar}, "
                "as V-trace requires"
            )
