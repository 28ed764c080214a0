"""Keys of all algorithms. No torch: the driver imports this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args, get_type_hints

from juggler.learner.optim.config import (
    OWN_KEYS,
    OptimizerConfig,
    OptimizerSpec,
    Scheduled,
    parse_optimizers,
)
from juggler.runtime.modules.config import ModelConfig
from juggler.runtime.wrong_value import CheckedKeys, converted, wrong_where


class AroundConfig(CheckedKeys):
    """Keys of a table, as fields of a dataclass.

    Attributes:
        above_zero: keys of numbers that must be above 0.
        model: keys of `model` for this core's networks.
    """

    above_zero: ClassVar[tuple[str, ...]]
    model: dict[str, Any]

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Make a config from a table.

        Raises:
            ValueError: a key is unknown, or a value is invalid; names both.
        """
        hints = get_type_hints(cls)
        own = {key.name: hints[key.name] for key in fields(cls)}  # type: ignore[arg-type]
        config = cls(**converted(table, own, cls.table))
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError for the first key that is out of range."""
        for key in self.above_zero:
            self.check_above(key, 0)
        try:
            ModelConfig.parse(self.model)
        except ValueError as error:
            raise ValueError(f"{self.table}.{error}") from error


@dataclass(frozen=True, kw_only=True)
class IntrinsicConfig(AroundConfig):
    """An exploration bonus for novel observations, added to any acting algorithm."""

    table = "intrinsic"
    above_zero = ("coefficient", "lr", "clip", "features")

    kind: Literal["rnd"] = "rnd"
    """Measure of what is new. rnd: random network distillation, the error of a network that learns
    to predict a random one."""

    coefficient: float = 0.5
    """Weight of the intrinsic reward, scaled to returns of deviation 1, next to rewards after
    reward_scale."""

    gamma_int: float = 0.99
    """Discount of the intrinsic reward one step later, for impala, appo and ppo. Others use their
    gamma."""

    lr: float = 1e-3
    """Learning rate of the predictor, and of the value function of intrinsic rewards."""

    predictor_share: float = 0.25
    """Share of steps that the predictor learns from: with less, observations stay new for longer.
    """

    features: int = 64
    """Number of outputs of the random network."""

    clip: float = 5.0
    """Limit of normalized observations, to [-clip, clip]."""

    model: dict[str, Any] = field(
        default_factory=lambda: {"hidden_sizes": [128], "activation": "relu"}
    )
    """Keys of `model` for these networks, about the encoder and hidden layers. The predictor has
    one layer more."""

    def validate(self) -> None:
        super().validate()
        self.check_within("gamma_int", self.gamma_int, 0, 1, below=True)
        self.check_above("predictor_share", 0)
        self.check_within("predictor_share", self.predictor_share, 0, 1)


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(AroundConfig):
    """Adversarial imitation: a discriminator's rewards replace the environment's."""

    table = "imitation"
    above_zero = ("lr", "minibatch_size", "limit")

    demonstrations: str = ""
    """Minari data set of demonstrations: a directory, or a name on the learner's host."""

    lr: float = 1e-3
    """Learning rate of the discriminator."""

    minibatch_size: int = 256
    """Number of the policy's steps, and of demonstrated ones, in one step of the discriminator's
    optimizer."""

    gradient_penalty: float = 10.0
    """Weight of a penalty that draws the norm of the discriminator's gradient towards 1; 0: none.
    """

    limit: float = 2.0
    """Limit of rewards, to [-limit, limit]."""

    model: dict[str, Any] = field(
        default_factory=lambda: {"hidden_sizes": [64, 64], "activation": "tanh"}
    )
    """Keys of `model` for the discriminator, about the encoder and hidden layers."""

    def validate(self) -> None:
        if not self.demonstrations:
            raise ValueError(
                "imitation needs demonstrations: the data set to learn from, such as juggler "
                "record makes"
            )
        super().validate()
        self.check_at_least("gradient_penalty", 0)


@dataclass(kw_only=True)
class LearnerConfig(OptimizerConfig):
    """Keys that every algorithm has. Some algorithms have other defaults.

    Your own algorithm derives a dataclass from this class. Its fields become keys of a run, the
    text below a field is its help, and `validate` checks the values. To change a default, redeclare
    the field.
    """

    loss_metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the loss's metrics."""

    algorithm: str = "impala"
    """Algorithm: {algorithms}, or your own as package.module:Class."""

    reward_scale: float = 1.0
    """Factor of rewards before learning. Returns of about 10 to 100 are learned best."""

    gamma: float = 0.99
    """Discount of the reward one step later."""

    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Optimizers for parts of a module: named tables, each with patterns in parameters, and keys of
    the optimizer that differ."""

    intrinsic: dict[str, Any] = field(default_factory=dict)
    """Reward for novel observations: a table, with keys as in docs/configuration.md."""

    imitation: dict[str, Any] = field(default_factory=dict)
    """Demonstrations to imitate, instead of the environment's rewards: a table, with keys as in
    docs/configuration.md."""

    micro_batches: int = 1
    """Number of parts of a sample whose gradients are computed one after another, to save
    memory."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the module's training pass. bfloat16 uses torch.autocast; parameters, losses and
    optimizers stay float32."""

    compile: bool = False
    """Whether torch.compile compiles the training pass, which needs a minute at first, and a C++
    compiler."""

    batch_size: int = 1024
    """Live environment steps in one update, over all learners; whole fragments, in synchronous runs
    at least one of each EnvRunner. Steps that only reset an environment are not live, so if this is
    the size of one fragment, an asynchronous run may use two."""

    max_staleness: int = 6
    """Maximum number of updates between the acting weights and the update. Older steps are dropped,
    and requests stop once half as many updates are queued."""

    weights_interval: int = 1
    """Updates between publications of weights, in asynchronous runs. Steps become up to
    weights_interval - 1 updates older."""

    weights_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters sent to EnvRunners. bfloat16 halves the bytes; checkpoints are not
    rounded."""

    def validate(self) -> None:
        """Raise ValueError for the first key that is out of range."""
        self.validate_optimizer()
        with wrong_where("optimizers"):
            self.optimizer_specs()
        # Errors in a table name the table and its key.
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
        # Contradictions come after the keys by themselves.
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
        """Raise ValueError if rows of this length cannot be learned from."""

    def check_burn_in(self, burn_in: int, steps: int) -> None:
        """Raise ValueError if a burn-in leaves nothing to learn from."""
        if burn_in >= steps:
            raise ValueError(
                f"burn_in = {burn_in}: must be below fragment_steps = {steps}, or a row that "
                "continues an episode has nothing left to learn from"
            )

    def doubts(self) -> list[str]:
        """Return warnings about valid but probably unintended settings, shown at the start."""
        return []

    def optimizer_specs(self) -> list[OptimizerSpec]:
        """Return specs of the main optimizer, then of the table `optimizers`.

        Raises:
            ValueError: a table in `optimizers` is invalid; names the key, and the nearest one.
        """
        rest = OptimizerSpec("", (), self, "lr")
        return [rest, *parse_optimizers(self, self.optimizers)]

    def metric_names(self) -> list[str]:
        """Return names of a learner's metrics."""
        rates = dict.fromkeys(spec.lr_key for spec in self.optimizer_specs())
        names = ["grad_norm", "skipped", *rates, *self.loss_metrics]
        if self.compile:
            names.append("compiled_calls")
        if self.intrinsic:
            names += ("intrinsic_reward", "novelty", "predictor_loss")
        if self.imitation:
            names += ("imitation_reward", "taken_for_demonstrated")
            names += ("discriminator_loss", "gradient_penalty")
        return names

    def schedules(self) -> list[str]:
        """Return keys that are a number or a schedule."""
        return [key for key, hint in get_type_hints(type(self)).items() if hint == Scheduled]

    def keys_of_kept_steps(self) -> list[str]:
        """Return keys that a checkpoint's replayed steps depend on."""
        return []

    def numbers_of_losses(self) -> list[str]:
        """Return float keys that a loss reads, without optimizers' and None."""
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
    """Minibatch size and epochs of one update; None: the config decides."""

    minibatch_size: int | None
    num_epochs: int | None


def given_passes(passes: Passes) -> Passes:
    """Return the passes that are set, by name.

    An overridden `Learner.step` does not have to accept unset ones.

    Raises:
        TypeError: there are other names.
        ValueError: a value is not a whole number above 0.
    """
    names = Passes.__annotations__
    for name, value in passes.items():
        if name not in names:
            raise TypeError(f"{name!r} is not an argument: known are {' and '.join(names)}")
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} = {value!r}: must be a whole number, at least 1")
    given: Any = {name: value for name, value in passes.items() if value is not None}
    found: Passes = given
    return found
