"""The keys of the table `imitation`. No torch, because the driver reads this too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from juggler.learner.tables import from_table
from juggler.runtime.modules.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ImitationConfig:
    """Imitation of demonstrations: in place of the environment's rewards, a discriminator rewards
    steps that look as if they were demonstrated."""

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

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ImitationConfig:
        """Make a config of the table `imitation`.

        Raises:
            ValueError: a key is unknown, or a value is not allowed for its key; names both.
        """
        config = from_table(cls, "imitation", table)
        config.validate()
        return config

    def validate(self) -> None:
        """
        Raises:
            ValueError: a value is out of range; names the key.
        """
        if not self.demonstrations:
            raise ValueError(
                "imitation needs demonstrations: the data set to learn from, such as juggler "
                "record makes"
            )
        for key in ("lr", "minibatch_size", "limit"):
            if not getattr(self, key) > 0:
                raise ValueError(f"imitation.{key} = {getattr(self, key)}: must be above 0")
        if not self.gradient_penalty >= 0:
            raise ValueError(
                f"imitation.gradient_penalty = {self.gradient_penalty}: must be at least 0"
            )
        try:
            ModelConfig.parse(self.model)
        except ValueError as error:
            raise ValueError(f"imitation.{error}") from error
