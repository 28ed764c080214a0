"""The keys that every algorithm has. No torch, because the driver reads this too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict, get_args, get_type_hints

from juggler.learner.around_config import ImitationConfig, IntrinsicConfig
from juggler.learner.optim.config import (
    OWN_KEYS,
    OptimizerConfig,
    OptimizerSpec,
    Scheduled,
    parse_optimizers,
)
from juggler.runtime.wrong_value import wrong_where


@dataclass(kw_only=True)
class LearnerConfig(OptimizerConfig):
    """The keys that every algorithm has. Some algorithms have other defaults.

    An algorithm of your own derives a dataclass from this one. Its fields become keys of a run, the
    text below a field is its help, and `validate` checks the values. To change a default, declare a
    field of the same name.
    """

    algorithm: str = "impala"
    """The algorithm: appo, bc, dqn, impala, iql, ppo, pqn, r2d2, sac, td3, or one of your own as
    package.module:Class."""

    reward_scale: float = 1.0
    """Factor that rewards are multiplied by before learning. Returns of some tens are learned
    best: a value function starts near 0, and reaches hundreds only slowly."""

    gamma: float = 0.99
    """Discount of the reward one step later."""

    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizers for parts of a module: tables with names of your choice. In each, the key
    parameters lists patterns of parameters' names, and lr, optimizer, adam_betas, rmsprop_decay,
    optimizer_epsilon, grad_clip and grad_clip_by may differ from the run's."""

    intrinsic: dict[str, Any] = field(default_factory=dict)
    """A reward for what is new, beside that of the environment: a table, whose keys are listed in
    docs/configuration.md. Without it there is none."""

    imitation: dict[str, Any] = field(default_factory=dict)
    """Demonstrations to imitate, in place of the environment's rewards: a table, whose keys are
    listed in docs/configuration.md. Without it rewards are the environment's."""

    micro_batches: int = 1
    """Parts of a sample, or of each minibatch, whose gradients are computed one after the other.
    The gradient is that of the whole, and takes the memory of one part."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the module's training pass. bfloat16 runs it under torch.autocast, which is
    faster on some devices; parameters, losses and optimizers stay float32."""

    compile: bool = False
    """Whether torch.compile compiles the module's training pass, which takes a minute at first and
    needs a C++ compiler where the learner runs."""

    batch_size: int = 1024
    """Live environment steps in one update, over all learners of the group. An update takes whole
    fragments. A step that only resets an environment, as with autoreset = "next_step", is not live:
    where batch_size is the size of one fragment, an asynchronous run takes two while episodes
    end."""

    max_staleness: int = 6
    """Updates that weights may be behind when steps that they sampled are trained on. Older steps
    are dropped. To keep batches fresh, requests stop once half as many updates are queued."""

    weights_interval: int = 1
    """Updates from one publication of weights to the next. Steps become up to
    weights_interval - 1 updates older by it, and max_staleness still holds. Only for asynchronous
    runs."""

    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which trained parameters are sent to EnvRunners, which act with it. bfloat16 takes
    half the bytes and keeps eight significant bits. Checkpoints are not rounded."""

    def validate(self) -> None:
        """Raises:
        ValueError: a value is out of range; names the key, the value and what is allowed.
        """
        self.validate_optimizer()
        with wrong_where("optimizers"):
            self.optimizer_specs()
        if self.intrinsic:
            with wrong_where("intrinsic"):
                IntrinsicConfig.parse(self.intrinsic)
        if self.imitation:
            with wrong_where("imitation"):
                ImitationConfig.parse(self.imitation)
        self.check_above("reward_scale", 0)
        self.check_above("batch_size", 0)
        self.check_at_least("max_staleness", 1)
        self.check_at_least("weights_interval", 1)
        self.check_at_least("micro_batches", 1)
        self.check_within("gamma", self.gamma, 0, 1)
        self.check_one_of("precision", ("float32", "bfloat16"))
        self.check_one_of("weights_dtype", ("float32", "bfloat16"))
        if self.intrinsic and self.imitation:
            raise ValueError(
                "intrinsic with imitation: rewards are either for what is new or for what was "
                "demonstrated; leave one of them out"
            )
        if self.weights_interval > self.max_staleness:
            raise ValueError(
                f"weights_interval = {self.weights_interval} with max_staleness = "
                f"{self.max_staleness}: weights would be too old before the next ones come; set "
                f"max_staleness = {self.weights_interval} or more (twice that keeps EnvRunners "
                f"busy), or weights_interval = {self.max_staleness} or less"
            )

    def validate_rows(self, steps: int) -> None:
        """Raises:
        ValueError: the algorithm cannot learn from rows of this many steps.
        """

    def check_burn_in(self, burn_in: int, steps: int) -> None:
        """Raises:
        ValueError: a burn-in leaves nothing to learn from in rows of this many steps.
        """
        if burn_in >= steps:
            raise ValueError(
                f"burn_in = {burn_in}: must be below fragment_steps = {steps}, or a row that "
                "continues an episode has nothing left to learn from"
            )

    def doubts(self) -> list[str]:
        """Settings that are allowed but probably not meant; people are told as a run starts."""
        return []

    def optimizer_specs(self) -> list[OptimizerSpec]:
        """The optimizers: first the one for most parameters, then those of the table `optimizers`.

        Raises:
            ValueError: a table in `optimizers` is wrong; names the key, and the nearest right one.
        """
        rest = OptimizerSpec("", (), self, "lr")
        return [rest, *parse_optimizers(self, self.optimizers)]

    def metric_names(self) -> list[str]:
        """Names of the metrics of a learner. A class adds those of its loss."""
        rates = dict.fromkeys(spec.lr_key for spec in self.optimizer_specs())
        names = ["grad_norm", "skipped", *rates]
        if self.compile:
            names.append("compiled_calls")
        if self.intrinsic:
            names += ("intrinsic_reward", "novelty", "predictor_loss")
        if self.imitation:
            names += ("imitation_reward", "taken_for_demonstrated")
            names += ("discriminator_loss", "gradient_penalty")
        return names

    def schedules(self) -> list[str]:
        """Keys that are a number or a schedule."""
        return [key for key, hint in get_type_hints(type(self)).items() if hint == Scheduled]

    def keys_of_kept_steps(self) -> list[str]:
        """Keys that steps have been kept with: those in a checkpoint know no other value."""
        return []

    def numbers_of_losses(self) -> list[str]:
        """Keys of the numbers that a loss reads: floats that are not none and do not belong to an
        optimizer."""
        hints = get_type_hints(type(self))
        return [
            key
            for key, hint in hints.items()
            if float in (hint, *get_args(hint))
            and hint != Scheduled
            and key not in OWN_KEYS
            and getattr(self, key) is not None
        ]


class Passes(TypedDict, total=False):
    """How often, and in what parts, one update learns from its sample; None: as the config says."""

    minibatch_size: int | None
    num_epochs: int | None


_PASSES: Final[tuple[Literal["minibatch_size", "num_epochs"], ...]] = (
    "minibatch_size",
    "num_epochs",
)


def given_passes(passes: Passes) -> Passes:
    """Those that are not None: a `step` that a subclass of Learner overrides need not know others.

    Raises:
        TypeError: there are others than these two.
        ValueError: one of the two is no number above 0.
    """
    if unknown := passes.keys() - set(_PASSES):
        raise TypeError(f"{sorted(unknown)[0]!r} is no argument: there are {' and '.join(_PASSES)}")
    given: Passes = {}
    for name in _PASSES:
        value = passes.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
        given[name] = value
    return given
