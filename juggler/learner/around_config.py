"""The keys of the tables of cores around others. No torch, because the driver reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, Self, get_type_hints

import msgspec

from juggler.runtime.kinds import misfit
from juggler.runtime.modules.model_config import ModelConfig
from juggler.runtime.nearest import nearest


class AroundConfig:
    """The keys of a table, each a field of a dataclass.

    Attributes:
        table: its name.
        above_zero: keys of numbers that must be above 0.
        model: keys of `model`, of the networks that such a core trains.
    """

    table: ClassVar[str]
    above_zero: ClassVar[tuple[str, ...]]
    model: dict[str, Any]

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Make a config of a table.

        Raises:
            ValueError: a key is unknown, or a value is not allowed for its key; names both.
        """
        hints = get_type_hints(cls)
        known = [key.name for key in fields(cls)]  # type: ignore[arg-type]
        values = {}
        for key, value in table.items():
            if key not in known:
                raise ValueError(f"{cls.table} has no key {key!r}{nearest(key, known)}")
            try:
                values[key] = msgspec.convert(value, hints[key])
            except msgspec.ValidationError as error:
                raise ValueError(f"{cls.table}.{key}: {misfit(hints[key], value)}") from error
        config = cls(**values)
        config.validate()
        return config

    def validate(self) -> None:
        """
        Raises:
            ValueError: a value is out of range; names the key.
        """
        for key in self.above_zero:
            self._must(key, getattr(self, key) > 0, "above 0")
        try:
            ModelConfig.parse(self.model)
        except ValueError as error:
            raise ValueError(f"{self.table}.{error}") from error

    def _must(self, key: str, holds: bool, be: str) -> None:
        if not holds:
            raise ValueError(f"{self.table}.{key} = {getattr(self, key)}: must be {be}")


@dataclass(frozen=True, kw_only=True)
class IntrinsicConfig(AroundConfig):
    """A reward for what is new, beside that of the environment, around any algorithm that acts in
    an environment."""

    table = "intrinsic"
    above_zero = ("coefficient", "lr", "clip", "features")

    kind: Literal["rnd"] = "rnd"
    """How what is new is found. rnd, random network distillation: by the error of a network that
    learns to predict what a constant random network makes of an observation."""

    coefficient: float = 0.5
    """Weight of the intrinsic reward, whose returns have a standard deviation of 1, beside rewards
    after reward_scale."""

    gamma_int: float = 0.99
    """Discount of the intrinsic reward one step later, for algorithms with a policy and a value
    function (impala, appo, ppo). Others have one value for both rewards, with their own gamma."""

    lr: float = 1e-3
    """Learning rate of the predictor, and of the value function of intrinsic rewards."""

    predictor_share: float = 0.25
    """Share of steps that the predictor learns from: the smaller, the longer an observation stays
    new."""

    features: int = 64
    """Numbers that the random network makes of an observation."""

    clip: float = 5.0
    """Observations are normalized by their mean and standard deviation so far, and clipped to
    [-clip, clip]."""

    model: dict[str, Any] = field(
        default_factory=lambda: {"hidden_sizes": [128], "activation": "relu"}
    )
    """What these networks are built with: keys of `model` that are about the encoder and hidden
    layers. The predictor has one hidden layer more."""

    def validate(self) -> None:
        super().validate()
        self._must("gamma_int", 0 <= self.gamma_int < 1, "at least 0, below 1")
        self._must("predictor_share", 0 < self.predictor_share <= 1, "above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(AroundConfig):
    """Imitation of demonstrations: in place of the environment's rewards, a discriminator rewards
    steps that look as if they were demonstrated."""

    table = "imitation"
    above_zero = ("lr", "minibatch_size", "limit")

    demonstrations: str = ""
    """The demonstrations: the directory of a Minari data set, such as juggler record makes, or its
    name among those that Minari keeps on the learner's host."""

    lr: float = 1e-3
    """Learning rate of the discriminator."""

    minibatch_size: int = 256
    """Steps of the policy in one step of the discriminator's optimizer, and as many demonstrated
    ones beside them. It sees each step of a sample once."""

    gradient_penalty: float = 10.0
    """Weight of a penalty that keeps the discriminator smooth: the norm of its gradient between
    demonstrated steps and others is drawn towards 1. 0: none."""

    limit: float = 2.0
    """Rewards are clipped to [-limit, limit]."""

    model: dict[str, Any] = field(
        default_factory=lambda: {"hidden_sizes": [64, 64], "activation": "tanh"}
    )
    """What the discriminator is built with: keys of `model` that are about the encoder and hidden
    layers."""

    def validate(self) -> None:
        if not self.demonstrations:
            raise ValueError(
                "imitation needs demonstrations: the data set to learn from, such as juggler "
                "record makes"
            )
        super().validate()
        self._must("gradient_penalty", self.gradient_penalty >= 0, "at least 0")
