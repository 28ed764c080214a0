"""What APPO is told about learning. No torch: the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass

from juggler.learner.algorithms.impala.config import ImpalaConfig


@dataclass(kw_only=True)
class AppoConfig(ImpalaConfig):
    """Asynchronous proximal policy optimization: IMPALA with a clipped objective around a target
    network, which lets a batch be used several times."""

    algorithm: str = "appo"
    """This algorithm's name."""

    clip: float = 0.2
    """How far an action's probability may move from the target network's, as a share of it, before
    its step is worth nothing more."""

    behaviour_clip: float = 2.0
    """The most that the sampling policy's probability of an action counts, over the target
    network's: no step of an action that the latter has given up weighs more."""

    target_period: int = 4
    """Steps of the optimizer from one copy of the parameters to the target network to the next."""

    buffer_batches: int = 4
    """Batches that the learner keeps: a new one takes the place of the oldest."""

    batch_uses: int = 2
    """How often each of them is learned from, at even distances while it is kept."""

    target_kl: float | None = None
    """The KL divergence from the target network's policy which that gets to before it is renewed:
    its weight in the loss is doubled if it was more than 1.5 times this, and halved if it was less
    than this over 1.5; none: it is not in the loss."""

    kl_coefficient: float = 1.0
    """The weight of that divergence at first."""

    def validate(self) -> None:
        super().validate()
        for key in ("target_period", "buffer_batches", "batch_uses"):
            self.check_at_least(key, 1)
        for key in ("clip", "behaviour_clip", "kl_coefficient"):
            self.check_above(key, 0)
        if self.target_kl is not None:
            self.check_above("target_kl", 0)
            if self.target_period < 2:
                raise ValueError(
                    f"target_kl = {self.target_kl} with target_period = {self.target_period}: a "
                    "target network that is always new is at no distance; set target_period = 2 "
                    "or more"
                )
