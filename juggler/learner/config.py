"""What a run says about learning. No torch here: the driver reads this too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(kw_only=True)
class LearnerConfig:
    """What every algorithm has to know."""

    algorithm: str = "impala"
    """What turns episodes into gradients."""

    lr: float = 5e-4
    """Learning rate at the start of training."""

    lr_final: float | None = None
    """Learning rate after schedule_steps, on a straight line from lr; none: always lr."""

    entropy_coefficient: float = 0.01
    """Weight of the policy's entropy in the loss, at the start of training."""

    entropy_coefficient_final: float | None = None
    """The same after schedule_steps, on a straight line; none: always entropy_coefficient."""

    schedule_steps: int | None = None
    """Environment steps trained on until lr_final and entropy_coefficient_final are reached."""

    reward_scale: float = 1.0
    """What rewards are multiplied by before anything is learned from them. Returns of some tens
    are learned best: the value function starts near 0, and gets to hundreds slowly."""

    gamma: float = 0.99
    """Discount of the reward one step later."""

    value_coefficient: float = 0.5
    """Weight of the value function's loss."""

    burn_in: int = 0
    """Steps in which a module with a state warms it up where a row goes on with an episode: the
    state that came with the row is an older version's. Nothing is learned from these steps."""

    optimizer: Literal["adam", "rmsprop"] = "adam"
    """How gradients become steps of the parameters."""

    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam: decay of the means of the gradient and of its square."""

    rmsprop_decay: float = 0.99
    """RMSProp: decay of the mean of the gradient's square."""

    optimizer_epsilon: float = 1e-5
    """Added to the root of the mean square before dividing by it."""

    grad_clip: float | None = 40.0
    """Largest global norm of a module's gradient, longer ones are scaled to it; none: any."""

    batch_size: int = 1024
    """Live environment steps in one update, over all learners of the group."""

    max_staleness: int = 6
    """Updates that weights may be behind when steps that they sampled are trained on; older ones
    are dropped. So that none are, requests stop while half as many updates' worth is open."""

    def validate(self) -> None:
        """Raises:
        ValueError: a value is out of its range; names the key, the value and what is allowed.
        """
        self._above("lr", 0)
        self._above("reward_scale", 0)
        self._above("optimizer_epsilon", 0)
        self._above("batch_size", 0)
        self._at_least("max_staleness", 1)
        self._at_least("burn_in", 0)
        self._at_least("value_coefficient", 0)
        self._at_least("entropy_coefficient", 0)
        self._within("gamma", self.gamma, 0, 1)
        self._within("rmsprop_decay", self.rmsprop_decay, 0, 1, below=True)
        for beta in self.adam_betas:
            self._within("adam_betas", beta, 0, 1, below=True)
        if self.optimizer not in ("adam", "rmsprop"):
            raise ValueError(f"optimizer = {self.optimizer!r}: expected 'adam' or 'rmsprop'")
        if self.grad_clip is not None:
            self._above("grad_clip", 0)
        for key in ("lr_final", "entropy_coefficient_final"):
            if getattr(self, key) is None:
                continue
            self._at_least(key, 0)
            if self.schedule_steps is None:
                raise ValueError(
                    f"{key} = {getattr(self, key)} needs schedule_steps: the environment steps "
                    "after which it is reached"
                )
        if self.schedule_steps is not None:
            self._above("schedule_steps", 0)

    def _above(self, key: str, limit: float) -> None:
        value = getattr(self, key)
        if not limit < value < math.inf:
            raise ValueError(f"{key} = {value}: must be above {limit} and finite")

    def _at_least(self, key: str, limit: float) -> None:
        value = getattr(self, key)
        if not limit <= value < math.inf:
            raise ValueError(f"{key} = {value}: must be at least {limit} and finite")

    def _within(
        self, key: str, value: float, low: float, high: float, *, below: bool = False
    ) -> None:
        if not (low <= value < high or (value == high and not below)):
            allowed = f"at least {low} and {'below' if below else 'at most'} {high}"
            raise ValueError(f"{key} = {getattr(self, key)}: must be {allowed}")


@dataclass(kw_only=True)
class ImpalaConfig(LearnerConfig):
    """Importance-weighted actor-learner: V-trace on what an older policy sampled."""

    algorithm: str = "impala"
    """What turns episodes into gradients."""

    lambda_: float = 1.0
    """How far V-trace's corrections reach: 0 is one step, 1 the whole trajectory."""

    rho_bar: float = 1.0
    """Where importance weights are clipped in a step's own correction of its value."""

    rho_bar_pg: float = 1.0
    """Where importance weights are clipped in the policy gradient."""

    c_bar: float = 1.0
    """Where importance weights are clipped in what is carried back to earlier steps."""

    def validate(self) -> None:
        super().validate()
        self._within("lambda_", self.lambda_, 0, 1)
        for key in ("rho_bar", "rho_bar_pg", "c_bar"):
            self._above(key, 0)
        if self.rho_bar < self.c_bar:
            raise ValueError(
                f"rho_bar = {self.rho_bar}: must be at least c_bar = {self.c_bar}, "
                "as V-trace requires"
            )
