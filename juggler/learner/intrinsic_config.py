"""The keys of the table `intrinsic`. No torch, because the driver reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from juggler.learner.tables import from_table
from juggler.runtime.modules.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class IntrinsicConfig:
    """A reward for what is new, beside that of the environment, around any algorithm that acts in
    an environment."""

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

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> IntrinsicConfig:
        """Make a config of the table `intrinsic`.

        Raises:
            ValueError: a key is unknown, or a value is not allowed for its key; names both.
        """
        config = from_table(cls, "intrinsic", table)
        config.validate()
        return config

    def validate(self) -> None:
        """
        Raises:
            ValueError: a value is out of range; names the key.
        """
        for key in ("coefficient", "lr", "clip", "features"):
            if not getattr(self, key) > 0:
                raise ValueError(f"intrinsic.{key} = {getattr(self, key)}: must be above 0")
        if not 0 <= self.gamma_int < 1:
            raise ValueError(f"intrinsic.gamma_int = {self.gamma_int}: must be at least 0, below 1")
        if not 0 < self.predictor_share <= 1:
            raise ValueError(
                f"intrinsic.predictor_share = {self.predictor_share}: must be above 0, at most 1"
            )
        try:
            ModelConfig.parse(self.model)
        except ValueError as error:
            raise ValueError(f"intrinsic.{error}") from error
