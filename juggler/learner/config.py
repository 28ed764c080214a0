"""What a run says about learning. No torch here: the driver reads this too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args, get_type_hints

from juggler.learner.optim.optimizer_groups import OWN_KEYS, optimizer_groups
from juggler.runtime.nearest import nearest

#: A number, or what it is after so many steps trained on: (step, value) pairs by rising step.
Scheduled: TypeAlias = float | list[tuple[float, float]]


@dataclass(kw_only=True)
class LearnerConfig:
    """What every algorithm has to know. Some have other defaults."""

    algorithm: str = "impala"
    """What turns episodes into gradients: impala, ppo or appo."""

    lr: Scheduled = 5e-4
    """Learning rate: a number, or a schedule, [step, value] pairs by rising step, of environment
    steps trained on. It is on straight lines between them, and constant before and after."""

    value_lr_scale: float = 1.0
    """How many times as fast the value function learns: the learning rate of what a module has for
    it alone (its `training_only`), over lr. Such parameters are clipped by themselves then, unless
    `optimizers` names them, which goes before. Where policy and value function share their layers,
    it is the head of the latter alone, and nothing where a module names nothing."""

    entropy_coefficient: Scheduled = 0.01
    """Weight of the policy's entropy in the loss: a number, or a schedule as for lr."""

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

    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizers of parts of a module, beside the one for the rest: by names of your own, tables of
    parameters, which lists patterns of parameters' names, and what is to be different of lr,
    optimizer, adam_betas, rmsprop_decay, optimizer_epsilon, grad_clip and grad_clip_by."""

    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam: decay of the means of the gradient and of its square."""

    rmsprop_decay: float = 0.99
    """RMSProp: decay of the mean of the gradient's square."""

    optimizer_epsilon: float = 1e-5
    """Added to the root of the mean square before dividing by it."""

    grad_clip: float | None = 40.0
    """Largest norm of a module's gradient, or size of its numbers (see grad_clip_by); none: any."""

    grad_clip_by: Literal["global_norm", "norm", "value"] = "global_norm"
    """What grad_clip limits: the norm of all that an optimizer has to do with, the norm of each
    parameter's gradient, or each number's size. What is longer is scaled down to it."""

    micro_batches: int = 1
    """Parts that a sample, or each minibatch of one, is computed in, one after the other, by rows:
    the gradient is that of the whole, and the memory it takes that of a part."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the module's training pass. bfloat16: what torch.autocast does in it, for devices that are
    faster in it; parameters, losses and optimizers keep float32."""

    compile: bool = False
    """The module's training pass is compiled by torch.compile, which takes a minute at first and
    needs a C++ compiler where the learner runs."""

    batch_size: int = 1024
    """Live environment steps in one update, over all learners of the group."""

    max_staleness: int = 6
    """Updates that weights may be behind when steps that they sampled are trained on; older ones
    are dropped. To keep batches fresh, requests stop once half as many updates are queued."""

    weights_interval: int = 1
    """EnvRunners get weights after every so many updates. What they sample is up to
    weights_interval - 1 updates older for it, and max_staleness holds all the same. Asynchronous
    runs only."""

    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of trained parameters on their way to EnvRunners, which act with what they get. bfloat16: in
    half the bytes, rounded to eight significant bits. Checkpoints are not rounded."""

    def validate(self) -> None:
        """Raises:
        ValueError: a value is out of its range; names the key, the value and what is allowed.
        """
        self.validate_optimizer()
        optimizer_groups(self)
        self._scheduled("entropy_coefficient")
        self._above("value_lr_scale", 0)
        self._above("reward_scale", 0)
        self._above("batch_size", 0)
        self._at_least("max_staleness", 1)
        self._at_least("weights_interval", 1)
        if self.weights_interval > self.max_staleness:
            raise ValueError(
                f"weights_interval = {self.weights_interval} with max_staleness = "
                f"{self.max_staleness}: weights would be too old before the next ones come; set "
                f"max_staleness = {self.weights_interval} or more (twice that keeps EnvRunners "
                f"busy), or weights_interval = {self.max_staleness} or less"
            )
        self._at_least("burn_in", 0)
        self._at_least("micro_batches", 1)
        self._at_least("value_coefficient", 0)
        self._within("gamma", self.gamma, 0, 1)
        self._one_of("precision", ("float32", "bfloat16"))
        self._one_of("weights_dtype", ("float32", "bfloat16"))

    def validate_optimizer(self) -> None:
        """As `validate`, of the keys that each of several optimizers has for itself."""
        self._scheduled("lr", above_0=True)
        self._above("optimizer_epsilon", 0)
        self._within("rmsprop_decay", self.rmsprop_decay, 0, 1, below=True)
        for beta in self.adam_betas:
            self._within("adam_betas", beta, 0, 1, below=True)
        self._one_of("optimizer", ("adam", "rmsprop"))
        self._one_of("grad_clip_by", ("global_norm", "norm", "value"))
        if self.grad_clip is not None:
            self._above("grad_clip", 0)

    def numbers_of_losses(self) -> list[str]:
        """Keys of what a loss reads as a number: those of floats that no optimizer has for itself,
        and that are not none."""
        hints = get_type_hints(type(self))
        return [
            key
            for key, hint in hints.items()
            if float in (hint, *get_args(hint))
            and hint != Scheduled
            and key not in OWN_KEYS
            and getattr(self, key) is not None
        ]

    def _scheduled(self, key: str, *, above_0: bool = False) -> None:
        """A number, or points of one; with `above_0` the number itself may not be 0."""
        value = getattr(self, key)
        if isinstance(value, (int, float)):
            (self._above if above_0 else self._at_least)(key, 0)
            return
        steps = [step for step, _ in value]
        if not steps or steps[0] < 0 or any(a >= b for a, b in pairwise(steps)):
            raise ValueError(f"{key} = {value}: expected [step, value] pairs by rising step")
        if not all(0 <= each < math.inf for _, each in value):
            raise ValueError(f"{key} = {value}: values must be at least 0 and finite")

    def _one_of(self, key: str, choices: tuple[str, ...]) -> None:
        if (value := getattr(self, key)) not in choices:
            raise ValueError(f"{key} = {value!r} is not known{nearest(value, choices)}")

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
    """What turns episodes into gradients: impala, ppo or appo."""

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


@dataclass(kw_only=True)
class PpoConfig(LearnerConfig):
    """Proximal policy optimization: several epochs over each sample, near the policy that made it.

    With `synchronous = true` that policy is the newest one, as in the paper; else it may be
    `max_staleness` updates older, for which its ratios to the newest one make up.
    """

    algorithm: str = "ppo"
    """What turns episodes into gradients: impala, ppo or appo."""

    lr: Scheduled = 3e-4
    """Learning rate: a number, or a schedule, [step, value] pairs by rising step, of environment
    steps trained on. It is on straight lines between them, and constant before and after."""

    grad_clip: float | None = 0.5
    """Largest norm of a module's gradient, or size of its numbers (see grad_clip_by); none: any."""

    batch_size: int = 2048
    """Live environment steps in one update, over all learners of the group."""

    max_staleness: int = 4
    """Updates that weights may be behind when steps that they sampled are trained on; older ones
    are dropped. To keep batches fresh, requests stop once half as many updates are queued."""

    epochs: int = 4
    """Passes over each sample."""

    minibatches: int = 4
    """Steps of the optimizer in each pass, each on another part of the sample."""

    lambda_: float = 0.95
    """How far generalized advantage estimates look: 0 is one step, 1 the whole trajectory."""

    clip: float = 0.2
    """How far an action's probability may move from that with which it was sampled, as a share of
    it, before its step is worth nothing more."""

    normalize_advantages: bool = True
    """Advantages of a sample are shifted and scaled to mean 0 and variance 1."""

    value_clip: float | None = None
    """How far the value of an observation may move in one update before its step is worth nothing
    more; none: any."""

    target_kl: float | None = None
    """An update ends where the KL divergence of a minibatch from the policy that sampled it is
    more than 1.5 times this; none: never."""

    def validate(self) -> None:
        super().validate()
        self._at_least("epochs", 1)
        self._at_least("minibatches", 1)
        self._within("lambda_", self.lambda_, 0, 1)
        self._above("clip", 0)
        for key in ("value_clip", "target_kl"):
            if getattr(self, key) is not None:
                self._above(key, 0)
        if self.minibatches > self.batch_size:
            raise ValueError(
                f"minibatches = {self.minibatches}: must be at most batch_size = {self.batch_size}"
            )


@dataclass(kw_only=True)
class AppoConfig(ImpalaConfig):
    """Asynchronous proximal policy optimization: IMPALA with a clipped objective around a target
    network, which lets a batch be used several times."""

    algorithm: str = "appo"
    """What turns episodes into gradients: impala, ppo or appo."""

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
            self._at_least(key, 1)
        for key in ("clip", "behaviour_clip", "kl_coefficient"):
            self._above(key, 0)
        if self.target_kl is not None:
            self._above("target_kl", 0)
            if self.target_period < 2:
                raise ValueError(
                    f"target_kl = {self.target_kl} with target_period = {self.target_period}: a "
                    "target network that is always new is at no distance; set target_period = 2 "
                    "or more"
                )
