"""The keys of PPO. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.actor_critic.config import ActorCriticConfig
from juggler.learner.optim.config import Scheduled


@dataclass(kw_only=True)
class PpoConfig(ActorCriticConfig):
    """Proximal policy optimization: several epochs over each sample, near the policy that made it.

    With `synchronous = true` that policy is the newest one, as in the paper. Otherwise it may be up
    to `max_staleness` updates older, which the ratio in the loss corrects.
    """

    algorithm: str = "ppo"
    """This algorithm's name."""

    lr: Scheduled = 3e-4
    """Learning rate: a number, or a schedule, [step, value] pairs by rising step, of environment
    steps trained on. It is linear between them, and constant before and after."""

    grad_clip: float | None = 0.5
    """Largest norm of a module's gradient, or of its numbers (see grad_clip_by); none: no limit."""

    batch_size: int = 2048
    """Live environment steps in one update, over all learners of the group. An update takes whole
    fragments. A step that only resets an environment, as with autoreset = "next_step", is not live:
    where batch_size is the size of one fragment, an asynchronous run takes two while episodes
    end."""

    max_staleness: int = 4
    """Updates that weights may be behind when steps that they sampled are trained on. Older steps
    are dropped. To keep batches fresh, requests stop once half as many updates are queued."""

    epochs: int = 4
    """Passes over each sample."""

    minibatches: int = 4
    """Optimizer steps in each pass, each on another part of the sample."""

    lambda_: float = 0.95
    """How far generalized advantage estimates look: 0 is one step, 1 the whole trajectory."""

    clip: float = 0.2
    """How far the ratio of an action's probability to the one that it was sampled with may move
    from 1 before a step gains nothing more (ε in the paper)."""

    normalize_advantages: bool = True
    """Whether the advantages of a sample are normalized to mean 0 and variance 1."""

    value_clip: float | None = None
    """How far the value of an observation may move in one update before a step gains nothing more;
    none: no limit."""

    target_kl: float | None = None
    """An update ends where the KL divergence of a minibatch from the policy that sampled it is
    more than 1.5 times this; none: never."""

    def metric_names(self) -> list[str]:
        names = () if self.target_kl is None else ("kl_stop_fraction",)
        return [*super().metric_names(), *names]

    def validate(self) -> None:
        super().validate()
        self.check_at_least("epochs", 1)
        self.check_at_least("minibatches", 1)
        self.check_within("lambda_", self.lambda_, 0, 1)
        self.check_above("clip", 0)
        for key in ("value_clip", "target_kl"):
            if getattr(self, key) is not None:
                self.check_above(key, 0)
        if self.minibatches > self.batch_size:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be at most batch_size = {self.batch_size}"
            )
