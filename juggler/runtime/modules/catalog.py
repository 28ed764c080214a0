"""Catalog: what the default module is made of, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from torch import nn

from juggler.runtime.modules.cores import RecurrentCore
from juggler.runtime.modules.distributions import DistributionSpec
from juggler.runtime.modules.encoders import TreeEncoder, build_encoder
from juggler.runtime.modules.heads import policy_head
from juggler.runtime.modules.layers import MLP, initialized
from juggler.runtime.modules.model_config import ModelConfig


class Catalog:
    """Builds the parts of an `ActorCritic`, each in a method that a subclass may override.

        class WithMyEncoder(Catalog):
            def build_encoder(self):
                return MyEncoder(self.observation_space)  # has a `size`

    A run takes the name of a catalog where it takes that of a module.

    Attributes:
        config_class: what `model_config` must be; a subclass may add keys in one of its own.
        observation_space: of the environment, or behind the connectors.
        action_space: the same.
        config: the model_config, of `config_class`.
    """

    config_class: type[ModelConfig] = ModelConfig

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        model_config: Mapping[str, Any],
    ) -> None:
        """Raises:
        ValueError: model_config has a wrong key or value.
        """
        self.observation_space = observation_space
        self.action_space = action_space
        self.config = self.config_class.parse(model_config)

    def build_encoder(self) -> nn.Module:
        """Observations [B, ...], a tree of them if the space is one -> features [B, size]."""
        return build_encoder(self.observation_space, self.config)

    def build_core(self, features: int) -> nn.Module | None:
        """Features [B, T, F] and states -> features [B, T, size] and states, as `RecurrentCore`;
        none: the module has no state."""
        return None if self.config.recurrent == "none" else RecurrentCore(features, self.config)

    def build_policy_head(self, features: int, distribution: DistributionSpec) -> nn.Module:
        """Features [..., F] -> "action_dist_inputs" [..., D]."""
        return policy_head(features, distribution, self.config)

    def build_value_head(self, features: int) -> nn.Module:
        """Features [..., F] -> values [..., 1]."""
        return initialized(nn.Linear(features, 1), self.config.initializer, gain=1.0)

    def shares_encoder(self, encoder: nn.Module, core: nn.Module | None) -> bool:
        """Whether the value function uses the policy's encoder, and has none of its own."""
        if self.config.shared_value_layers is not None:
            return self.config.shared_value_layers
        small = isinstance(encoder, MLP) or (
            isinstance(encoder, TreeEncoder) and not encoder.has_images
        )
        return core is not None or not small
