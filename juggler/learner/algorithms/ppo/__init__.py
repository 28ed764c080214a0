"""PPO: its algorithm class and keys, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from juggler.learner.algorithms.actor_critic import ActorCriticConfig
from juggler.learner.algorithms.algorithm import Algorithm
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class PpoConfig(ActorCriticConfig):
    """Proximal policy optimization: several clipped epochs over each sample.

    With `synchronous = true` the newest policy samples, as in the paper. Otherwise the sampling
    policy may be up to `max_staleness` updates older, which the ratio in the loss corrects.
    """

    algorithm: str = "ppo"

    lr: Scheduled = 3e-4

    grad_clip: float | None = 0.5

    batch_size: int = 2048

    max_staleness: int = 4

    epochs: int = 4
    """Number of passes over each sample."""

    minibatches: int = 4
    """Number of optimizer steps in each pass, each on another part of the sample."""

    lambda_: float = 0.95
    """Reach of generalized advantage estimates: 0 is one step, 1 the whole trajectory."""

    clip: float = 0.2
    """Distance from 1 beyond which an action's probability ratio gains nothing more (ε)."""

    normalize_advantages: bool = True
    """Whether advantages are normalized to mean 0 and variance 1."""

    value_clip: float | None = None
    """Distance that a value may move in one update before it gains nothing more; none: no limit."""

    target_kl: float | None = None
    """Target KL divergence from the sampling policy. An update stops at 1.5 times this; none: it
    never stops."""

    def metric_names(self) -> list[str]:
        names = () if self.target_kl is None else ("kl_stop_fraction",)
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("epochs", 1)
        self.check_at_least("minibatches", 1)
        self.check_within("lambda_", self.lambda_, 0, 1)
        for key in ("clip", "value_clip", "target_kl"):
            self.check_above(key, 0)
        if self.minibatches > self.batch_size:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be at most batch_size = {self.batch_size}"
            )


class PpoAlgorithm(Algorithm):
    config = PpoConfig
    chosen: ClassVar = {
        "envs_per_runner": 8,
        "fragment_steps": 64,
        # Several optimizer steps change the policy considerably: requests wait for the update.
        "max_staleness": 2,
        "epochs": 10,
        "entropy_coefficient": 0.0,
        "value_coefficient": 1.0,
    }
    least_batch = 2048
