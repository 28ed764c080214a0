"""The keys of APPO. No torch, because the driver reads this too."""

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
    """How far the ratio of an action's probability to the target network's may move from 1 before
    a step gains nothing more (ε in the paper)."""

    behaviour_clip: float = 2.0
    """Upper limit of the ratio of the sampling policy's probability of an action to the target
    network's. It limits the weight of actions that the target network would not choose."""

    target_period: int = 4
    """Optimizer steps between two copies of the parameters to the target network."""

    buffer_batches: int = 4
    """Batches that the learner keeps: a new one replaces the oldest."""

    batch_uses: int = 2
    """How often each batch is learned from, spread evenly over the time that it is kept."""

    target_kl: float | None = None
    """The wanted KL divergence of the policy from the target network's when that is renewed. The
    weight of the divergence in the loss is doubled if it was more than 1.5 times this, and halved
    if it was less than this over 1.5; none: the divergence is not in the loss."""

    kl_coefficient: float = 1.0
    """The initial weight of that divergence in the loss."""

    def metric_names(self) -> list[str]:
        names = () if self.target_kl is None else ("kl_from_target",)
        return [*super().metric_names(), *names]

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
                    "target network that is renewed after every step has no divergence; set "
                    "target_period = 2 or more"
                )
